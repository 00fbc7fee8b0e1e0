"""One trace of one program: its random keys, its host constants, and its recorded effects."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.core import Tracer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpuport.foundation.interop import backend
from tpuport.foundation.patching.shim import Shim
from tpuport.foundation.pytree import is_sparse
from tpuport.reports.records import AttentionCall
from tpuport.tracing.core import active, int64
from tpuport.tracing.core.errors import FOR_VALUES, port_error
from tpuport.tracing.core.guards import Guards, lost_gradient
from tpuport.tracing.core.placement import Placement
from tpuport.tracing.core.shared_tensors import SharedTensors
from tpuport.tracing.core.storage import Storage, detaching, differentiable, memory_of, parts_of
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.view_steps import (
    Detach,
    retyping_steps,
    sign_steps,
    strided_step,
)


@dataclass
class KeyStream:
    """Numbered keys from one base key: the n-th random op of a program folds n into the base.

    `count` is traced after a branch or loop whose number of draws depends on data. In a block that
    several share, numbers count from `start`.
    """

    base: jax.Array
    count: int | jax.Array = 0
    used: bool = False
    start: jax.Array | None = None

    @property
    def number(self) -> int | jax.Array:
        """Return the number of the next key."""
        return self.count if self.start is None else self.start + self.count

    def next(self) -> jax.Array:
        """Return a key that this stream has never returned before."""
        self.used = True
        key = jax.random.fold_in(self.base, self.number)
        self.count += 1
        return key


@dataclass(eq=False)
class Effects:
    """The storages and numbers that a part of a trace created, and the storages that it wrote.

    Regions (checkpoint, cond) turn them into outputs. A write to a host tensor happens while
    tracing: once, however many rounds a loop has.
    """

    created: dict[int, "weakref.ref[Storage]"] = field(default_factory=dict)
    before: dict[int, tuple[Storage, jax.Array, int]] = field(default_factory=dict)
    numbers: "list[weakref.ref[Any]]" = field(default_factory=list)
    # The tensors that got another storage by `x.data = y`, with their old one.
    rebound: dict[int, tuple[TracedTensor, Storage, Any]] = field(default_factory=dict)
    # How many host tensors the trace had made before, and whether one of those was written.
    made_before: int = 0
    wrote_on_host: bool = False
    # Whether this part is one of several paths, or runs more than once while tracing: what it does
    # to host tensors from before then belongs in the program.
    repeats: bool = False

    def rebinding(self, tensor: TracedTensor) -> None:
        """Record a tensor that is about to get another storage."""
        if tensor._storage.serial not in self.created:
            before = (tensor, tensor._storage, tensor._chain)
            self.rebound.setdefault(id(tensor), before)

    def undo(self) -> None:
        """Give what was written and rebound its old value, for a trace around this part."""
        for storage, value, _ in self.before.values():
            storage.value, storage.version = value, storage.version + 1
        for tensor, storage, chain in self.rebound.values():
            tensor.rebind(storage, chain)


@dataclass(frozen=True, eq=False)
class LiftedCheck:
    """An exception that the user's code raises on a traced condition, lifted out of the program.

    Two that raise the same at one place are equal, so that repeated blocks have equal programs.
    """

    error: BaseException
    site: str

    @property
    def exception(self) -> BaseException:
        """Return what to raise: of a call on the host, what it raised there."""
        happened = getattr(self.error, "happened", None) or self.error
        return happened.with_traceback(None)

    @property
    def _key(self) -> tuple[type, str, str]:
        # The text of a traced number in it cannot be compared, that of the sum can.
        return type(self.error), f"error: {self.error}", self.site

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiftedCheck) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def no_policy(fqn: str) -> str | None:
    """Return None: the default is that no module has a remat policy."""
    del fqn
    return None


@dataclass
class HostConstant:
    """A CPU tensor that met a traced one in an op and so became part of the program."""

    tensor: torch.Tensor
    value: jax.Array
    version: int | None


@dataclass(frozen=True)
class TraceOptions:
    """How a program is traced; fixed before the trace starts.

    Attributes:
        target: The platform that the program will run on: "cpu", "tpu".
        mesh: The devices that its values are spread over.
        placement: Where activations go on the mesh; None if none has a place.
        mixes_axes: Whether XLA's partitioner may mix up axes of the mesh in a product.
        remat: Gives the remat policy of a module by its fqn, if it has one (`core.remat_policy`).
        patches: Replacements of torch's functions that hold while it runs.
        hoist: Makes a host constant an argument of the program; None for one that is inlined.
        takes_gradients: Whether torch's autograd differentiates the program, as under `porting()`.
    """

    target: str = field(default_factory=jax.default_backend)
    mesh: jax.sharding.Mesh | None = None
    placement: Placement | None = None
    mixes_axes: bool = False
    remat: Callable[[str], str | None] = no_policy
    patches: tuple[type[Shim], ...] = ()
    hoist: Callable[[torch.Tensor], jax.Array | None] | None = None
    takes_gradients: bool = False


@dataclass(eq=False)
class Recorder:
    """What a trace writes down for its caller.

    Attributes:
        counters: What the report counts.
        guards: What the program read from outside, to be compared before later calls.
        checks: The exceptions that were lifted out of the program, in order.
        refusal: The first error of ours, which the user's code may have caught.
        restart: The first restart of the trace, which it may have caught as well.
        block: The block that is traced for its family, and the name of the family.
        text: The line that last made text of a traced value.
        hosts: What the report says of the functions that run on the host.
        tapes: What is drawn on the host before each call: one tape at most.
        may_tape: Whether another attempt may have a tape.
    """

    counters: "Counters" = field(default_factory=lambda: Counters())
    guards: Guards = field(default_factory=Guards)
    checks: list[LiftedCheck] = field(default_factory=list)
    refusal: Exception | None = None
    restart: BaseException | None = None
    block: tuple[str, str] | None = None
    text: str | None = None
    hosts: list[Any] = field(default_factory=list)
    tapes: list[Any] = field(default_factory=list)
    may_tape: bool = False

    def scope_of(self, name: str) -> str:
        """Return the scope that a module's instructions are named after in the compiled program."""
        if self.block is not None:
            block, all_blocks = self.block
            if name == block or name.startswith(block + "."):
                return all_blocks + name[len(block) :]
        return name


