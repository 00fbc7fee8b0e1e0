"""Grouped matrix products.

Each block of rows of a mixture-of-experts layer is multiplied by its own expert's weights.
"""

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.lowering_registry import special
from tpuport.tracing.core.values import flow_of, value_of, wrap_as

aten = torch.ops.aten


# torch's meta function allows bfloat16 only, though its CPU kernel computes every dtype. So this op
# builds its own meta tensor.
@special(aten._grouped_mm.default)
def grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply groups of rows by the matrix of their group.

    Args:
        x: [S, K] with rows sorted by group, or [G, M, K].
        weight: [G, K, N].
        offs: int32[G], the end row of each group; None for [G, M, K].
        bias: added to the result.
        out_dtype: dtype of the result.

    Returns:
        [S, N] or [G, M, N]; rows past the last group are zeros (torch leaves them undefined).

    Raises:
        PortError: the operands have other ranks.
    """
    if x.dim() == 3 and weight.dim() == 3:
        result = jnp.matmul(value_of(x), value_of(weight))
    elif x.dim() == 2 and weight.dim() == 3 and offs is not None:
        ends = value_of(offs)
        sizes = jnp.diff(ends, prepend=jnp.zeros((1,), ends.dtype)).astype(jnp.int32)
        result = jax.lax.ragged_dot(value_of(x), value_of(weight), sizes)
    else:
        raise port_error(
            f"grouped_mm of {x.dim()}-d by {weight.dim()}-d operands",
            code="TPU105",
            remedy="use torch.bmm, or one matrix product a group",
        )
    if bias is not None:
        result = result + value_of(bias)
    meta = torch.empty(result.shape, dtype=out_dtype or x.dtype, device="meta")
    flow = flow_of([t for t in (x, weight, bias) if t is not None])
    return wrap_as(None, result, meta, current(), flow)
