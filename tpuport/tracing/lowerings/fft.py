"""Fourier transforms: the three that all of ATen's fft family reduces to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.lowering_registry import SAME, lowering

aten = torch.ops.aten
# ATen's normalization: 0 none, 1 by the square root of the number of elements, 2 by that number.
_FORWARD = ("backward", "ortho", "forward")
_INVERSE = ("forward", "ortho", "backward")


@lowering(aten._fft_c2c.default, reason=SAME)
def _complex_to_complex(
    x: jax.Array, dim: Sequence[int], normalization: int, forward: bool
) -> jax.Array:
    if not dim:
        return x
    transform, names = (jnp.fft.fft, _FORWARD) if forward else (jnp.fft.ifft, _INVERSE)
    for axis in dim:
        x = transform(x, axis=axis, norm=names[normalization])
    return x


@lowering(aten._fft_r2c.default, reason=SAME)
def _real_to_complex(
    x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool
) -> jax.Array:
    """Transform the last of `dim` first; with `onesided` keep only its first half."""
    *others, last = dim
    half = jnp.fft.rfft(x, axis=last, norm=_FORWARD[normalization])
    if not onesided:
        half = jnp.fft.fft(x.astype(half.dtype), axis=last, norm=_FORWARD[normalization])
    return _complex_to_complex(half, others, normalization, True)


@lowering(aten._fft_c2r.default, reason="torchax loses the size of an odd last dim among several")
def _complex_to_real(
    x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int
) -> jax.Array:
    *others, last = dim
    x = _complex_to_complex(x, others, normalization, False)
    return jnp.fft.irfft(x, last_dim_size, axis=last, norm=_INVERSE[normalization])