class Trace:
    """One trace: its options, its recorder, and the state that changes while it runs.

    Args:
        keys: The program's keys; None for a program that was called without a key: a random op is
            then an error.
        options: How the program is traced.
    """

    def __init__(self, keys: KeyStream | None, options: TraceOptions | None = None) -> None:
        self.options = options or TraceOptions()
        self.recorder = Recorder()
        self.keys = keys
        # By the address of the C++ generator: torch hands a new Python object around it to each op.
        self.generators: dict[int, KeyStream] = {}
        self.constants: dict[int, HostConstant] = {}
        self.promoted: dict[int, tuple[torch.Tensor, Storage]] = {}
        # By the address of their memory: tensors that were detached from a promoted one that shares
        # it, the step to them, and the region where that was made.
        self.detached: dict[int, list[tuple[torch.Tensor, Detach, int]]] = {}
        self.substitutes: dict[int, TracedTensor] = {}
        self.effects: list[Effects] = []
        # Serials of the storages in which the code asked for a place, counted from their start.
        self.offsets_read: set[int] = set()
        # The nested traces that are running: a value cached in one may be a tracer that dies with
        # it.
        self.regions: list[int] = [0]
        self.count_regions = 0
        # The number of the first lifted check that failed, as a value of the program.
        self.error_code: Storage | None = None
        # Whether an argument is int32: as an array of JAX it may stand for one of int64.
        self.takes_int32 = False
        # Whether an op runs whose operands were checked (`dispatch.value_checks`).
        self.checked = False
        self.explorer: active.Decider | None = None
        # Reads the globals and the like that the code may change (`guards.global_state`).
        self.outside_values: Callable[[], Any] | None = None
        # By the place of a join in the code: the size of its last result, and the frames around it.
        self.joins: dict[Any, Any] = {}
        # How many ops ran, and how often a loop ran when that was looked at.
        self.count_ops = 0
        self.loop_samples: dict[Any, int] = {}
        # Whether there are tensors that are rows of one array (`series`).
        self.has_rows = False
        # Whether a list has as many tensors as data says: see `dynamic_shapes.counted_rows`.
        self.has_runs = False
        self.blocks: active.BlockTracer | None = None
        self.dispatch_mode: TorchDispatchMode | None = None
        self.function_mode: TorchFunctionMode | None = None
        self.closed = False
        # Storages of host tensors made in this trace, kept alive so that no address is reused.
        self.made: dict[int, tuple[int, Any]] = {}
        # Whether a number or size that depends on data has come up; until then no op needs to look
        # for one.
        self.dynamic = False
        # Whether a tensor has had a size that depends on data.
        self.has_sizes = False
        # Whether any traced value was made a Python number.
        self.has_numbers = False
        # Whether the program has a branch on a traced value, as `lax.cond`.
        self.branches = False
        # Whether a module with a remat policy runs: those inside it get no region of their own.
        self.in_remat = False
        # Whether TorchScript's interpreter runs.
        self.in_script = False
        # Whether an exception is made that the program may raise; a trace knows no numbers for it.
        self.makes_error = False
        self.mask_counts: dict[int, tuple[jax.Array, Any]] = {}
        self.shared = SharedTensors()
        # Lines whose attention was given to the matrix of scores.
        self.full_attention: set[tuple[str, int]] = set()
        # The structure of attention masks, by the id of the array.
        self.masks: dict[Any, Any] = {}
        # Arrays that represent int64 in a narrower dtype, by id. The references are weak.
        self._int64: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Arrays that an operation has read, by id: see `was_read` in `view_steps`.
        self.read_arrays: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # The ported module and those inside it, by id, with their fqns.
        self.own_modules: dict[int, str] = {}
        # Storages numbered from here on are made by the program, not its state or arguments.
        self.first_serial = 0
        # The tensors that stand for the call's arguments, by id.
        self.arguments: set[int] = set()
        # The tensors that `backward()` gives a gradient, by id.
        self._leaves: weakref.WeakValueDictionary[int, TracedTensor] = weakref.WeakValueDictionary()
        self._leaf_count = 0
        # Constants that became leaves, kept alive so that no id is reused.
        self.constant_leaves: list[torch.Tensor] = []
        # The arguments and state that code inside asked torch.autograd for a gradient of, and the
        # line.
        self.inner_starts: dict[int, tuple[TracedTensor, str]] = {}
        # While a custom backward runs: the tensors from outside that get a gradient, by id, and the
        # storages that it must not write.
        self.gathered: dict[int, TracedTensor] = {}
        self.read_only: set[int] = set()
        # And the number of the first host tensor that it may write: one that it makes itself.
        self.writable_from = -1
        # The storages that a custom backward reads from outside.
        self.held: list[Storage] = []
        # The random numbers of the program whose backward this trace is, and the same as its own.
        self.resumed: tuple[Trace, KeyStream | None, KeyStream | None] | None = None

    def remat_policy(self, fqn: str) -> str | None:
        """Return the remat policy of a module, None where it or a module around it decides."""
        return None if self.in_remat else self.options.remat(fqn)

    def release(self) -> None:
        """Drop the tracers that a finished trace still holds, keeping what later calls need."""
        self.constants.clear()
        self.masks.clear()
        self.promoted.clear()
        self.detached.clear()
        self.substitutes.clear()
        self.options = replace(self.options, hoist=None, placement=None)
        self.keys = None
        self.error_code = None
        for storage in self.held:
            storage.value = None  # pyright: ignore[reportAttributeAccessIssue]  (nothing reads it)
        self._leaves.clear()
        if self.blocks is not None:
            self.blocks.release()

    def note_int64(self, value: Any) -> None:
        """Record that a traced array represents an int64 array."""
        if isinstance(value, Tracer):
            self._int64[id(value)] = value

    def holds_int64(self, value: Any) -> bool:
        """Return whether an array is known to represent an int64 array."""
        return value is not None and self._int64.get(id(value)) is value

    # -- gradients inside the program --------------------------------------------------------------

    def add_leaf(self, tensor: TracedTensor) -> str:
        """Record a tensor that `backward()` gives a gradient, and return a name for its value."""
        self._leaves[id(tensor)] = tensor
        self._leaf_count += 1
        return f"leaf {self._leaf_count}"

    def gradient_leaves(self, *, retained: bool = False) -> list[TracedTensor]:
        """Return the tensors that `backward()` gives a gradient, or those that retain one only."""
        if retained:
            return [tensor for tensor in self._leaves.values() if not tensor.is_leaf]
        known = (*self.substitutes.values(), *self._leaves.values())
        return list((self.gathered | {id(t): t for t in known if t.requires_grad}).values())

    def as_leaf(self, tensor: torch.Tensor) -> TracedTensor:
        """Return a traced tensor that replaces a constant, but none of its aliases."""
        storage = Storage(jnp.asarray(backend.to_jax(tensor.detach())), self)
        made = self.substitutes[id(tensor)] = TracedTensor(storage, (), tensor, storage.value)
        self.constant_leaves.append(tensor)
        return made

    # -- effects -----------------------------------------------------------------------------------

    def created(self, storage: Storage) -> None:
        """Record a new storage."""
        for effects in self.effects:
            effects.created[storage.serial] = weakref.ref(storage)

    def created_number(self, node: Any) -> None:
        """Record a new traced number; ops look for integers among their sizes from now on."""
        self.dynamic = self.dynamic or node.kind is int
        for effects in self.effects:
            effects.numbers.append(weakref.ref(node))

    def writing(self, storage: Storage) -> None:
        """Record a storage that is about to be written, with its old value.

        Raises:
            PortError: a custom backward may not write it.
        """
        if storage.serial in self.read_only:
            raise port_error(
                "the backward of a custom autograd function writes to a tensor from outside of it"
                " (running statistics, a counter, a sum over calls); a backward pass returns only"
                " gradients",
                code="TPU403",
                remedy="write it in forward, put the layer that does in evaluation mode, or leave"
                " the class that calls it to eager PyTorch: --eager NAME, porting(eager=(...))",
            )
        for effects in self.effects:
            if storage.serial not in effects.created and storage.serial not in effects.before:
                effects.before[storage.serial] = (storage, storage.held, storage.version)

    @contextlib.contextmanager
    def recording(self, *, repeats: bool = False) -> Iterator[Effects]:
        """Record the effects inside the block.

        Args:
            repeats: Whether it is one of several paths, or may run more than once.
        """
        effects = Effects(made_before=len(self.made), repeats=repeats)
        self.effects.append(effects)
        self.count_regions += 1
        self.regions.append(self.count_regions)
        counts = dict(self.mask_counts)
        try:
            yield effects
        finally:
            self.effects.remove(effects)
            self.regions.pop()
            # Counts computed inside are inner tracers, which must not leave the nested trace.
            self.mask_counts = counts

    # -- randomness --------------------------------------------------------------------------------

    @property
    def streams(self) -> list[KeyStream]:
        """Return the program's own key stream and those of the generators among its arguments."""
        own = [] if self.keys is None else [self.keys]
        return own + list(self.generators.values())

    @property
    def draws(self) -> list[int | jax.Array]:
        """Return how often each stream has been drawn from."""
        return [stream.count for stream in (*self.streams, *self.recorder.tapes)]

    @draws.setter
    def draws(self, counts: Sequence[int | jax.Array]) -> None:
        for stream, count in zip((*self.streams, *self.recorder.tapes), counts, strict=True):
            stream.count = count

    def next_key(self, generator: torch.Generator | None) -> jax.Array:
        """Return the key for the next random op.

        It is from `generator`'s stream if that was an argument of the program.
        """
        if generator is not None:
            ident = generator._cdata  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
            if ident in self.generators:
                return self.generators[ident].next()
            if getattr(generator, "is_held", False):
                raise port_error(
                    "random numbers are drawn from a torch.Generator that the module holds, and"
                    " that the call has not seeded",
                    code="TPU404",
                    remedy="pass the generator as an argument, or seed it in the call",
                )
        if self.keys is None:
            raise port_error(
                "a random operation ran in a program that was given no key",
                code="TPU401",
                remedy="pass a key: ported.apply(params, buffers, jax.random.key(0), ...)",
            )
        return self.keys.next()

    def check(self, failed: jax.Array, error: BaseException, site: str) -> None:
        """Record that the program fails with `error` if `failed`; the first failing check wins."""
        if self.error_code is None:
            return
        check, checks = LiftedCheck(error, site), self.recorder.checks
        if check not in checks:
            error.add_note(f"{FOR_VALUES}{site}")
            checks.append(check)
        number, code = checks.index(check) + 1, self.error_code.value
        self.error_code.set(jnp.where((code == 0) & failed, number, code))

    @contextlib.contextmanager
    def values_checked(self) -> Iterator[None]:
        """Make no checks of operands inside: an op that runs as other ops was checked itself."""
        before, self.checked = self.checked, True
        try:
            yield
        finally:
            self.checked = before

    # -- host constants ----------------------------------------------------------------------------

    def constant(self, tensor: torch.Tensor, *, wide: bool = False) -> jax.Array:
        """Return the jax value of a host tensor, made once for each version of the tensor.

        Args:
            tensor: The tensor.
            wide: Whether the operation takes an int64 value that does not fit in 32 bits.
        """
        value = self._constant(tensor)
        if int64.is_wide(value) and not wide:
            raise port_error(
                "an int64 constant that does not fit in 32 bits reaches an operation that holds it"
                " in 32",
                code="TPU106",
                remedy="use smaller numbers, or set jax_enable_x64 before converting",
            )
        return value

    def _constant(self, tensor: torch.Tensor) -> jax.Array:
        for tape in self.recorder.tapes:
            if tape.has(tensor):
                return tape.in_program(tensor)._elem
        # Tensors made under inference_mode do not count their writes.
        counted = None if tensor.is_inference() else tensor._version
        known = self.constants.get(id(tensor))
        if known is not None and counted is not None and known.version == counted:
            return known.value
        if self.is_foreign(tensor):
            if tensor.requires_grad and self.options.takes_gradients and torch.is_grad_enabled():
                raise lost_gradient(tensor)
            self.recorder.guards.note_tensor(tensor)
        if tensor.dtype is torch.int64 and not backend.fits(tensor):
            with jax.ensure_compile_time_eval(), int64.scope():
                value = jnp.asarray(backend.to_numpy_array(tensor))
        else:
            value = self.options.hoist(tensor) if self.options.hoist is not None else None
        if value is None:
            value = _constant(tensor)
        self.constants[id(tensor)] = HostConstant(tensor, value, counted)
        return value

    def note_made(self, value: Any) -> None:
        """Record host tensors that this trace made: a write to one of them is not seen outside."""
        if isinstance(value, torch.Tensor):
            if not isinstance(value, TracedTensor):
                key, memory = memory_of(value)
                self.made.setdefault(key, (len(self.made), memory))
                if is_sparse(value):
                    self.note_made(parts_of(value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.note_made(item)

    def is_foreign(self, tensor: Any) -> bool:
        """Return whether a host tensor existed before the trace.

        Such a tensor is state, which a write must not change while tracing.
        """
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, TracedTensor):
            return False
        return memory_of(tensor)[0] not in self.made

    def note_reads(self, operands: Iterable[Any]) -> None:
        """Record which operands of an operation on the host came from outside the trace."""
        for operand in operands:
            if self.is_foreign(operand):
                self.recorder.guards.note_tensor(operand)

    def promote(self, tensor: torch.Tensor) -> TracedTensor:
        """Make the storage of a host tensor a traced one, to write a traced value to it.

        Every alias of the tensor (PyTorch knows them by storage) reads the traced value from then
        on.
        """
        if tensor.layout is not torch.strided:
            raise port_error(
                f"a value of the program is written to a tensor with the layout {tensor.layout}",
                code="TPU201",
                remedy="make it dense before (.to_dense()), or the sparse tensor outside",
            )
        key = tensor.untyped_storage()._cdata
        if key not in self.promoted:
            if self.is_foreign(tensor):
                self.recorder.guards.note_tensor(tensor)
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            empty: Any = torch.empty(0, dtype=tensor.dtype)
            flat = empty.set_(tensor.untyped_storage(), 0, (count,))
            drawn = [tape for tape in self.recorder.tapes if tape.has(tensor)]
            with contextlib.nullcontext() if drawn else jax.ensure_compile_time_eval():
                value = drawn[0].whole(tensor)._elem if drawn else int64.of_host(flat)
                storage = Storage(value, None)
            storage.stride, storage.trace = flat.stride(), self
            # It is as old as the host tensor: foreign ones are the oldest.
            number, _ = self.made.get(key, (-1, None))
            for effects in self.effects:
                if number >= effects.made_before:
                    effects.created[storage.serial] = weakref.ref(storage)
            if number < self.writable_from:
                self.read_only.add(storage.serial)
            self.promoted[key] = (tensor, storage)
        return self.alias(tensor)  # type: ignore[return-value]

    def alias(self, tensor: torch.Tensor) -> TracedTensor | None:
        """Return the traced tensor that replaces a host tensor, or None.

        The host tensor is a weight of the model, or its storage was promoted.
        """
        known = self.substitutes.get(id(tensor))
        if known is not None or not self.promoted:
            return known
        found = self.promoted.get(memory_of(tensor)[0])
        if found is None:
            return None
        written, storage = found
        offset: Any = torch.Tensor.storage_offset(tensor)
        count = storage.held.size * written.itemsize // tensor.itemsize
        window = strided_step(count, tensor.size(), tensor.stride(), offset)
        chain = (*retyping_steps(written.dtype, tensor.dtype), window, *sign_steps(tensor))
        root = _root(tensor)
        if not differentiable(tensor.dtype) or root is _root(written):
            return TracedTensor(storage, chain, tensor, None)
        return TracedTensor(storage, (self._detach(root, storage), *chain), tensor, detached=True)

    def _detach(self, root: torch.Tensor, storage: Storage) -> Detach:
        """Return the step from promoted memory to a host tensor that shares it without a gradient.

        `.detach()` and `.data` make such a tensor, of which autograd does not know.

        Raises:
            PortError: it was written to in a branch or loop that has ended.
        """
        known = self.detached.setdefault(memory_of(root)[0], [])
        for index, (other, step, region) in enumerate(known):
            if other is root and region in self.regions:
                return step
            if other is root:
                if step.graph.version:
                    raise port_error(
                        "a detached tensor from before a branch or loop is written to in it",
                        code="TPU403",
                        remedy="detach it where it is written, or write to a copy of it",
                    )
                del known[index]
                break
        made = detaching(storage.held, self)
        known.append((root, made, self.regions[-1]))
        return made


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a host tensor is a view of for autograd; itself if it is none."""
    base = tensor._base
    return tensor if base is None else base


def _constant(tensor: torch.Tensor) -> jax.Array:
    try:
        with jax.ensure_compile_time_eval():
            return backend.to_jax(tensor)
    except OverflowError as error:
        raise port_error(
            f"a constant of the program holds {error}",
            code="TPU106",
            remedy="jax.config.update('jax_enable_x64', True), or smaller numbers",
            cause=error,
        ) from error


@dataclass
class Counters:
    """The counts that the report shows, by name."""

    ops: dict[str, int] = field(default_factory=dict)
    shims: dict[str, int] = field(default_factory=dict)
    attention: list[AttentionCall] = field(default_factory=list)

    def copy(self) -> "Counters":
        """Return a copy of the counts so far."""
        return Counters(dict(self.ops), dict(self.shims), list(self.attention))

    def become(self, other: "Counters") -> None:
        """Reset the counts to those of an earlier copy."""
        self.ops, self.shims, self.attention = other.ops, other.shims, other.attention

    def since(self, before: "Counters") -> "Counters":
        """Return the counts since a copy was made."""
        ops, shims = (
            {name: count - then.get(name, 0) for name, count in now.items()}
            for now, then in ((self.ops, before.ops), (self.shims, before.shims))
        )
        return Counters(ops, shims, self.attention[len(before.attention) :])

    def add(self, other: "Counters") -> None:
        """Add the counts of another run."""
        for ours, theirs in ((self.ops, other.ops), (self.shims, other.shims)):
            for name, count in theirs.items():
                ours[name] = ours.get(name, 0) + count
        self.attention += other.attention


def current() -> Trace | None:
    """Return the trace running in this thread, if any."""
    trace = active.innermost()
    assert trace is None or isinstance(trace, Trace)
    return trace
