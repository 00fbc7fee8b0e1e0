"""The arguments of a traced call that are longer at each call: buffers with a size that is data."""

from typing import Any

import jax
import torch

from tpuport.foundation.pytree.sealed import apart, replaced
from tpuport.foundation.pytree.tree import TreeSpec
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, meta_of, version
from tpuport.tracing.dynamic_shapes.extents import along, attach, note_dynamic
from tpuport.tracing.state.lengths import Lengths
from tpuport.tracing.state.request import TraceResult


def sized(
    trace: Trace, lengths: Lengths, made: list[Any], spec: TreeSpec, count: jax.Array
) -> TreeSpec:
    """Give the tensors of a call their sizes, and return its structure with traced numbers."""
    note_dynamic(trace)
    index = NumberNode(count, int, lengths.low, lengths.high)
    found: dict[int, dict[int, NumberNode]] = {}
    for (leaf, dim), steps in lengths.sizes:
        found.setdefault(leaf, {})[dim] = along(index, steps.start, steps.step)
    for leaf, extents in found.items():
        attach(made[leaf], extents)
    values = apart(spec)[1]
    for place, steps in lengths.numbers:
        values[place] = sym_numbers.from_node(along(index, steps.start, steps.step))
    return replaced(spec, values) if lengths.numbers else spec


def refuse_effects(
    lengths: Lengths | None, made: list[Any], before: list[int], outcome: TraceResult
) -> None:
    """Refuse what a program cannot do to an argument that it has in another size.

    Raises:
        PortError: The call writes to one, returns a part of it, or draws random numbers where
            tensors have another size, of which each has others.
    """
    if lengths is None:
        return
    draws = outcome.trace.generators or any(count != 0 for count in outcome.trace.draws)
    if draws and outcome.trace.has_sizes:
        raise _refused("draws random numbers, and gets")
    parts = {one.of for one in outcome.out_aliases.values() if not one.is_same}
    for leaf, tensor in enumerate(made):
        if not isinstance(tensor, TracedTensor):
            continue
        grows = leaf in lengths.leaves
        if grows and version(tensor) != before[leaf]:
            raise _refused("writes to")
        # The strides of a part of a larger tensor change from call to call.
        is_whole = torch.ops.aten.is_non_overlapping_and_dense.default(meta_of(tensor))
        if leaf in parts and (grows or not is_whole):
            raise _refused("returns a part of")


def _refused(does: str) -> Exception:
    return port_error(
        f"the call {does} an argument that is longer at each call",
        code="TPU203",
        remedy="return a new tensor",
    )
