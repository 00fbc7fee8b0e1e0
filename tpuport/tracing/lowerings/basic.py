"""Creation, copies and casts.

Ops that torchax lacks, or for which its dtype or value differs from torch's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.tracing.core import or_number, sym_numbers
from tpuport.tracing.core.concretize import concrete_number, decide
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.lowering_registry import SAME, lowering, special
from tpuport.tracing.core.tensor import TracedTensor, item, meta_of, wrap
from tpuport.tracing.core.values import value_of, wrap_as

aten = torch.ops.aten


@lowering(aten.copy.default, reason=SAME)
def copy(target: jax.Array, source: jax.Array, non_blocking: bool = False) -> jax.Array:
    return jnp.broadcast_to(cast(source, target.dtype), target.shape)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert as torch does.

    Complex to real drops the imaginary part, anything to bool is `!= 0`.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        return x != 0 if dtype == jnp.bool_ else x.real.astype(dtype)
    if dtype == jnp.bool_:
        return x != 0
    if x.dtype == jnp.bool_ and jnp.issubdtype(dtype, jnp.floating):
        # XLA makes a choice of a product with a converted mask, and 0 * nan is no choice.
        return jax.lax.select(x, jnp.ones(x.shape, dtype), jnp.zeros(x.shape, dtype))
    if jnp.issubdtype(x.dtype, jnp.floating) and dtype.itemsize <= 4 and dtype.kind in "iu":
        # What no int32 holds becomes the least of them, as on a CPU; a narrower type wraps around.
        # XLA would saturate.
        fits = (x >= -(2.0**31)) & (x < 2.0**31)
        x = jnp.where(fits, x.astype(jnp.int32), jnp.iinfo(jnp.int32).min)
    made = x.astype(dtype)
    if dtype == jnp.int64 and jnp.issubdtype(x.dtype, jnp.floating):
        # What no int64 holds becomes the least of them, as on a CPU; XLA would saturate.
        fits = (x >= -(2.0**63)) & (x < 2.0**63)
        return jnp.where(fits, made, jnp.iinfo(jnp.int64).min)
    return made


@lowering(
    aten._to_copy.default,
    reason="torchax converts floats beyond an integer type's limits as XLA does, not as C",
)
def to_copy(x: jax.Array, *, dtype: torch.dtype | None = None, **unused: Any) -> jax.Array:
    return x if dtype is None else cast(x, backend.jax_dtype(dtype))


@lowering(aten.clone.default, reason=SAME)
def clone(x: jax.Array, *, memory_format: Any = None) -> jax.Array:
    return x


@lowering(torch.ops.prims.convert_element_type.default)
def convert_element_type(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return cast(x, backend.jax_dtype(dtype))


@lowering(aten.fill.Scalar, aten.fill.Tensor, reason=SAME)
def fill(x: jax.Array, value: Any) -> jax.Array:
    return jnp.broadcast_to(cast(jnp.asarray(value), x.dtype), x.shape)


@lowering(aten.zero.default, aten.zeros_like.default, reason=SAME)
def zeros_like(x: jax.Array, *, dtype: torch.dtype | None = None, **unused: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype if dtype is None else backend.jax_dtype(dtype))


@lowering(aten.ones_like.default, reason=SAME)
def ones_like(x: jax.Array, *, dtype: torch.dtype | None = None, **unused: Any) -> jax.Array:
    return jnp.ones(x.shape, x.dtype if dtype is None else backend.jax_dtype(dtype))


@lowering(aten.full_like.default, reason=SAME)
def full_like(
    x: jax.Array, value: Any, *, dtype: torch.dtype | None = None, **unused: Any
) -> jax.Array:
    out = x.dtype if dtype is None else backend.jax_dtype(dtype)
    return jnp.broadcast_to(cast(jnp.asarray(value), out), x.shape)


@lowering(aten.full.default, reason="torchax takes no traced fill value")
def full(size: Any, value: Any, *, dtype: torch.dtype | None = None, **unused: Any) -> jax.Array:
    value = jnp.asarray(value)
    return jnp.broadcast_to(
        value if dtype is None else cast(value, backend.jax_dtype(dtype)), tuple(size)
    )


@lowering(aten.scalar_tensor.default, reason="torchax takes no traced value")
def scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, **unused: Any) -> jax.Array:
    value = jnp.asarray(value)
    return value if dtype is None else cast(value, backend.jax_dtype(dtype))


# Contents of `empty` are undefined in torch; zeros keep a program reproducible. `x.new_zeros(...)`
# and the like depend on x's dtype and shape only: they stay host constants.
def _creation(op: Any) -> Any:
    def create(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if op is aten.new_full.default and isinstance(args[1], sym_numbers.SYMBOLIC):
            dtype = kwargs.get("dtype") or x.dtype
            meta = torch.empty(args[0], dtype=dtype, device="meta")
            value = jnp.broadcast_to(value_of(args[1]), tuple(args[0]))
            return wrap_as(op, value, meta, current())
        stand_in = meta_of(x)
        options = {"layout": torch.strided} | kwargs | {"device": torch.device("cpu")}
        options.pop("pin_memory", None)
        made = op(stand_in, *args, **options)
        if "empty" in op._opname and made.numel():
            made.zero_()
        trace = current()
        if trace is None and isinstance(x, TracedTensor):
            return wrap(backend.to_jax(made), made.dtype)
        return made

    return create


for _op in (
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
):
    special(_op)(_creation(_op))


@lowering(aten.cat.default, reason=SAME)
def cat(tensors: list[jax.Array], dim: int = 0) -> jax.Array:
    kept = [t for t in tensors if not (t.ndim == 1 and t.shape[0] == 0)] or tensors[:1]
    return jnp.concatenate(kept, axis=dim)


@special(aten._local_scalar_dense.default)
def scalar_of(x: torch.Tensor) -> Any:
    """Return a Python number that C++ asks for (a Scalar argument given as a tensor, an index).

    A float is a traced number, whose value is asked for where C++ cannot pass one on; an int may be
    a size, which is explored. A truth value is decided as `if` decides it, because torch's own
    functions run where no mode sees their conditions.

    Raises:
        TypeError: as in eager, the tensor requires grad, which a number would lose.
    """
    is_traced = isinstance(x, TracedTensor) and x._storage.trace is not None
    if is_traced and x.requires_grad:
        raise TypeError("argument must be Number, not Tensor that requires grad")
    if x.dtype is torch.bool:
        return decide(value_of(x).reshape(()))
    if is_traced and x.dtype.is_floating_point:
        assert isinstance(x, TracedTensor)
        or_number.refuse(x)
        return item(x)
    kind = complex if x.dtype.is_complex else float if x.dtype.is_floating_point else int
    return concrete_number(value_of(x).reshape(()), kind)


@special(aten.equal.default)
def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compute `torch.equal`: False for different shapes, else a branch on the values."""
    if a.shape != b.shape:
        return False
    return decide(jnp.all(value_of(a) == value_of(b)))


