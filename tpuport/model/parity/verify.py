"""Comparison of a port with eager PyTorch, on the same inputs and the same random numbers."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.device_mark import tag
from tpuport.foundation.interop.seen_device import seen_device
from tpuport.foundation.interop.shared_memory import computed, lazy_clone
from tpuport.foundation.patching.shim import installed
from tpuport.foundation.pytree.clone import clone_module, parameter_like
from tpuport.model.parity import global_names
from tpuport.model.parity.call import Call, fork
from tpuport.model.parity.judge import Judge
from tpuport.model.parity.same_numbers import SameNumbers
from tpuport.model.parity.structure import Pair, as_tensor, pairs
from tpuport.model.parity.uncheckpointed import Uncheckpointed
from tpuport.reports.records import Kind, Parity
from tpuport.tracing.core.context import KeyStream
from tpuport.tracing.core.export import to_torch
from tpuport.tracing.core.keys import next_key
from tpuport.tracing.core.precision_seen import RTOL, Precision, tolerance
from tpuport.tracing.core.reentrancy import SWAPS, part_of_program
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.guards.kept_iterators import advances_iterator
from tpuport.tracing.guards.outside_tensors import OutsideWrites
from tpuport.tracing.patches.host_draws import HostDraws
from tpuport.tracing.patches.manual_seed import ManualSeed
from tpuport.tracing.patches.tensor_subclass import TensorSubclass
from tpuport.tracing.patches.truncated_normal import TruncatedNormal
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.session.activate import eager_compiled
from tpuport.tracing.state.held_generators import holds_generator
from tpuport.tracing.state.module_state import state_tree


def eager_copy(module: torch.nn.Module, *, trainable: bool = False) -> torch.nn.Module:
    """Copy a module to run it eagerly.

    Parameters are shared (or fresh leaves if `trainable`), buffers are copied. What is large is
    copied when it is written. Other tensors that require grad (a graph made them, or
    `torch.func.functional_call` put them in place of parameters) do so, too.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            if not trainable:
                return tensor
            return parameter_like(lazy_clone(tensor), tensor)
        made = lazy_clone(tensor).requires_grad_(tensor.requires_grad)
        made = made if tensor.is_leaf else computed(made)
        vars(made).update(vars(tensor))
        return made

    return clone_module(module, copy, advances_iterator)[0]


class SavedTensorNeeded(BaseException):
    """Signal that a backward pass ran inside code whose saved tensors were dropped."""


def without_saved_tensors() -> Any:
    """Return a context that drops what autograd saves, so that eager takes no more memory.

    Code that asks for requires_grad or is_grad_enabled() is answered as the user's call would be.
    """

    def unpack(nothing: None) -> torch.Tensor:
        raise SavedTensorNeeded

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack)


def takes_gradients(error: BaseException) -> bool:
    """Return whether code failed without its saved tensors, because it takes gradients itself."""
    # torch.func refuses hooks on what it saves.
    return isinstance(error, SavedTensorNeeded) or "saved tensor hooks" in str(error)


@contextlib.contextmanager
def in_eager(call: Call, *modes: Any, saves: bool = True) -> Iterator[None]:
    """Run the code of a call in eager PyTorch, under modes, as its program does.

    Unless `saves`, nothing is kept for a backward pass of a call whose gradients are not compared.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(SWAPS)
        stack.enter_context(eager_compiled())
        patches = (Uncheckpointed, ManualSeed, TensorSubclass, TruncatedNormal)
        # Under `porting()` a script's own random numbers are drawn by its Python.
        drawn = () if call.tracer.takes_gradients else (HostDraws,)
        stack.enter_context(installed((*patches, *drawn)))
        for mode in modes:
            stack.enter_context(mode)
        if call.draws_on_host:
            stack.enter_context(host_randomness.at(call.host))
        stack.enter_context(torch.set_grad_enabled(call.trainable or call.in_grad_mode))
        if not (call.trainable or saves):
            stack.enter_context(without_saved_tensors())
        stack.enter_context(part_of_program())
        stack.enter_context(call.tracer.casting.in_force())
        yield


@dataclass(frozen=True)
class Reference:
    """What eager PyTorch made of a call.

    Attributes:
        out: Its result.
        module: The module after the call; None for a function.
        before: Its parameters before the call, which may have put other tensors in their place.
        given: The arguments after the call: positional ones and keywords.
        coarsest: The tolerance of the coarsest dtype that it computed in.
        drew: Whether it drew random numbers.
        numbers: The mode that supplied them; None without one.
    """

    out: Any
    module: torch.nn.Module | None
    given: tuple[Any, Any]
    coarsest: float
    drew: bool = False
    numbers: SameNumbers | None = None
    before: dict[str, torch.nn.Parameter] = dataclasses.field(default_factory=dict)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return what gradients are compared of, by name: what the call began with."""
        made = {} if self.module is None else torch.nn.Module.named_parameters(self.module)
        return {**dict(made), **self.before}


# Returns eager's gradients by name.
Gradients = Callable[[Reference], dict[str, torch.Tensor | None]]


