"""The modes that are active while a trace runs: they see every ATen op and torch function."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.measured_time import KINDS, refuse_measured
from tpuport.tracing.core.op_info import op_info
from tpuport.tracing.core.storage import memory_of
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.tensor_classes import classes_seen, overrides
from tpuport.tracing.core.transforms import is_transformed, transforming
from tpuport.tracing.core.values import flat, tensors_in
from tpuport.tracing.dispatch.dispatch import dispatch
from tpuport.tracing.functions import (  # noqa: F401 - the modules of functions register themselves
    general,
    numeric,
    products,
    rnn,
    running_statistics,
    selected,
    sizes,
)
from tpuport.tracing.functions.registry import FUNCTIONS
from tpuport.tracing.session import taped_ops
from tpuport.tracing.session.interrupts import INTERRUPTS

aten = torch.ops.aten

_UNINITIALISED = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
}


class DispatchMode(TorchDispatchMode):
    """The mode that sees every ATen op while a trace runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # dynamo compiles nothing here, and torch's guard against it costs more than the op itself.
        return False

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if INTERRUPTS.pending:
            INTERRUPTS.raise_pending()
        kwargs = kwargs or {}
        if self.trace.recorder.tapes:
            taken = taped_ops.run(self.trace, func, args, kwargs)
            if taken.is_done:
                return taken.result
            args, kwargs = taken.args, taken.kwargs
            types = (*types, *map(type, flat(args, kwargs)))
        info = op_info(func)
        if needs_dispatch(self.trace, func, types, args, kwargs):
            result = dispatch(func, args, kwargs)
            if not info.writes and not info.aliases:
                self.trace.note_made(result)
            return result
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in info.writes]
        if any(
            self.trace.is_foreign(target) or not _writes_on_host(self.trace, target)
            for target in written
        ):
            # State from outside, or from before a branch: the program writes it, and not only now.
            return dispatch(func, args, kwargs)
        if func is not aten.lift_fresh.default:  # what `torch.tensor` has just made
            self.trace.note_reads(flat(args, kwargs))
        result = func(*args, **kwargs)
        if func._opname in _UNINITIALISED and isinstance(result, torch.Tensor):
            # What memory held before is no value: it may not even fit in 32 bits.
            result.zero_()
        if not info.aliases or func is aten.lift_fresh.default:
            self.trace.note_made(result)
        else:
            self.trace.recorder.guards.note_views(result)
        return result


def _writes_on_host(trace: Trace, target: Any) -> bool:
    """Record a write to a host tensor that the trace made, or return False.

    It is False where the write has to be part of the program.
    """
    if not trace.effects or not isinstance(target, torch.Tensor):
        return True
    number, _ = trace.made[memory_of(target)[0]]
    outside = [effects for effects in trace.effects if number < effects.made_before]
    if any(effects.repeats for effects in outside):
        return False
    for effects in outside:
        effects.wrote_on_host = True
    return True


def needs_dispatch(
    trace: Trace, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether an op concerns the traced program.

    It does if an operand is traced, or a host tensor with a traced alias, or a traced number, or if
    the op draws fresh random numbers.
    """
    if any(issubclass(t, TracedTensor) for t in types):
        return True
    if torch.Tag.nondeterministic_seeded in func.tags:
        generator = kwargs.get("generator")
        if generator is None or generator._cdata in trace.generators:
            return True
    operands = flat(args, kwargs)
    if any(isinstance(t, sym_numbers.SYMBOLIC) for t in operands):
        return True
    return any(trace.alias(t) is not None for t in operands)


def _is_transformed(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether torch.func stands a tensor of its own for an operand.

    It takes the function apart, and its operations arrive one by one.
    """
    if not transforming():
        return False
    return any(map(is_transformed, tensors_in([*args, *(kwargs or {}).values()])))


# Functions that read a tensor's values without an ATen op.
_READS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}


class FunctionMode(TorchFunctionMode):
    """The mode that sees every call of the torch Python API while a trace runs.

    It handles the few that must not reach C++ unchanged.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for kind in classes_seen(types):
            if not issubclass(kind, torch.Tensor) or overrides(kind):
                # It takes the function apart, and calls torch for its parts: seen by this mode.
                with self:
                    result = kind.__torch_function__(func, classes_seen(types), args, kwargs or {})
                if result is not NotImplemented:
                    return result
        given = (*args, *(kwargs or {}).values())
        if not KINDS.isdisjoint(map(type, given)):
            refuse_measured(given)
        # torch names its public function, which may be one that somebody put around it.
        handler = FUNCTIONS.get(func) or FUNCTIONS.get(getattr(func, "__wrapped__", None))
        has_tape = self.trace.recorder.tapes
        handler = taped_ops.reader(func, handler) if has_tape else handler
        if handler is not None and not _is_transformed(args, kwargs):
            result = handler(self.trace, func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        if func in _READS:
            self.trace.note_reads(args[:1])
        result = func(*args, **(kwargs or {}))
        if kwargs and kwargs.get("requires_grad") is True and isinstance(result, TracedTensor):
            result.requires_grad_()
        elif kwargs and kwargs.get("requires_grad") is True and type(result) is torch.Tensor:
            # A leaf that is made with a gradient, as torch.zeros can.
            FUNCTIONS[torch.Tensor.requires_grad_](self.trace, func, (result,), {})
        return result
