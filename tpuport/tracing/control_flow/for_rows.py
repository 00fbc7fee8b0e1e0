"""`for` loops over rows whose number depends on data, such as the experts that a token chose.

There is a round for every row that there can be, under a `lax.cond` that asks whether the row is
there. Rows that hold ascending numbers within known bounds, as `nonzero` and `unique` give, are
those numbers in order: what a round does is then known while tracing, and `self.experts[e]` is a
Python index.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.control_flow.joined_rows import joined_rows
from tpuport.tracing.control_flow.merge import Forced, Unlike, merge, shared_write
from tpuport.tracing.control_flow.reached import reached_by
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.row_list import RowList
from tpuport.tracing.core.tensor import TracedTensor, version
from tpuport.tracing.core.transforms import refuse_loop
from tpuport.tracing.core.values import flat, value_of
from tpuport.tracing.dynamic_shapes.extents import extents_of, strip

# Each round is compiled by itself.
_MOST_ROUNDS = 512


def traced_for(
    rows: Any, body: Callable[..., Any], operands: tuple[Any, ...], written: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run `for row in rows: operands = body(row, *operands)` on the device.

    The body may also write to the objects of `written`, and to what its closure holds.

    Raises:
        PortError: there may be too many rows, or a round changes more than tensors.
    """
    trace, site = current(), user_line()
    refuse_loop()
    is_list = isinstance(rows, RowList)
    tensor = rows.rows if is_list else rows
    joined = joined_rows(rows)
    if trace is None or (joined is None and 0 not in extents_of(tensor)):
        for row in tensor:
            operands = body(row, *operands)
        return operands
    reached = [written, *reached_by(body)]
    if joined is not None and joined.most > _MOST_ROUNDS:
        raise _too_many(joined.most)
    for row, is_present in _rounds(tensor) if joined is None else joined.rounds():
        run = functools.partial(body, row.tolist()) if is_list else _keeping(row, body)
        operands = _round(trace, is_present, run, [list(operands), *reached], operands, site)
    return operands


def _rounds(rows: TracedTensor) -> Iterator[tuple[torch.Tensor, jax.Array]]:
    """Yield every row that there can be, and whether it is there."""
    node = extents_of(rows)[0]
    plain = strip(rows)
    array = value_of(plain)
    is_real = jnp.arange(array.shape[0]) < node.value
    bounds = rows._bounds if rows._ascends else None
    if bounds is not None and bounds[1] - bounds[0] < _MOST_ROUNDS:
        numbers = range(int(bounds[0]), int(bounds[1]) + 1)
        held = array.reshape(-1)
        found = jnp.any((held == jnp.asarray(numbers)[:, None]) & is_real, 1)
        for index, number in enumerate(numbers):
            yield torch.full(plain.shape[1:], number, dtype=rows.dtype), found[index]
        return
    if array.shape[0] > _MOST_ROUNDS:
        raise _too_many(array.shape[0])
    for index in range(array.shape[0]):
        yield plain[index], is_real[index]


def _too_many(rounds: int) -> PortError:
    return port_error(
        f"a loop over rows whose number depends on data, at most {rounds}: each of them would be"
        " compiled by itself",
        code="TPU203",
        remedy="compute all rows at once, and select with a mask",
    )


def _keeping(row: Any, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a loop that refuses to write to its rows, which are copies here."""
    rows = [one for one in flat((row,), {}) if isinstance(one, torch.Tensor)]
    before = [version(one) for one in rows]

    def run(*operands: Any) -> Any:
        result = body(row, *operands)
        given = zip(rows, before, strict=True)
        if any(not isinstance(one, TracedTensor) and version(one) != old for one, old in given):
            raise port_error(
                "a loop over rows whose number depends on data writes to a row",
                code="TPU203",
                remedy="write to a copy of the row: row.clone()",
            )
        return result

    return run


def _round(
    trace: Trace,
    is_present: jax.Array,
    body: Callable[..., Any],
    roots: list[Any],
    operands: tuple[Any, ...],
    site: str,
) -> tuple[Any, ...]:
    """Run a round if its row is there."""
    snapshot = Snapshot(roots)

    def run() -> Any:
        if trace.explorer is None:
            return body(*operands)
        return trace.explorer.run_inside("branch", lambda: body(*operands), roots)

    merged = merge(
        *(trace, is_present, run, lambda: operands),
        site=site,
        apart=lambda: shared_write(site),
        snapshot=snapshot,
        explorable=True,
    )
    if trace.explorer is not None:
        trace.explorer.branches[site] = "lax.cond for each row"
    if isinstance(merged, Unlike):
        raise _unlike(merged, site)
    if isinstance(merged, Forced):
        raise_if(merged.failed, merged.error)
        return body(*operands) if merged.outcome else operands
    return merged


def _unlike(merged: Unlike, site: str) -> PortError:
    return port_error(
        "a round of this loop, over rows whose number depends on data, changes more than the values"
        f" of tensors: {merged.problem}",
        code="TPU203",
        place=site,
        remedy=(
            "write the results into a tensor that has its full size before the loop"
            " (out[idx] += ..., out.index_add_(...)), not into a list or a tensor that grows"
        ),
    )
