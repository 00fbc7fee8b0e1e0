"""The program cache: signatures, cached programs, and the causes of retraces."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from tpuport.foundation import pytree
from tpuport.foundation.interop.device_mark import is_tagged
from tpuport.reports.report import PortReport
from tpuport.tracing.attention.options import choice
from tpuport.tracing.core import arguments, int64
from tpuport.tracing.core.autocast import autocast_dtype, cuda_is_on
from tpuport.tracing.core.constants import HOIST_BYTES, uniform
from tpuport.tracing.core.context import LiftedCheck
from tpuport.tracing.core.jaxpr_dce import without_dead_code
from tpuport.tracing.core.placement import NOWHERE, Placement
from tpuport.tracing.scan_layers.jaxpr_equal import same_program, same_structure, same_text
from tpuport.tracing.state.lengths import Lengths
from tpuport.tracing.state.request import TraceResult


@dataclass(frozen=True)
class Signature:
    """The kind of call that a program is compiled for: its key in the program cache.

    `parts` names each argument with its type, to explain a retrace.
    """

    method: str
    key: Any
    parts: tuple[tuple[str, str], ...] = field(compare=False)


@dataclass
class CachedProgram:
    """A cached program, for one method and one signature of arguments and state.

    Attributes:
        run: the program; it takes the state as a tuple.
        outcome: what its trace gave.
        signature: what it is for.
        names: the names of the state it takes, in order.
        baked: state that is part of it.
        writes: whether it changes arguments.
        older: a program of the same signature for other values outside of the module.
        form: the structure of its arguments without their strings and numbers, and these in order.
        unread: by that order, those that its code does not look at.
        read: those that it does, or that nobody can tell.
        was_applied: whether a call has applied what it changes in Python state.
        tape: what is drawn on the host before each call; None if nothing is.
    """

    run: "JittedProgram"
    outcome: TraceResult
    signature: Signature
    names: list[str]
    baked: dict[str, jax.Array]
    writes: bool
    older: "CachedProgram | None" = None
    form: tuple[Any, list[Any]] = (None, [])
    unread: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    was_applied: bool = False
    tape: Any = None

    def changed(self, state: dict[str, Any]) -> str | None:
        """Say why the program is wrong for a state or for what is outside; None if it is right."""
        outside = self.outcome.trace.recorder.guards.changed()
        if outside is not None:
            return outside
        return None if all(state[n] is v for n, v in self.baked.items()) else ""

    def picked(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return the state that the program takes."""
        return tuple(state[name] for name in self.names)


_MOST_ALIKE = 4


class ProgramCache(dict[Signature, CachedProgram]):
    """Cached programs by signature, each with older ones for other values outside of the module."""

    def fitting(
        self, signature: Signature, state: dict[str, Any]
    ) -> tuple[CachedProgram | None, str | None]:
        """Return the program for a call, or None and what has changed since the newest one."""
        why = None
        known = self.get(signature)
        while known is not None:
            changed = known.changed(state)
            if changed is None:
                return known, None
            why, known = why or changed, known.older
        return None, why

    def add(self, signature: Signature, made: CachedProgram) -> None:
        """Add a program; of those with the same signature, the newest few are kept."""
        if self.get(signature) is not made:
            made.older, self[signature] = self.get(signature), made
        for _ in range(_MOST_ALIKE - 1):
            if made.older is None:
                return
            made = made.older
        made.older = None

    def drop(self, made: CachedProgram) -> None:
        """Remove a program, and the older ones of its signature."""
        self.pop(made.signature, None)


class VerifyAgain(Exception):
    """Values outside of the module changed: the new program has to be compared with eager too."""


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call.

    Attributes:
        values: the arrays; a `jax.ShapeDtypeStruct` where only the shape is known.
        metas: their dtypes and shapes in PyTorch, whose dtypes may be wider; of a generator its
            class.
        paths: their names.
        spec: the structure of the arguments.
        lengths: which of them are longer at each call; their count is the last value.
    """

    values: list[Any]
    metas: list[Any]
    paths: list[str]
    spec: pytree.TreeSpec
    lengths: Lengths | None = None


def flattened(given: Any, placement: Placement = NOWHERE) -> tuple[list[Any], CallArguments]:
    """Return the leaves of a call's (args, kwargs), and their arrays where the model is."""
    leaves, spec, paths = arguments.flatten_call(given)
    values, metas = arguments.argument_arrays(leaves, paths)
    return leaves, CallArguments(placement.arguments(values, paths), metas, paths, spec)


