"""Dtype policies, casts that lose no value silently, and jax arrays of the results."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.interop import backend

Dtype = torch.dtype | str | np.dtype | type
Policy = Dtype | Mapping[str, Dtype | None] | None
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Table = Callable[[str, torch.dtype], torch.dtype]


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of any spelling: `torch.bfloat16`, `"bfloat16"`, `"bf16"`, `jnp.bfloat16`.

    Raises:
        UsageError: it is none.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        named = getattr(torch, _SHORT.get(name, name), None)
        if isinstance(named, torch.dtype):
            return named
    else:
        try:
            return backend.torch_dtype(dtype)
        except (TypeError, RuntimeError):
            pass  # the refusal below says what is expected
    msg = f"expected a dtype such as torch.bfloat16 or 'bfloat16', got {dtype!r}"
    raise UsageError(msg)


def make_table(policy: Policy) -> Table:
    """Return a function that gives the dtype of each floating tensor; others keep theirs.

    Args:
        policy: A dtype, or dtypes by regular expressions that are searched for in the names. The
            first match decides; None and no match keep the file's dtype.

    Raises:
        UsageError: a dtype or an expression is not one, or the dtype is not floating.
    """
    if policy is None:
        return lambda name, dtype: dtype
    by_pattern = policy if isinstance(policy, Mapping) else {"": policy}
    rows: list[tuple[re.Pattern[str], torch.dtype | None]] = []
    for pattern, wanted in by_pattern.items():
        target = None if wanted is None else torch_dtype(wanted)
        if target is not None and not target.is_floating_point:
            msg = f"a dtype policy casts floating tensors, so it cannot name {target}"
            raise UsageError(msg)
        rows.append((compiled(pattern), target))

    def table(name: str, dtype: torch.dtype) -> torch.dtype:
        if not dtype.is_floating_point:
            return dtype
        found = next((target for pattern, target in rows if pattern.search(name)), None)
        return dtype if found is None else found

    return table


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression over names.

    Raises:
        UsageError: it is not one.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        msg = f"{pattern!r} is not a regular expression: {error}"
        raise UsageError(msg) from error


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return the tensor in another dtype, rounded as torch rounds.

    Raises:
        CheckpointError: a finite value would become infinite or NaN, or an integer would change.
    """
    if tensor.dtype == dtype:
        return tensor
    made = tensor.to(dtype)
    if not made.is_floating_point() and not made.is_complex():
        _check_range(tensor, dtype, name)
        return made
    source = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if source.numel() and _may_overflow(source, torch.finfo(dtype).max):
        lost = source.isfinite() & ~_is_near(source, made)
        if lost.any():
            value = source[lost].flatten()[0].item()
            msg = (
                f"{name!r} has the value {value:g}, which does not fit in {dtype}; keep it in"
                f" {tensor.dtype}: dtype={{{re.escape(name)!r}: {str(tensor.dtype)[6:]!r}, '':"
                f" {str(dtype)[6:]!r}}}"
            )
            raise CheckpointError(msg)
    return made


def _check_range(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    if dtype is torch.bool or tensor.dtype is torch.bool or not tensor.numel():
        return
    values, info = backend.to_numpy_array(tensor), torch.iinfo(dtype)
    if values.min() < info.min or values.max() > info.max:
        msg = (
            f"{name!r} has values between {values.min()} and {values.max()}, which do not fit in"
            f" {dtype}"
        )
        raise CheckpointError(msg)


def _may_overflow(source: torch.Tensor, most: float) -> bool:
    if source.dtype.itemsize == 1 or not source.is_floating_point():
        return False  # ints are never cast to floats, and 1-byte floats are taken to fit
    low, high = (bound.item() for bound in torch.aminmax(source))
    # NaN fails the comparison too, and then each value is checked.
    return not (-most < low and high < most)


def _is_near(source: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return where a cast only rounded; else torch gives infinity or, in 8 bits, the maximum."""
    made = torch.view_as_real(made) if made.is_complex() else made
    info = torch.finfo(made.dtype)
    return made.double().isfinite() & (source.abs() <= info.max * (1 + info.eps / 2))


def held(tensor: torch.Tensor, name: str, target: np.dtype) -> np.ndarray:
    """Return the values as jax holds them, without a copy where the dtype is the same.

    Args:
        tensor: The values.
        name: Their name, for messages.
        target: The result of `backend.jax_dtype` for their dtype; reader threads do not see the
            caller's `jax.enable_x64`.

    Raises:
        CheckpointError: jax has no such dtype, or a 64-bit value does not fit in 32 bits.
    """
    if tensor.dtype is torch.float8_e8m0fnu:
        msg = (
            f"{name!r} is torch.float8_e8m0fnu, which has no counterpart here; leave it out by"
            " only=, or name another dtype for it by dtype="
        )
        raise CheckpointError(msg)
    if target.kind in "fc":
        # float64 and complex128, where jax keeps 32 bits.
        tensor = cast(tensor, backend.torch_dtype(target), name)
    array = backend.to_numpy_array(tensor)
    try:
        backend.check_fits(array, target)
    except OverflowError as error:
        msg = f"{name!r}: {error}"
        raise CheckpointError(msg) from error
    return array.astype(target, copy=False)


def put(array: np.ndarray, where: Any) -> jax.Array:
    """Put values on a device; nobody may write to them, as on a CPU jax may alias their memory."""
    made = jax.device_put(array, where, may_alias=True)
    # The caller counts the bytes in flight, so wait until they have arrived.
    return made.block_until_ready()
