"""Operations on tensors of the host that are made of what was drawn there.

They run on the host before each call, as long as they meet nothing of the program. So sizes that
are the same whatever was drawn (a mask of so many positions) are static.
"""

import functools
from typing import Any, NamedTuple

import torch

from tpuport.foundation.user_frames import user_line
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.host_tape import Tape, current_tape
from tpuport.tracing.core.op_info import op_info
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import flat, map_tensors
from tpuport.tracing.functions.registry import Handler
from tpuport.tracing.state.module_state import StateTree

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Taken(NamedTuple):
    """What became of an operation: its result, or its arguments as a trace takes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_done: bool = False
    result: Any = None


def run(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
    """Run an operation by the tape, if it has tensors of the tape and none of the program.

    If it has both, those of the tape become tensors of the program.
    """
    tape = current_tape()
    operands = flat(args, kwargs)
    if tape is None or not any(map(tape.has, operands)):
        return Taken(args, kwargs)
    if _is_of_tape(trace, tape, func, args, kwargs, operands):
        made = tape.record(func, args, kwargs, is_of_torch=True, is_read=func in _READS)
        trace.note_made(made)
        return Taken(args, kwargs, True, made)
    written = {id(one) for one in _written(func, args, kwargs)}
    if func in _INDEXED:
        args = (args[0], _positions(trace, tape, args[1]), *args[2:])

    def traced(tensor: Any) -> Any:
        if id(tensor) in written or not tape.has(tensor) or trace.alias(tensor) is not None:
            return tensor
        return tape.in_program(tensor)

    given = tuple(map_tensors(traced, one) for one in args)
    return Taken(given, {name: map_tensors(traced, one) for name, one in kwargs.items()})


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in op_info(func).writes]


def _is_of_tape(
    trace: Trace, tape: Tape, func: Any, args: Any, kwargs: Any, operands: list[Any]
) -> bool:
    """Return whether an operation can run on the host before the call."""
    if any(isinstance(one, TracedTensor) or trace.alias(one) is not None for one in operands):
        return False
    if any(isinstance(one, sym_numbers.SYMBOLIC) and not tape.holds(one) for one in operands):
        return False
    if not all(map(tape.has, _written(func, args, kwargs))):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags or not may_record(trace, tape):
        return False
    if func is aten._local_scalar_dense.default and args[0].dtype.is_floating_point:
        return False
    return True


def may_record(trace: Trace, tape: Tape) -> bool:
    """Return whether the running line runs in each call, and has the same result at each."""
    explorer = trace.explorer
    if not isinstance(tape.count, int) or explorer is None:
        return False
    is_on_side = any(unit.position for unit in explorer.units)
    is_on_side |= any(name.startswith("<branch") for name in explorer.calls)
    return not is_on_side and user_line() not in explorer.plan.varying


def _positions(trace: Trace, tape: Tape, indices: Any) -> Any:
    """Return indices with positions for masks of the tape, whose number is known."""
    found: list[Any] = []
    for one in indices:
        is_mask = tape.has(one) and one.dtype in (torch.bool, torch.uint8)
        if is_mask and trace.alias(one) is None and may_record(trace, tape):
            rows = tape.record(aten.nonzero.default, (one,), is_of_torch=True)
            found += tape.record(aten.unbind.int, (rows, 1), is_of_torch=True)
        else:
            found.append(one)
    return found


def hand_over(trace: Trace, state: StateTree | None) -> None:
    """Make tensors of the tape that a call leaves in attributes tensors of the program."""
    tape = current_tape()
    if tape is None or state is None:
        return
    for leaf in state.leaves.values():
        if tape.has(leaf):
            trace.promote(leaf)


# Functions of Python that read a tensor: as an array or list, or as a number.
_AS_ARRAYS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_AS_NUMBERS = {torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__complex__}
_AS_NUMBERS |= {torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__bool__}


_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def _indexed(handler: Handler, trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Index a tensor of the program by numbers of the program, not by those that Python reads."""
    target, index, *value = args
    tape: Tape = trace.recorder.tapes[0]
    if isinstance(target, TracedTensor) or trace.alias(target) is not None:
        parts = [
            tape.in_program(one) if tape.has(one) and not one.ndim else one
            for one in (index if isinstance(index, tuple) else (index,))
        ]
        index = tuple(parts) if isinstance(index, tuple) else parts[0]
    return handler(trace, func, (target, index, *value), kwargs)


def reader(func: Any, handler: Any) -> Any:
    """Return the handler of a function in a trace with a tape, a tensor of which it may read.

    An array or list is of the tape, too. An integer or truth is read on the host, and the program
    is for that one. A number that may be another at each call is one of the program.
    """
    if func not in _AS_ARRAYS | _AS_NUMBERS | _INDEXING:
        return handler
    if func in _INDEXING:
        return functools.partial(_indexed, handler)

    def read(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
        tape, tensor = trace.recorder.tapes[0], args[0]
        if not tape.has(tensor) or trace.alias(tensor) is not None:
            return NotImplemented if handler is None else handler(trace, func, args, kwargs)
        if may_record(trace, tape):
            if func in _AS_ARRAYS:
                plain = torch.Tensor.tolist if func is torch.Tensor.tolist else torch.Tensor.numpy
                return tape.record(plain, args)
            if not tensor.dtype.is_floating_point:
                return NotImplemented
        return func(tape.in_program(tensor), *args[1:], **kwargs)

    return read