@special(aten.allclose.default)
def allclose(
    a: torch.Tensor,
    b: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    """Compute `torch.allclose` as a branch on the values."""
    return decide(jnp.allclose(value_of(a), value_of(b), rtol, atol, equal_nan))


@special(aten.is_same_size.default)
def is_same_size(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape


@special(aten._has_same_storage_numel.default)
def has_same_storage_numel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a tangent may have the memory layout of its primal."""
    return _held(a) == _held(b)


def _held(tensor: torch.Tensor) -> int:
    """Return how many elements the storage of a tensor has."""
    if isinstance(tensor, TracedTensor):
        return tensor._storage.held.size
    return tensor.untyped_storage().nbytes() // tensor.itemsize


@special(aten._new_zeros_with_same_feature_meta.default)
def zeros_with_feature(
    tangent: torch.Tensor, primal: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """Return zeros of the sizes of a primal, with the batch dims of its tangent.

    They lie in a storage as the primal does, one storage after the other along batch dims: torch
    compares layouts, offsets included.
    """
    batch, held = tangent.shape[:self_num_batch_dims], _held(primal)
    sizes = (*batch, *primal.shape)
    is_whole = primal.numel() == held and primal.is_contiguous()
    shape = sizes if is_whole else (math.prod(batch) * held,)
    zeros = wrap(jnp.zeros(shape, backend.jax_dtype(tangent.dtype)), tangent.dtype, trace=current())
    if is_whole:
        return zeros
    apart = [held * math.prod(batch[i + 1 :]) for i in range(len(batch))]
    return torch.as_strided(zeros, sizes, (*apart, *primal.stride()), primal.storage_offset())


@special(aten.set_.source_Tensor)
def set_source(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if not isinstance(target, TracedTensor):
        raise port_error(
            "set_() gives a tensor of the host memory of the program",
            code="TPU201",
            remedy="assign the tensor instead",
        )
    target.set_storage_of(source)
    return target


@special(aten.unsafe_split.Tensor)
@special(aten.unsafe_split_with_sizes.default)
def unsafe_split(x: torch.Tensor, sizes: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
    # torch's recurrent cells write to these parts, as to no others.
    parts = torch.split(x, sizes, dim)
    for part in parts:
        if isinstance(part, TracedTensor):
            part._unwritable = getattr(x, "_unwritable", None)
    return parts
