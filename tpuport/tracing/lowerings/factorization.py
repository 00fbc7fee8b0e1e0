"""QR, eigenvalue and singular value decompositions, and torch's functions that build on them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import linalg as jsl

from tpuport.tracing.core.context import current
from tpuport.tracing.core.lowering_registry import SAME, lowering, special
from tpuport.tracing.core.values import flow_of, value_of, wrap_as
from tpuport.tracing.lowerings._numeric import value_and_gradient, wide

aten = torch.ops.aten


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


@lowering(aten.linalg_qr.default, reason="torchax ignores a positional mode")
def _qr(x: jax.Array, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    if mode == "r":
        return jnp.zeros(0, x.dtype), jnp.linalg.qr(x, mode="r")
    if not x.size:
        rows, columns = x.shape[-2:]
        inner = rows if mode == "complete" else min(rows, columns)
        eye = jnp.broadcast_to(jnp.eye(rows, inner, dtype=x.dtype), (*x.shape[:-2], rows, inner))
        return eye, jnp.zeros((*x.shape[:-2], inner, columns), x.dtype)
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@lowering(
    aten.linalg_householder_product.default,
    reason="torchax fails on empty matrices; jax has no gradient of it",
)
def _householder_product(x: jax.Array, tau: jax.Array) -> jax.Array:
    """Return the first columns of the product of the reflections I - tau v v^H."""
    if not x.size:
        return x
    value = lax.linalg.householder_product(lax.stop_gradient(x), lax.stop_gradient(tau))
    return value_and_gradient(value, _reflected(x, tau))


def _reflected(x: jax.Array, tau: jax.Array) -> jax.Array:
    """Compute the Householder product one reflection after another, which jax can differentiate."""
    rows, columns = x.shape[-2:]
    eye = jnp.eye(rows, columns, dtype=x.dtype)
    vectors = jnp.tril(x, -1) + eye

    def reflect(q: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        vector, scale = one[0][..., None], one[1][..., None, None]
        return q - scale * vector * (_adjoint(vector) @ q), None

    count = tau.shape[-1]
    steps = jnp.moveaxis(vectors[..., :count], -1, 0), jnp.moveaxis(tau, -1, 0)
    return lax.scan(reflect, jnp.broadcast_to(eye, x.shape), steps, reverse=True)[0]


@special(aten.geqrf.default)
def geqrf(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the reflections that make `x` triangular: R and the vectors below it, and factors."""
    value = lax.stop_gradient(value_of(x))
    if value.size:
        turned, factors = jnp.linalg.qr(value, mode="raw")
        value = jnp.swapaxes(turned, -1, -2)
    else:
        factors = jnp.zeros((*value.shape[:-2], min(value.shape[-2:])), value.dtype)
    metas = [torch.empty(v.shape, dtype=x.dtype, device="meta") for v in (value, factors)]
    made = zip((value, factors), metas, strict=True)
    return tuple(wrap_as(None, v, meta, current(), flow_of([x])) for v, meta in made)


