"""Values of 64 bits in programs where jax holds 32: the scope for them, and checked narrowing.

Outside of `scope()` any jnp function makes 32 bits of its operands without a word, so values of 64
bits are computed inside it, and narrowed with a check before anything else takes them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.core.active import innermost
from tpuport.tracing.core.errors import error_here

Span = tuple[int, int]
INT32: Span = (-(2**31), 2**31 - 1)
INT64: Span = (-(2**63), 2**63 - 1)
_LONG = frozenset({np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.float64)})


def scope() -> Any:
    """Return the context in which jax keeps 64 bits."""
    return jax.enable_x64(True)


def is_within(span: Span | None, limits: Span) -> bool:
    """Return whether all numbers of a span are within limits."""
    # Each bound in both limits: those of clamp(5, 3) are the wrong way around.
    return span is not None and all(limits[0] <= bound <= limits[1] for bound in span)


def is_64() -> bool:
    """Return whether the user has enabled 64 bits everywhere (or the scope is open)."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def is_wide(value: Any) -> bool:
    """Return whether an array has 64 bits, which jnp functions outside of the scope would narrow.

    If the user has enabled 64 bits everywhere, none is.
    """
    dtype = getattr(value, "dtype", None)
    return dtype in _LONG and dtype != jax.dtypes.canonicalize_dtype(dtype)


def of_host(tensor: torch.Tensor) -> jax.Array:
    """Return the array of a host tensor, of 64 bits if its integers need them."""
    if tensor.dtype is torch.int64 and not backend.fits(tensor):
        with scope():
            return jnp.asarray(backend.to_numpy_array(tensor))
    return backend.to_jax(tensor)


def narrowed(value: jax.Array, span: Span | None = None) -> jax.Array:
    """Return an int64 array in int32, and raise at the call if a value does not fit.

    Args:
        value: An array of any dtype; one that is not wide is returned as it is.
        span: The smallest and largest value, where they are known.
    """
    if not is_wide(value):
        return value
    with scope():
        narrow = lax.convert_element_type(value, jnp.int32)
    if not is_within(span, INT32):
        message = (
            "an int64 value that does not fit in 32 bits reaches an operation that holds it in 32"
        )
        refuse_if(lambda: (narrow.astype(jnp.int64) != value).any(), message)
    return narrow


SMALLER = "keep integers smaller (take % or & earlier), or set jax_enable_x64 before converting"


def refuse_if(failed: Callable[[], jax.Array], message: str, remedy: str = SMALLER) -> None:
    """Raise our own error at the call if `failed`, computed in the scope, holds.

    It is an error of ours, so no `try` of the user's may catch it.
    """
    trace = innermost()
    if trace is not None and trace.error_code is None:
        return
    with scope():
        value = lax.stop_gradient(failed())
    error: PortError = error_here(message, code="TPU106", remedy=remedy)
    if not isinstance(value, jax.core.Tracer):
        if value:
            raise error
    elif trace is not None:
        trace.check(value, error, user_line())