class Verifier:
    """A comparison of calls with eager PyTorch: of each method's first one, or of every one.

    `done` has the code paths that were compared and agree; later calls of them are not compared,
    unless `always` is set.
    """

    def __init__(
        self, ported: Any, target: torch.nn.Module | Callable[..., Any], rtol: float | None
    ) -> None:
        self.ported, self.target, self.rtol = ported, target, rtol
        self.done: set[Any] = set()
        self.always = False
        self.changed_outside: list[str] = []
        self.why_no_float64 = ""
        # What eager PyTorch wrote to outside of the module.
        self.outside = OutsideWrites(())
        # Whether eager keeps what a backward pass needs, because the code runs one itself.
        self.saves = False
        # What the port kept for the backward pass that `check` compares: it tells the decisions
        # that it took.
        self.kept: list[Any] = []

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, trainable: bool = False
    ) -> Call:
        """Describe a call that is about to run."""
        key = next_key()
        return Call.of(self.ported, method, args, kwargs, key, trainable=trainable)

    def reference(self, call: Call) -> Reference:
        """Run eager PyTorch."""
        try:
            return self._reference(call)
        except (SavedTensorNeeded, RuntimeError) as error:
            if not takes_gradients(error):
                raise
        self.saves = True
        return self._reference(call)

    def _reference(self, call: Call) -> Reference:
        with self.ported.report.timed("observe"):
            before = call.tracer.outside(call.method).snapshot()
            self.outside = OutsideWrites(before.tensors)
            watch = (self.outside,) if self.outside else ()
            # Most models draw no random numbers: try without the mode that supplies them first.
            found = None
            # A generator needs it in any case.
            if not _has_generator((call.args, call.kwargs)) and not holds_generator(call.module):
                with host_randomness.restored([call.module, call.args, call.kwargs]) as states:
                    found = self.seen(call, *watch)
                    if found.drew or states.drawn() is not None:
                        found = None
            if found is None:
                self.outside.restore()
                found = self._with_numbers(call, *watch)
            self.changed_outside = before.changed()
            # What is filled at its first use, with a flag that says so, stays; a trace tells.
            refusal = None if self.changed_outside else self.outside.refusal()
            if refusal is not None:
                self.outside.restore()
                raise refusal
        return found

    def _with_numbers(self, call: Call, *watch: Any) -> Reference:
        """Run eager PyTorch with the random numbers of the port.

        Where it draws from the host's generators what no key gives, all of Python's numbers are
        those of the host.
        """
        with host_randomness.restored([call.module, call.args, call.kwargs]) as states:
            found = self.seen(call, SameNumbers.of(call), *watch)
            if states.drawn() is None or call.draws_on_host:
                return found
        call.tracer.drawing.add(call.method)
        self.outside.restore()
        return self._with_numbers(call, *watch)

    @contextlib.contextmanager
    def writes_restored(self) -> Iterator[None]:
        """Take back what eager PyTorch wrote to outside of the module if the block raises."""
        try:
            yield
        except BaseException:
            self.outside.restore()
            raise

    def seen(self, call: Call, *modes: Any) -> Reference:
        """Run eager PyTorch under modes, and note in which dtypes it computes."""
        seen = Precision()
        found = self.run(call, *modes, seen)
        coarsest = max((RTOL[dtype] for dtype in seen.dtypes), default=0.0)
        return dataclasses.replace(found, coarsest=coarsest, drew=seen.drew)

    def run(
        self,
        call: Call,
        *modes: Any,
        on_module: Callable[[torch.nn.Module], None] | None = None,
    ) -> Reference:
        """Run eager PyTorch under modes; one of `SameNumbers` serves generators in the call.

        `on_module` is called with the copy of the module that runs.
        """
        numbers = next((m for m in modes if isinstance(m, SameNumbers)), SameNumbers.of(call))
        module, before = None, {}
        function: Callable[..., Any] = self.target  # type: ignore[assignment]
        if call.module is not None:
            module = self.ported._eager(call.module, call.values())
            module = eager_copy(module, trainable=call.trainable)
            before = dict(torch.nn.Module.named_parameters(module))
            function = call.tracer.method(module, call.method)
            if on_module is not None:
                on_module(module)
        args, kwargs = host_arguments((call.args, call.kwargs), numbers)
        _put_on_accelerator(module, self.target, (args, kwargs))
        of_copy = global_names.of_copy(self.target, module)
        with of_copy, in_eager(call, *modes, saves=self.saves):
            out = call.tracer.casting.restored(function(*args, **kwargs))
        supplied = numbers if numbers in modes else None
        return Reference(out, module, (args, kwargs), 0.0, numbers=supplied, before=before)

    # -- comparing ---------------------------------------------------------------------------------

    def check(
        self,
        call: Call,
        expected: Reference,
        found: list[tuple[Kind, Pair]],
        gradients: Gradients | None = None,
    ) -> list[Parity]:
        """Compare values; what is beyond the tolerance is compared in further runs.

        Args:
            call: The call that the values are of.
            expected: What eager PyTorch made of it.
            found: The values, each with its kind.
            gradients: Returns eager's gradients by name, computed from a reference.
        """
        kept, self.kept = self.kept, []
        records = [self.record(kind, pair, expected.coarsest) for kind, pair in found]
        doubtful = {i for i, one in enumerate(records) if not one.ok and not one.problem}
        if not doubtful:
            return records
        judge = Judge(self, call, gradients, kept)
        for index in sorted(doubtful):
            judge.note(index, *found[index], records[index])
        self.why_no_float64 = judge.run(lambda k, p: self.record(k, p, expected.coarsest))
        for index in doubtful:
            records[index] = judge.verdict(index, records[index])
        return records

    def record(self, kind: Kind, pair: Pair, coarsest: float) -> Parity:
        """Compare one value, element by element."""
        if pair.problem:
            return Parity(
                *(pair.path,), kind=kind, shape=(), dtype="", max_abs=math.inf, max_rel=math.inf,
                where=(), expected=math.nan, got=math.nan, tolerance=0.0, problem=pair.problem,
            )  # fmt: skip
        want, have = (as_tensor(value) for value in (pair.want, pair.have))
        if isinstance(pair.have, jax.Array):
            # State has jax's dtypes (64-bit ones in 32 bits); tensors have torch's own dtype.
            have = have.to(want.dtype)
        return Parity.compare(
            pair.path,
            _widened(want),
            _widened(have),
            kind=kind,
            tolerance=self._tolerance(want.dtype, kind, coarsest),
            dtype=str(want.dtype).removeprefix("torch."),
        )

    def _tolerance(self, dtype: torch.dtype, kind: Kind, coarsest: float) -> float:
        if not dtype.is_floating_point and not dtype.is_complex:
            return 0.0
        accepted = tolerance(dtype, self.rtol)
        if self.rtol is not None:
            return accepted
        accepted = max(accepted, coarsest)
        # The backward pass rounds at each step what the forward pass has rounded already.
        lower = accepted > RTOL[torch.float32] and kind == "gradient"
        return 3 * accepted if lower else accepted