@dataclass
class BoundCall:
    """A call that is bound to its cached program, ready to run.

    Attributes:
        compiled: the program.
        leaves: the leaves of the call's arguments.
        given: their arrays and structure.
        state: all state of the model before the call, by name.
        key: the base key of the call's randomness.
        timing: a context that times the compilation and the run, on the first call.
    """

    compiled: CachedProgram
    leaves: list[Any]
    given: CallArguments
    state: dict[str, Any]
    key: jax.Array
    timing: Any

    @property
    def picked(self) -> tuple[Any, ...]:
        """Return the state that the program takes."""
        return self.compiled.picked(self.state)

    def run(self) -> Any:
        """Run the program."""
        with self.timing as is_first:
            results = self.compiled.run(self.picked, self.key, self.given.values)
            return jax.block_until_ready(results) if is_first else results


def signature_of(method: str, call: CallArguments, version: Any, host: frozenset[int]) -> Signature:
    """Return the signature of a call: its arguments, the version of the state, torch's modes.

    The values of the arguments in `host` are part of it.
    """
    metas, paths = call.metas, call.paths
    largest = {} if call.lengths is None else dict(call.lengths.sizes)
    parts = tuple(
        (path, "generator" if _is_class(meta) else _described(meta, index, largest))
        for index, (path, meta) in enumerate(zip(paths, metas, strict=True))
    )
    kinds = tuple(
        meta
        if _is_class(meta)
        else (meta.dtype, tuple(meta.shape), meta.stride(), meta.requires_grad, meta.is_leaf)
        for meta in metas
    )
    key = (call.spec.key, kinds, version, modes())
    if host:
        read = {paths[i]: np.asarray(call.values[i]) for i in sorted(host)}
        # Code may ask where a tensor is that Python reads, as for the device of what it makes.
        where = tuple(is_tagged(metas[i]) for i in sorted(host))
        key = (*key, where, tuple((path, value.tobytes()) for path, value in read.items()))
        parts += tuple((f"value of {path}", _shown(value)) for path, value in read.items())
    return Signature(method, key, parts)


def modes() -> tuple[Any, ...]:
    """Return the modes of torch and the options that a program is compiled for."""
    default = torch.get_default_dtype()
    flags = tuple(read() for read in _FLAGS)
    return torch.is_grad_enabled(), default, autocast_dtype(), cuda_is_on(), choice(), flags


# What code may ask torch for and branch on.
_FLAGS = (
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_float32_matmul_precision,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_benchmark,
    torch.get_num_threads,
)


def _described(meta: torch.Tensor, index: int, largest: Container[tuple[int, int]]) -> str:
    grad = " requires_grad" if meta.requires_grad else ""
    sizes = (
        f"up to {size}" if (index, dim) in largest else str(size)
        for dim, size in enumerate(meta.shape)
    )
    return f"{str(meta.dtype)[6:]}[{', '.join(sizes)}]{grad}"


def _is_class(meta: Any) -> bool:
    """Return whether the meta of an argument is the class of a generator."""
    return isinstance(meta, type)


def _shown(value: np.ndarray) -> str:
    return np.array2string(value, threshold=8, separator=", ").replace("\n", "")


def retrace_causes(
    last: Signature, signature: Signature, state_changes: Iterable[str]
) -> tuple[str, ...]:
    """Say why a call could not use the program of the last call of its method."""
    was, now = dict(last.parts), dict(signature.parts)
    causes = [
        f"{_cause_name(path)}: {was.get(path, 'absent')} -> {now.get(path, 'absent')}"
        for path in dict.fromkeys([*was, *now])
        if was.get(path) != now.get(path)
    ]
    if not causes and last.key[2] != signature.key[2]:
        names = ", ".join(state_changes) or "training mode"
        causes = [f"state of the module changed: {names}"]
    if not causes and last.key[0] != signature.key[0]:
        causes = [
            f"a non-tensor argument changed: {_static_difference(last.key[0], signature.key[0])}"
        ]
    if not causes:
        causes = [
            "strides, grad mode, autocast, default dtype, options of attention or"
            " flags of torch changed"
        ]
    return tuple(causes)


def _cause_name(path: str) -> str:
    start, is_value, argument = path.rpartition("value of ")
    return start + is_value + arguments.argument_name(argument)


def _static_difference(was: Any, now: Any) -> str:
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        for a, b in zip(was, now, strict=True):
            if a != b:
                return _static_difference(a, b)
    return f"{was!r} -> {now!r}"


