"""Tensors that are the rows of one array, which a loop has made, and what joins them again.

`torch.stack(outputs)` after the loop is that array, and no concatenation of its rows.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import SeriesRow, TracedTensor, version, wrap

_JOINS = {torch.ops.aten.stack.default: True, torch.ops.aten.cat.default: False}


def rows(trace: Trace, value: jax.Array, dtype: torch.dtype, flow: Flow) -> list[TracedTensor]:
    """Return the rows of an array `[rows, ...]` as tensors.

    Args:
        trace: The trace.
        value: The array.
        dtype: The dtype of the tensors.
        flow: How derivatives pass through them.
    """
    parts = jax.lax.split(value, [1] * value.shape[0])
    made = [wrap(jnp.squeeze(part, 0), dtype, trace=trace, flow=flow) for part in parts]
    for index, one in enumerate(made):
        one._row = SeriesRow(value, index, one._storage, version(one), trace.regions[-1])
    trace.has_rows = True
    return made


def make_row(row: TracedTensor, same: TracedTensor) -> None:
    """Make a tensor the row that another one is, which has the same value."""
    if row._row is not None:
        same._row = row._row._replace(storage=same._storage, version=version(same))


def joined(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `stack` or `cat` of rows that follow each other; None for another op."""
    is_stack = _JOINS.get(func)
    if is_stack is None:
        return None
    parts, *more = args
    runs = list(_runs(trace, parts))
    if len(runs) == len(parts):
        return None
    dim = more[0] if more else kwargs.get("dim", 0)
    rank = parts[0].dim() + is_stack
    if not rank or not -rank <= dim < rank:
        return None
    dim %= rank
    found = [_joined(trace, run, dim, is_stack=is_stack) for run in runs]
    whole = found[0].clone(memory_format=torch.contiguous_format)
    return whole if len(found) == 1 else torch.cat(found, dim)


def _runs(trace: Trace, parts: list[torch.Tensor]) -> Iterator[list[tuple[Any, SeriesRow | None]]]:
    """Yield the parts in groups, with which rows they are: rows that follow each other, or one."""
    run: list[tuple[Any, SeriesRow | None]] = []
    for part in parts:
        before, now = run[-1][1] if run else None, _row_of(trace, part)
        if run and not _follows(before, now):
            yield run
            run = []
        run.append((part, now))
    if run:
        yield run


def _follows(before: SeriesRow | None, now: SeriesRow | None) -> bool:
    if before is None or now is None:
        return False
    return before.value is now.value and now.number == before.number + 1


def _row_of(trace: Trace, tensor: Any) -> SeriesRow | None:
    """Return which row a tensor is, unless it was written since."""
    row = tensor._row if isinstance(tensor, TracedTensor) else None
    if row is None or not isinstance(tensor, TracedTensor) or tensor._chain:
        return None
    is_same = tensor._storage is row.storage and version(tensor) == row.version
    return row if is_same and row.region in trace.regions else None


def _joined(
    trace: Trace, run: list[tuple[Any, SeriesRow | None]], dim: int, *, is_stack: bool
) -> torch.Tensor:
    (first, row), *_ = run
    if row is None or len(run) == 1:
        return first.unsqueeze(dim) if is_stack else first
    value = row.value[row.number : row.number + len(run)]
    flow = max(part._flow for part, _ in run)
    moved = wrap(value, first.dtype, trace=trace, flow=flow).movedim(0, dim)
    return moved if is_stack else moved.flatten(dim, dim + 1)