def outputs(expected: Reference, out: Any, given: Any) -> list[tuple[Kind, Pair]]:
    """Pair the results of a call, and its arguments after it, with eager PyTorch's."""
    found: list[tuple[Kind, Pair]] = [("output", p) for p in pairs(expected.out, out, "output")]
    return found + [("mutated argument", p) for p in pairs(expected.given, given, "argument")]


def _put_on_accelerator(module: torch.nn.Module | None, target: Any, given: Any) -> None:
    """Tag eager's tensors as on the accelerator if code sees traced tensors there."""
    if seen_device() is None:
        return
    leaves = pytree.flatten(given)[0]
    if module is not None:
        # What the copy shares with the user's module (torch's distributions) must not be tagged.
        own = {id(leaf) for leaf in state_tree(target).leaves.values()}
        leaves += [leaf for leaf in state_tree(module).leaves.values() if id(leaf) not in own]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tag(leaf)


def _widened(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype in (torch.bfloat16, torch.float16) or (
        tensor.dtype.itemsize == 1 and tensor.is_floating_point()
    ):
        tensor = tensor.float()
    return backend.to_numpy_array(tensor)


def host_arguments(value: Any, mode: SameNumbers) -> Any:
    """Copy call arguments to plain CPU tensors, and replace generators by the program's streams."""

    leaves, spec = pytree.flatten(value, objects=True)
    made = []
    for leaf in leaves:
        if isinstance(leaf, torch.Generator):
            # The stand-in draws from the stream that the port uses for the same argument.
            stand_in = type(leaf)()
            seed = torch.empty((), dtype=torch.int64).random_(generator=fork(leaf)).item()
            ident = stand_in._cdata  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
            mode.generators[ident] = KeyStream(backend.key_of(int(seed)))
            made.append(stand_in)
        else:
            made.append(_host_copy(leaf))
    return pytree.unflatten(spec, made)


def _host_copy(leaf: Any) -> Any:
    made = to_torch(leaf)
    if not isinstance(leaf, torch.Tensor):
        return made
    made = made.detach().clone() if made is leaf else made.detach()
    return made if not leaf.requires_grad else computed(made.requires_grad_())


def _has_generator(value: Any) -> bool:
    leaves, _ = pytree.flatten(value)
    return any(isinstance(leaf, torch.Generator) for leaf in leaves)


def buffers(call: Call, expected: Reference, after: dict[str, Any]) -> list[tuple[Kind, Pair]]:
    """Pair each buffer, parameter and tensor attribute that the call changed with eager's.

    Args:
        call: The call.
        expected: What eager PyTorch made of it.
        after: All state of the ported model after it, by name.
    """
    if expected.module is None:
        return []
    theirs = state_tree(expected.module).leaves
    found: list[tuple[Kind, Pair]] = []
    for name, value in after.items():
        is_new = call.state.get(name) is not value
        for fqn, one in stacked_params.unstack({name: value}).items():
            want = theirs.get(fqn)
            wrote = isinstance(want, torch.Tensor) and (want.is_inference() or want._version)
            if want is not None and (is_new or wrote):
                found.append(("buffer", Pair(f"buffer.{fqn}", want, one)))
    return found
