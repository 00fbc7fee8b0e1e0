"""Calls of the user's functions that run on the host, in eager PyTorch, inside a program.

Such a call is a callback: a function of the tensors that it can reach, and of nothing else that
changes. What it does besides computing is found by running it before the program is traced.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.children import ATOMS, children, walk
from tpuport.foundation.pytree.clone import Cloner
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.reports.records import HostPart
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import error_here, port_error
from tpuport.tracing.core.storage import Flow, differentiable
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.core.values import flow_of, tensors_in, value_of, wrap_as, write
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.guards import host_randomness

# The code of errors for functions that cannot run on the host.
REFUSED = "TPU408"
_REMEDY = (
    "let it take tensors and return new tensors; tpuport then tries the function that calls it,"
    " and refuses if there is none"
)


class HostFailure(PortError):
    """The error of a call on the host. `happened` is what eager PyTorch raised there, if it did."""

    happened: BaseException | None = None


@dataclass(frozen=True)
class _Outcome:
    """What is the same for all calls with tensors of the same shapes and dtypes.

    `given` says which results are tensors that the function got, by their number there, `written`
    which of those it writes to, and `seen` which results require grad if a tensor does.
    """

    spec: pytree.TreeSpec
    metas: tuple[torch.Tensor, ...]
    given: tuple[int | None, ...]
    written: tuple[int, ...]
    seen: tuple[bool, ...]

    @property
    def key(self) -> Any:
        metas = tuple((tuple(m.shape), m.stride(), m.dtype) for m in self.metas)
        return self.spec.key, metas, self.given, self.written


class _Run:
    """One run of a function on host tensors, which are its own."""

    def __init__(self, host: "HostFunction", template: Any, tensors: dict[int, Any]) -> None:
        self.host, self.inputs = host, list(tensors.values())
        cloner = Cloner(lambda tensor: tensors.get(id(tensor), tensor))
        function, args, kwargs = cloner.clone(template)
        self.made = {id(value) for value in cloner.memo.values()}
        self.constants = _tensors_below([function, args, kwargs], tensors.values())
        before = [_content(t) for t in (*self.inputs, *self.constants)]
        state = Snapshot([function, args, kwargs])
        with _Watched(host):
            self.result = function(*args, **kwargs)
        if any(change is not None for change in state.changes()):
            raise host.refusal("changes attributes or containers")
        now = [_content(t) for t in (*self.inputs, *self.constants)]
        changed = [i for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
        if any(index >= len(self.inputs) for index in changed):
            raise host.refusal("writes to a tensor that is neither state nor an argument")
        self.leaves, self.spec = pytree.flatten(self.result, leaf=_is_tensor)
        self.written = tuple(changed)
        self.given = tuple(_position(leaf, self.inputs) for leaf in self.leaves)

    def outcome(self) -> _Outcome:
        """Return what other runs have in common with it.

        Raises:
            PortError: It does what a callback cannot.
        """
        host = self.host
        for static in pytree.statics_of(self.spec):
            if isinstance(static, (int, float, complex, np.generic, np.ndarray)):
                raise host.refusal(f"returns a {type(static).__name__}, whose value may change")
        if any(id(made) in self.made for made in self.spec.containers.values()):
            raise host.refusal("returns an object that it got")
        memory: set[int] = {t.untyped_storage()._cdata for t in (*self.inputs, *self.constants)}
        for leaf, given in zip(self.leaves, self.given, strict=True):
            storage = leaf.untyped_storage()._cdata
            if given is None and storage in memory:
                raise host.refusal("returns a view of a tensor that it got, or of another result")
            memory.add(storage)
        owners = [t.untyped_storage()._cdata for t in self.inputs]
        if any(owners.count(owners[index]) > 1 for index in self.written):
            raise host.refusal("writes to a tensor that it got twice")
        metas = tuple(torch.empty_like(leaf, device="meta") for leaf in self.leaves)
        seen = tuple(leaf.requires_grad for leaf in self.leaves)
        return _Outcome(self.spec, metas, self.given, self.written, seen)


class _Watched(TorchDispatchMode):
    """The refusal of random numbers, which a program draws otherwise, and of hidden inputs."""

    def __init__(self, host: "HostFunction") -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self._host.refusal(f"draws random numbers ({func})")
        for tensor in tensors_in((*args, *(kwargs or {}).values())):
            if tensor.untyped_storage()._cdata in self._host.weights:
                raise self._host.refusal("reads state of the model that it does not get")
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class HostFunction:
    """A function of the user's that runs on the host while `swapped` is active.

    Attributes:
        function: The function.
        record: What the report says of it.
        weights: The memory of the user's own module, which has the values of no call.
    """

    function: FunctionType
    record: HostPart
    weights: frozenset[int] = frozenset()
    known: dict[Any, _Outcome] = field(default_factory=dict)
    refused: bool = False

    def __post_init__(self) -> None:
        """Keep the function's own code, and make the code that takes its place."""
        function: Any = self.function
        code = function.__code__
        self.plain = FunctionType(
            code,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self.plain.__kwdefaults__ = function.__kwdefaults__
        self.plain.__qualname__ = function.__qualname__
        constants = tuple(self if c == _SELF else c for c in _stub.__code__.co_consts)
        self.stub: CodeType = _stub.__code__.replace(
            co_consts=constants, co_freevars=code.co_freevars
        )
        self._thread = threading.local()

    def refusal(self, what: str, remedy: str = _REMEDY) -> PortError:
        """Return the error for something that a callback cannot do, at the function."""
        self.refused = True
        place = f"{self.record.file}:{self.record.line}"
        message = f"{self.record.name} cannot run on the host: it {what}"
        make = port_error if current() is not None else error_here
        return make(message, code=REFUSED, place=place, remedy=remedy)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Learn from calls in this thread what they return."""
        self._thread.observes = True
        try:
            yield
        finally:
            self._thread.observes = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call: in a trace as a callback."""
        trace = current()
        if trace is not None:
            call = _HostCall(trace, self, args, kwargs)
            return call.run() if call.tensors else self.plain(*args, **kwargs)
        if getattr(self._thread, "observes", False):
            self._observe(args, kwargs)
        return self.plain(*args, **kwargs)

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a call on copies, and keep what it returns."""
        tensors = _tensors_below([self.plain, args, kwargs], ())
        given = {id(t): _copy(t, t.requires_grad) for t in tensors}
        with host_randomness.restored([]) as states:
            outcome = _Run(self, (self.plain, args, kwargs), given).outcome()
            drawn = states.drawn()
        if drawn:
            raise self.refusal(f"draws random numbers from {drawn}")
        key = key_of(tensors)
        known = self.known.setdefault(key, outcome)
        if known.key != outcome.key:
            raise self.refusal("returns tensors whose sizes depend on values")
        if any(outcome.seen) and not any(known.seen):
            self.known[key] = outcome


_SELF = "the host function"


def _stub(*args: Any, **kwargs: Any) -> Any:
    # The constant becomes the HostFunction.
    return "the host function".run(args, kwargs)  # type: ignore[attr-defined]


def key_of(tensors: list[Any]) -> Any:
    """Return what the results of a call may depend on, besides values."""
    return tuple((tuple(torch.Tensor.size(t)), t.dtype) for t in tensors)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _content(tensor: torch.Tensor) -> Any:
    """Return what a write changes; batch normalization and `.data` do not count their writes."""
    return tensor._version, backend.to_numpy_array(tensor).tobytes()


def _position(leaf: Any, tensors: list[Any]) -> int | None:
    return next((i for i, tensor in enumerate(tensors) if tensor is leaf), None)


def _copy(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    made = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_(requires_grad)


def _tensors_below(roots: list[Any], without: Any) -> list[Any]:
    """Return the tensors that code can reach from some objects, each once, in order."""
    left_out = {id(tensor) for tensor in without}
    found: dict[int, Any] = {}
    for one in walk(roots, _parts):
        if isinstance(one, torch.Tensor) and id(one) not in left_out:
            found.setdefault(id(one), one)
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [c.cell_contents for c in value.__closure__ or () if _is_set(c)]
    return [] if isinstance(value, (torch.Tensor, *ATOMS)) else children(value).all


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class _HostCall:
    """One call in a trace.

    Raises:
        PortError: It does what a callback cannot.
    """

    def __init__(
        self, trace: Trace, host: HostFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.trace, self.host = trace, host
        roots = [host.plain, args, kwargs]
        found = _tensors_below(roots, ())
        if any(isinstance(one, sym_numbers.SYMBOLIC) for one in walk(roots, _parts)):
            raise host.refusal("gets a number or size that depends on the program's inputs")
        if any(extents_of(tensor) for tensor in found):
            raise host.refusal("gets a tensor whose size depends on data")
        self.all = found
        self.tensors = [t for t in found if self._traced(t) is not None]
        self.holders = {id(t): torch.empty(0) for t in self.tensors}
        cloner = Cloner(lambda t: self.holders.get(id(t), t))
        self.template = cloner.clone((host.plain, args, kwargs))
        self.metas = [meta_of(t) for t in self.tensors]
        self.params = [isinstance(t, torch.nn.Parameter) for t in self.tensors]
        self.grad_mode = torch.is_grad_enabled()
        modes = _get_current_function_mode_stack()
        self.modes = [mode for mode in modes if mode is not trace.function_mode]
        flows = [self._traced(t)._flow for t in self.tensors]  # pyright: ignore[reportOptionalMemberAccess]
        self.needs = [
            self.grad_mode and flow is not Flow.STOPPED and differentiable(t.dtype)
            for flow, t in zip(flows, self.tensors, strict=True)
        ]

    @property
    def name(self) -> str:
        """Return the name of the function, for reports on the program."""
        return self.host.record.name

    def _traced(self, tensor: Any) -> TracedTensor | None:
        return tensor if isinstance(tensor, TracedTensor) else self.trace.alias(tensor)

    def run(self) -> Any:
        """Make the callback part of the program; return its results."""
        host = self.host
        outcome = host.known.get(key_of(self.all))
        if outcome is None:
            raise host.refusal(
                "is called with tensors of other shapes or dtypes than by eager PyTorch on this"
                " call, or values are not known yet: give `convert` example arguments (args=...)"
            )
        self.outcome = outcome
        self.failure = HostFailure(
            f"{host.record.name} failed on the host", file=host.record.file, line=host.record.line
        )
        self.checked = self.trace.error_code is not None
        outs = self._callback()([value_of(t) for t in self.tensors])
        *values, failed = outs
        if self.checked:
            self.trace.check(failed != 0, self.failure, f"{host.record.file}:{host.record.line}")
        if host.record not in self.trace.recorder.hosts:
            self.trace.recorder.hosts.append(host.record)
        for index, value in zip(outcome.written, values[len(outcome.metas) :], strict=True):
            write(self.tensors[index], value, flow=Flow.STOPPED)
        flow = flow_of([self._traced(t) for t in self.tensors])
        made: list[Any] = []
        for value, meta, given, seen in zip(
            values, outcome.metas, outcome.given, outcome.seen, strict=False
        ):
            own = flow if seen or flow < Flow.MAYBE else Flow.STOPPED
            own = own if differentiable(meta.dtype) else Flow.STOPPED
            if given is not None:
                made.append(self.tensors[given])
            elif own is Flow.STOPPED:
                made.append(wrap_as(host, jax.lax.stop_gradient(value), meta, self.trace))
            else:
                made.append(wrap_as(host, value, meta, self.trace, own))
        return pytree.unflatten(outcome.spec, made)

    def _callback(self) -> Callable[[list[jax.Array]], Any]:
        kinds = [
            jax.ShapeDtypeStruct(tuple(m.shape), backend.jax_dtype(m.dtype))
            for m in (*self.outcome.metas, *(self.metas[i] for i in self.outcome.written))
        ]
        kinds.append(jax.ShapeDtypeStruct((), jnp.int32))
        given = [
            jax.ShapeDtypeStruct(tuple(m.shape), backend.jax_dtype(m.dtype)) for m in self.metas
        ]

        def call(values: list[jax.Array]) -> Any:
            return jax.pure_callback(self._forward, kinds, values, vmap_method="sequential")

        def backward(values: list[jax.Array], cotangents: Any) -> Any:
            found = jax.pure_callback(
                self._backward, given, values, cotangents, vmap_method="sequential"
            )
            pairs = zip(found, self.needs, strict=True)
            return ([g if needs else None for g, needs in pairs],)

        if not any(self.needs):
            return call
        differentiated = jax.custom_vjp(call)
        differentiated.defvjp(
            lambda values: (call(values), values),
            lambda values, cotangents: backward(values, cotangents[: len(self.outcome.metas)]),
        )
        return differentiated

    def _run(self, values: list[Any], *, grad: bool) -> _Run:
        """Run the function on the values of a call."""
        with torch.set_grad_enabled(grad):
            tensors = {}
            for value, meta, is_param, needs, holder in zip(
                *(values, self.metas, self.params, self.needs, self.holders.values()), strict=True
            ):
                tensor = backend.to_torch(value, meta.dtype)
                whole = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype)
                tensor = whole.copy_(tensor)
                tensors[id(holder)] = (
                    torch.nn.Parameter(tensor, needs)
                    if is_param
                    else tensor.requires_grad_(needs and grad)
                )
            return _Run(self.host, self.template, tensors)

    def _forward(self, values: list[Any]) -> Any:
        started, record = time.perf_counter(), self.host.record
        try:
            with _on_host(self.modes):
                run = self._run(values, grad=False)
            outcome = run.outcome()
            if outcome.key != self.outcome.key:
                raise self.host.refusal(
                    f"returned {_shown(outcome)} where its first call returned"
                    f" {_shown(self.outcome)}, and a program has one size for its results",
                    "pad what it returns to a size that does not depend on values",
                )
            tensors = [*run.leaves, *(run.inputs[i] for i in run.written)]
            arrays = [_array(tensor) for tensor in tensors]
            failed = 0
        except Exception as error:
            self.failure.happened = error
            if not self.checked:
                raise
            metas = [*self.outcome.metas, *(self.metas[i] for i in self.outcome.written)]
            arrays = [np.zeros(tuple(m.shape), backend.jax_dtype(m.dtype)) for m in metas]
            failed = 1
        record.calls += 1
        record.seconds += time.perf_counter() - started
        record.bytes += sum(np.asarray(a).nbytes for a in (*values, *arrays))
        return [*arrays, np.int32(failed)]

    def _backward(self, values: list[Any], cotangents: list[Any]) -> Any:
        started, record = time.perf_counter(), self.host.record
        with _on_host(self.modes):
            run = self._run(values, grad=True)
            wanted = [t for t, needs in zip(run.inputs, self.needs, strict=True) if needs]
            pairs = [
                (leaf, backend.to_torch(c, leaf.dtype))
                for leaf, c in zip(run.leaves, cotangents, strict=True)
                if leaf.requires_grad and leaf.grad_fn is not None
            ]
            found: Any = [None] * len(wanted)
            if pairs:
                outs, grads = zip(*pairs, strict=True)
                # jax's cotangent of a complex number is the conjugate of torch's gradient.
                grads = [g.conj().resolve_conj() for g in grads]
                found = torch.autograd.grad(outs, wanted, grads, allow_unused=True)
        ready = iter(found)
        made = [next(ready) if needs else None for needs in self.needs]
        arrays = [
            np.zeros(tuple(m.shape), backend.jax_dtype(m.dtype)) if g is None else _array(g.conj())
            for g, m in zip(made, self.metas, strict=True)
        ]
        record.backward_calls += 1
        record.seconds += time.perf_counter() - started
        record.bytes += sum(np.asarray(a).nbytes for a in (*values, *cotangents, *arrays))
        return arrays


@contextmanager
def _on_host(modes: list[Any]) -> Iterator[None]:
    """Set what is a thread's own: jax may call back on threads of its own."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        for mode in modes:
            stack.enter_context(mode)
        yield


def _array(tensor: torch.Tensor) -> np.ndarray:
    array, dtype = backend.to_numpy_array(tensor), backend.jax_dtype(tensor.dtype)
    backend.check_fits(array, dtype)
    return np.array(array, dtype=dtype)


def _shown(outcome: _Outcome) -> str:
    kinds = [f"{str(m.dtype)[6:]}{list(m.shape)}" for m in outcome.metas]
    return f"({', '.join(kinds)})"
