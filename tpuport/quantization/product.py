"""The product of activations with packed weights: an op of torch, and its lowering.

The codes of a weight are `[groups, out_features, size]` in int8, `size` input features a group, one
group if scales are by channel. With four bits two codes share a byte: the low half has the first
`size / 2` features of the group, the high half the others, so that no unpacked row is put together.
"""

import functools

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.lowering_registry import lowering

# Up to so many rows one product of all groups is faster; beyond, its int32 results take too much.
_FEW_ROWS = 32
_REASON = "an op of tpuport: products of integer codes, scaled by group"


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes `[groups, out, size]` in int8, with four bits two to a byte."""
    if codes.is_floating_point() and codes.dtype.itemsize == 1:
        return codes
    codes = codes.to(torch.int8)
    if bits == 8:
        return codes
    low, high = codes.chunk(2, dim=-1)
    return (low & 15) | (high << 4)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes that `pack` was given."""
    if bits == 8:
        return packed
    return torch.cat([(packed << 4) >> 4, packed >> 4], dim=-1)


@torch.library.custom_op("tpuport::scaled_product", mutates_args=())
def scaled_product(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bits: int
) -> torch.Tensor:
    """Multiply rows by packed weights, and each group's products by their scales.

    Args:
        x: `[..., in_features]`: int8 codes, whose products are summed in int32, or floats, float8
            among them.
        packed: the weight's codes, as `pack` gives them.
        scale: float32 `[groups, out_features]`.
        bits: 4 or 8.

    Returns:
        float32 `[..., out_features]`, the sum over the groups.
    """
    # No integer product of torch on the CPU takes all shapes; float64 sums are exact below 2**53.
    exact = torch.float32 if x.is_floating_point() else torch.float64
    groups = unpack(packed, bits).to(exact)
    rows = x.to(exact).unflatten(-1, (groups.shape[0], groups.shape[2]))
    products = torch.einsum("...gk,gok->...go", rows, groups)
    return (products.float() * scale).sum(-2)


@scaled_product.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[1]), dtype=torch.float32)


@lowering(torch.ops.tpuport.scaled_product.default, reason=_REASON)
def lower_scaled_product(x: jax.Array, packed: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Lower `scaled_product`: int8 by int8 to int32, and nothing is unpacked but in its product."""
    rows = x.reshape(-1, x.shape[-1])
    groups = packed.shape[0]
    product = functools.partial(_group_product, bits=bits)
    if groups == 1:
        y = product(rows, packed[0]).astype(jnp.float32) * scale[0]
    else:
        parts = jnp.swapaxes(rows.reshape(rows.shape[0], groups, -1), 0, 1)
        if rows.shape[0] <= _FEW_ROWS:
            products = jax.vmap(product)(parts, packed).astype(jnp.float32)
            y = jnp.sum(products * scale[:, None], axis=0)
        else:
            start = jnp.zeros((rows.shape[0], scale.shape[1]), jnp.float32)

            def step(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
                part, codes, factor = group
                return total + product(part, codes).astype(jnp.float32) * factor, None

            y, _ = jax.lax.scan(step, start, (parts, packed, scale))
    return y.reshape(*x.shape[:-1], scale.shape[1])


def _group_product(x: jax.Array, codes: jax.Array, *, bits: int) -> jax.Array:
    """Multiply rows `[n, size]` by one group's codes; int32 of int8 rows, else float32."""
    wanted = jnp.int32 if x.dtype == jnp.int8 else jnp.float32

    def dot(rows: jax.Array, weight: jax.Array) -> jax.Array:
        contracted = (((1,), (1,)), ((), ()))
        weight = weight.astype(x.dtype)
        return jax.lax.dot_general(rows, weight, contracted, preferred_element_type=wanted)

    if bits == 8:
        return dot(x, codes)
    low, high = jnp.split(x, 2, axis=1)
    first = jax.lax.shift_right_arithmetic(jax.lax.shift_left(codes, jnp.int8(4)), jnp.int8(4))
    return dot(low, first) + dot(high, jax.lax.shift_right_arithmetic(codes, jnp.int8(4)))