@lowering(aten.ormqr.default)
def _ormqr(
    x: jax.Array, tau: jax.Array, other: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    """Return Q other, Q^H other, other Q or other Q^H for the full square Q in `x` and `tau`."""
    size = other.shape[-2] if left else other.shape[-1]
    if not other.size:
        return other
    # Columns past the reflections or the rows take no part.
    x = x[..., : min(size, tau.shape[-1])]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    scales = [(0, 0)] * (tau.ndim - 1) + [(0, size - tau.shape[-1])]
    q = _householder_product(jnp.pad(x, padding), jnp.pad(tau, scales))
    q = jnp.conj(jnp.swapaxes(q, -1, -2)) if transpose else q
    return q @ other if left else other @ q


@lowering(
    aten._linalg_eigh.default, reason="torchax symmetrises the input; LAPACK reads one triangle"
)
def _eigh(x: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    lower = UPLO.upper() == "L"
    triangle = jnp.tril(x) if lower else jnp.triu(x)
    strict = jnp.tril(x, -1) if lower else jnp.triu(x, 1)
    # The gradient is that of a symmetric input, as in torch.
    whole = value_and_gradient(triangle + _adjoint(strict), (x + _adjoint(x)) / 2)
    values, vectors = jnp.linalg.eigh(whole, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros(0, x.dtype)


@jax.custom_jvp
def _eig_of(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = jnp.linalg.eig(x)
    return values, vectors


@_eig_of.defjvp
def _eig_jvp(primals: Any, tangents: Any) -> Any:
    """Differentiate eigenvalues and eigenvectors.

    jax has no gradient of the vectors, whose length and phase are a choice. torch's choice is unit
    length and a fixed phase.
    """
    values, vectors = _eig_of(primals[0])
    moved = jnp.linalg.solve(vectors, tangents[0].astype(vectors.dtype) @ vectors)
    gaps = values[..., None, :] - values[..., :, None]
    apart = jnp.where(gaps == 0, 1, gaps)
    turned = vectors @ jnp.where(gaps == 0, 0, moved / apart)
    length = jnp.sum(jnp.conj(vectors) * turned, -2, keepdims=True).real
    slopes = jnp.diagonal(moved, axis1=-2, axis2=-1)
    return (values, vectors), (slopes, turned - vectors * length)


@lowering(
    aten.linalg_eig.default,
    reason="torchax fails on empty matrices; jax has no gradient of the vectors",
)
def _eig(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not x.size:
        kind = jnp.result_type(x.dtype, jnp.complex64)
        return jnp.zeros(x.shape[:-1], kind), x.astype(kind)
    return _eig_of(x)


@lowering(aten._linalg_eigvals.default)
def _eigvals(x: jax.Array) -> jax.Array:
    return _eig(x)[0]


@lowering(aten._linalg_svd.default, reason="torchax takes no compute_uv=False and no driver=")
def _svd(
    x: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not compute_uv:
        nothing = jnp.zeros(0, x.dtype)
        return nothing, jnp.linalg.svd(x, compute_uv=False), nothing
    u, s, vh = jnp.linalg.svd(x, full_matrices=full_matrices)
    return u, s, vh


@lowering(aten.linalg_matrix_exp.default, reason=SAME)
def _matrix_exp(x: jax.Array) -> jax.Array:
    return jsl.expm(wide(x)) if x.size else x


# -- pseudo-inverse and least squares --------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _pseudo_inverse(x: jax.Array, tolerances: tuple[Any, Any], hermitian: bool) -> jax.Array:
    atol, rtol = tolerances
    if hermitian:
        values, vectors = _eigh(x)
        left, right, sizes = vectors, _adjoint(vectors), jnp.abs(values)
    else:
        left, values, right = jnp.linalg.svd(x, full_matrices=False)
        sizes = values
    limit = jnp.maximum(atol[..., None], rtol[..., None] * sizes.max(-1, keepdims=True))
    kept = sizes > limit
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0).astype(x.dtype)
    return _adjoint(right) * inverse[..., None, :] @ _adjoint(left)


@_pseudo_inverse.defjvp
def _pseudo_inverse_jvp(hermitian: bool, primals: Any, tangents: Any) -> Any:
    """Differentiate by Golub and Pereyra's formula.

    It is finite for singular matrices, unlike the gradient of the decomposition.
    """
    x, tolerances = primals
    moved = tangents[0]
    p = _pseudo_inverse(x, tolerances, hermitian)
    turned = _adjoint(moved)
    first = -p @ moved @ p
    # x @ p is not symmetric if the matrix is not, which `hermitian` takes it for.
    second = (p @ _adjoint(p)) @ (turned - (turned @ x) @ p)
    third = turned @ (_adjoint(p) @ p)
    return p, first + second + (third - p @ (x @ third))


def _tolerances(x: jax.Array, atol: Any, rtol: Any) -> tuple[jax.Array, jax.Array]:
    real = x.real.dtype
    default = max(x.shape[-2:]) * float(jnp.finfo(x.dtype).eps)
    if rtol is None:
        rtol = default if atol is None else jnp.where(jnp.asarray(atol) > 0, 0.0, default)
    return jnp.asarray(0 if atol is None else atol, real), jnp.asarray(rtol, real)


def _as_value(x: Any) -> Any:
    return value_of(x) if isinstance(x, torch.Tensor) else x


@special(aten.linalg_pinv.atol_rtol_tensor)
def _pinv(
    x: torch.Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> torch.Tensor:
    """Compute the pseudo-inverse; singular values up to max(atol, rtol * largest) count as zero."""
    value = value_of(x)
    if not value.size:
        made = jnp.zeros((*value.shape[:-2], value.shape[-1], value.shape[-2]), value.dtype)
    else:
        made = _pseudo_inverse(
            value, _tolerances(value, _as_value(atol), _as_value(rtol)), hermitian
        )
    meta = torch.empty(made.shape, dtype=x.dtype, device="meta")
    return wrap_as(None, made, meta, current(), flow_of([x]))


@special(aten.linalg_lstsq.default)
def _lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the least-squares solution of least norm.

    Residuals, rank and singular values are those of torch's CPU drivers (by default `gelsy`).
    """
    x, right = value_of(a), value_of(b)
    rows, columns = x.shape[-2:]
    is_vector = right.ndim == x.ndim - 1
    right = right[..., None] if is_vector else right
    solution = _pseudo_inverse(x, _tolerances(x, None, rcond), False) @ right
    driver = driver or "gelsy"
    residuals = rank = singular = None
    if rows > columns and driver != "gelsy":
        residuals = jnp.sum(jnp.square(jnp.abs(right - x @ solution)), -2)
    if driver != "gels":
        singular = jnp.linalg.svd(lax.stop_gradient(x), compute_uv=False)
        rank = jnp.sum(
            singular > _tolerances(x, None, rcond)[1] * singular.max(-1, keepdims=True, initial=0),
            -1,
        )
    shape = solution[..., 0] if is_vector else solution
    real = torch.empty(0, dtype=a.dtype).abs().dtype
    results = (
        (shape, a.dtype),
        (residuals, real),
        (rank, torch.int64),
        (singular if driver in ("gelsd", "gelss") else None, real),
    )
    made = []
    for value, dtype in results:
        value = jnp.zeros(0, jnp.float32) if value is None else value
        meta = torch.empty(value.shape, dtype=dtype, device="meta")
        made.append(wrap_as(None, value, meta, current(), flow_of([a, b])))
    return tuple(made)
