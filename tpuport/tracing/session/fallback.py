"""The choice of functions that run on the host, where the user asked for `fallback="host"`."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.clone import clone_module, parameter_like
from tpuport.foundation.user_frames import is_inside
from tpuport.reports.records import HostPart
from tpuport.source.rewrite import live
from tpuport.source.rewrite.codegen import nested_codes
from tpuport.tracing.core.context import current
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.session.host_call import REFUSED, HostFunction
from tpuport.tracing.state.module_state import state_tree
from tpuport.tracing.state.request import TraceRequest

if TYPE_CHECKING:
    from tpuport.tracing.session.tracer import Tracer

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Fallback:
    """The functions of a port that run on the host, and those that were tried."""

    def __init__(self) -> None:
        self.hosts: dict[FunctionType, HostFunction] = {}
        self._tried: set[FunctionType] = set()
        self._obstacles: list[str] = []

    def choose(self, tracer: "Tracer", error: BaseException, request: TraceRequest) -> bool:
        """Let the innermost function that an error came from run on the host.

        It is one that was not tried, and not the ported method itself.

        Returns:
            Whether there was one.
        """
        while True:
            if isinstance(error, PortError) and error.code == REFUSED:
                self._obstacles.append(error.message)
            self.hosts = {f: host for f, host in self.hosts.items() if not host.refused}
            found = self._innermost(tracer, error, request.method)
            if not found:
                return False
            what = error.message if isinstance(error, PortError) else str(error)
            for function in found:
                code = function.__code__
                part = HostPart(
                    function.__qualname__, code.co_filename, code.co_firstlineno, reason=what
                )
                self.hosts[function] = HostFunction(function, part, _memory_of(tracer.master))
            self._tried.update(found)
            try:
                self.observe(tracer, request)
            except PortError as obstacle:
                self._obstacles.append(obstacle.message)
                continue
            return True

    def explain(self, refused: PortError) -> PortError:
        """Return a refusal that says why the host does not help, if none of the functions can."""
        why = "; ".join(self._obstacles) or "the line is in the ported method itself, not below it"
        refused.remedy = f"{refused.remedy} (fallback='host' does not help here: {why})"
        return refused

    def _innermost(self, tracer: "Tracer", error: BaseException, method: str) -> list[FunctionType]:
        root = tracer.functions.get(method) or tracer.function or getattr(tracer.master, method)
        own = getattr(inspect.unwrap(root), "__code__", None)
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            code = frame.f_code
            if is_inside(code.co_filename) or code.co_flags & _SUSPENDS:
                continue
            functions = [f for f in _running(tracer, code, error) if f.__code__ is not own]
            if functions and not self._tried.intersection(functions):
                return functions
        return []

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the functions run on the host inside the block."""
        before = [(function, function.__code__) for function in self.hosts]
        try:
            for function, host in self.hosts.items():
                function.__code__ = host.stub
            yield
        finally:
            for function, code in before:
                function.__code__ = code

    def observe(self, tracer: "Tracer", request: TraceRequest) -> None:
        """Run eager PyTorch once, to learn what the functions return.

        Nothing is learned where the values of a call are not known.

        Raises:
            PortError: One of them does what a callback cannot.
        """
        known = {**request.known}
        some_missing = any(name not in known for name in request.values)
        some_missing |= any(i not in request.known_leaves for i in range(len(request.leaves)))
        if not self.hosts or some_missing or current() is not None:
            return
        module = None
        if tracer.master is not None:
            module = _with_values(tracer.master, known)
        leaves = [_argument(request, index) for index in range(len(request.leaves))]
        args, kwargs = pytree.unflatten(request.spec, leaves)
        function: Any = tracer.function
        if module is not None:
            function = tracer.method(module, request.method)
        with ExitStack() as stack:
            stack.enter_context(host_randomness.restored([]))
            stack.enter_context(self.swapped())
            for host in self.hosts.values():
                stack.enter_context(host.observing())
            function(*args, **kwargs)


def _memory_of(master: torch.nn.Module | None) -> frozenset[int]:
    """Return the storages of a module's state."""
    leaves = [] if master is None else state_tree(master).leaves.values()
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def _argument(request: TraceRequest, index: int) -> Any:
    meta = request.metas[index]
    if isinstance(meta, type):
        return meta()
    made = request.host_leaf(index)
    made = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype).copy_(made)
    return made.requires_grad_(meta.requires_grad)


def _with_values(master: torch.nn.Module, known: dict[str, Any]) -> torch.nn.Module:
    """Return a copy of a module with other values of its state."""
    names = {id(leaf): name for name, leaf in state_tree(master).leaves.items()}

    def value(tensor: torch.Tensor) -> Any:
        name = names.get(id(tensor))
        if name not in known:
            made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        else:
            made = backend.to_torch(known[name], tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                return parameter_like(made, tensor)
        vars(made).update(vars(tensor))
        return made

    return clone_module(master, value)[0]


def _running(tracer: "Tracer", code: CodeType, error: BaseException) -> list[FunctionType]:
    """Return the user's functions that run a code object, itself or in a comprehension."""
    found = [f for f, r in tracer.rewrites.items() if any(c is code for c in nested_codes(r.code))]
    if not found and "<locals>" not in code.co_qualname:
        found = live.functions_that_ran(code, error)
    found = found or [f for f in live.functions_with(code) if "<locals>" not in f.__qualname__]
    return [getattr(function, "__func__", function) for function in found]