class JittedProgram:
    """A jitted callable of (state, key, values); large constants are arguments of it, not literals.

    Args:
        closed: The traced program, a closed jaxpr.
        shape: The structure of its results.
        name: Its name in profiles and in the compile cache.
        place: Puts its large constants on the devices that it runs on.
        donate_state: Whether the state is donated: its memory is used for the results.
    """

    def __init__(
        self,
        closed: Any,
        shape: Any,
        name: str,
        *,
        place: Callable[[list[Any]], list[Any]],
        donate_state: bool = False,
    ) -> None:
        closed = without_dead_code(closed)
        self.jaxpr = closed.jaxpr
        big, small = [], {}
        for i, const in enumerate(closed.consts):
            if getattr(const, "nbytes", 0) < HOIST_BYTES:
                small[i] = const
            elif (element := uniform(const)) is None:
                big.append(const)
            else:
                # One element and a broadcast take no memory until XLA needs the array.
                small[i] = (element, const.shape)
        treedef = jax.tree.structure(shape)

        def run(consts: list[jax.Array], state: Any, key: jax.Array, values: Any) -> Any:
            program = jaxpr_as_fun(self._closed(consts))
            return jax.tree.unflatten(treedef, program(*jax.tree.leaves((state, key, values))))

        run.__name__ = run.__qualname__ = re.sub(r"\W+", "_", name)
        self.hoisted = place(big)
        self._small, self._treedef = small, treedef
        self._jitted = jax.jit(run, donate_argnums=(1,) if donate_state else ())
        # Programs derived from this one, its second derivative for example.
        self.derived: dict[Any, Any] = {}

    def __call__(self, state: Any, key: jax.Array, values: Any) -> Any:
        """Run the program, and compile it if it has not been yet."""
        return self._jitted(self.hoisted, state, key, values)

    def edited(
        self, edit: Callable[[ClosedJaxpr], ClosedJaxpr], given: Any, further: list[Any]
    ) -> Any:
        """Run the program in another form, which may take more arguments, inside of a trace.

        Args:
            edit: makes the other form.
            given: state, key and values.
            further: the arguments that follow them.
        """
        program = jaxpr_as_fun(edit(self._closed(self.hoisted)))
        return jax.tree.unflatten(self._treedef, program(*jax.tree.leaves(given), *further))

    def _closed(self, consts: list[jax.Array]) -> ClosedJaxpr:
        """Return the program with its constants; `consts` are the large ones."""
        rest = iter(consts)
        count = range(len(self.jaxpr.constvars))
        every = [_literal(self._small[i]) if i in self._small else next(rest) for i in count]
        return ClosedJaxpr(self.jaxpr, every)

    def same(self, other: "JittedProgram") -> bool:
        """Return whether both compute the same from the same inputs."""
        if self._small.keys() != other._small.keys():
            return False
        alike = same_structure(self._treedef, other._treedef)
        return alike and same_program(self._with_elements(), other._with_elements())

    def reads_like(self, other: "JittedProgram") -> bool:
        """Return whether both are written alike, whatever functions they hold."""
        if self._small.keys() != other._small.keys() or self._treedef != other._treedef:
            return False
        return same_text(self._with_elements(), other._with_elements())

    def _with_elements(self) -> ClosedJaxpr:
        """Return the program with one element of each constant whose elements are equal."""
        big = iter(self.hoisted)
        consts = [self._small.get(i, None) for i in range(len(self.jaxpr.constvars))]
        held = [next(big) if c is None else c[0] if isinstance(c, tuple) else c for c in consts]
        return ClosedJaxpr(self.jaxpr, held)

    def lower(self, state: Any, key: jax.Array, values: Any) -> Any:
        """Lower the program for arguments of such shapes; `values` may be shapes only."""
        return self._jitted.lower(self.hoisted, state, key, values)


def _literal(const: Any) -> Any:
    if not isinstance(const, tuple):
        return const
    with int64.scope():  # or an int64 element would lose half of its bits
        return jnp.broadcast_to(*const)


def raise_failed(checks: Sequence[LiftedCheck], code: jax.Array | None) -> None:
    """Raise the error of the check with this number, which waits for the device; 0 is none."""
    failed = 0 if code is None or not checks else int(code)
    if failed:
        raise checks[failed - 1].exception


def release(outcome: TraceResult) -> None:
    """Drop the tracers that a finished trace still holds, keeping what later calls need."""
    outcome.out_leaves = []
    outcome.state = {}
    outcome.mutated = {}
    outcome.put_leaves = []
    if outcome.argument_changes is not None:
        outcome.argument_changes.leaves = []
    outcome.error_code = None
    outcome.baked = {}
    outcome.trace.release()
    outcome.trace.recorder.guards.share()


_STAGES = {
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


@contextlib.contextmanager
def compile_times(report: PortReport) -> Iterator[bool]:
    """Add the seconds of the block to the report: lowering, compiling, and the rest as `run`."""
    active, started = True, time.perf_counter()
    compiled = 0.0

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        del details
        nonlocal compiled
        stage = _STAGES.get(event)
        if active and stage is not None:
            compiled += duration_secs
            spent = getattr(report.timing, stage) + duration_secs
            report.timing = dataclasses.replace(report.timing, **{stage: spent})

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield True
    finally:
        active = False
        run = report.timing.run + max(0.0, time.perf_counter() - started - compiled)
        report.timing = dataclasses.replace(report.timing, run=run)
        jax.monitoring.unregister_event_duration_listener(listen)
