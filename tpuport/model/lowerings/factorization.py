"""QR, eigenvalue and singular value decompositions, and what torch builds on them."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import linalg as jsl

from tpuport.model.lowerings import lowering

aten = torch.ops.aten


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


@lowering(aten.geqrf.default)
def _geqrf(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.linalg.geqrf(x)


@lowering(aten.linalg_householder_product.default, reason="torchax fails on empty matrices")
def _householder_product(x: jax.Array, tau: jax.Array) -> jax.Array:
    return lax.linalg.householder_product(x, tau) if x.size else x


@lowering(aten.ormqr.default)
def _ormqr(
    x: jax.Array, tau: jax.Array, other: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    """Q other, Q^H other, other Q or other Q^H for the full square Q that `x` and `tau` hold."""
    size = other.shape[-2] if left else other.shape[-1]
    if not other.size:
        return other
    padding = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    scales = [(0, 0)] * (tau.ndim - 1) + [(0, size - tau.shape[-1])]
    q = lax.linalg.householder_product(jnp.pad(x, padding), jnp.pad(tau, scales))
    q = jnp.conj(jnp.swapaxes(q, -1, -2)) if transpose else q
    return q @ other if left else other @ q


@lowering(
    aten._linalg_eigh.default, reason="torchax symmetrises the input; LAPACK reads one triangle"
)
def _eigh(x: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    lower = UPLO.upper() == "L"
    triangle = jnp.tril(x) if lower else jnp.triu(x)
    strict = jnp.tril(x, -1) if lower else jnp.triu(x, 1)
    values, vectors = jnp.linalg.eigh(
        triangle + jnp.conj(jnp.swapaxes(strict, -1, -2)), symmetrize_input=False
    )
    return values, vectors if compute_v else jnp.zeros(0, x.dtype)


@lowering(aten.linalg_eig.default, reason="torchax fails on empty matrices")
def _eig(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not x.size:
        kind = jnp.result_type(x.dtype, jnp.complex64)
        return jnp.zeros(x.shape[:-1], kind), x.astype(kind)
    values, vectors = jnp.linalg.eig(x)
    return values, vectors


@lowering(aten._linalg_eigvals.default, aten.linalg_eigvals.default)
def _eigvals(x: jax.Array) -> jax.Array:
    return _eig(x)[0] if not x.size else jnp.linalg.eigvals(x)


@lowering(aten._linalg_svd.default, reason="torchax takes no compute_uv=False and no driver=")
def _svd(
    x: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not compute_uv:
        nothing = jnp.zeros(0, x.dtype)
        return nothing, jnp.linalg.svd(x, compute_uv=False), nothing
    u, s, vh = jnp.linalg.svd(x, full_matrices=full_matrices)
    return u, s, vh


@lowering(aten.linalg_matrix_exp.default, reason="torchax fails on empty matrices")
def _matrix_exp(x: jax.Array) -> jax.Array:
    return jsl.expm(x) if x.size else x


@lowering(aten.linalg_pinv.atol_rtol_tensor, reason="torchax ignores atol= and hermitian=")
def _pinv(
    x: jax.Array, *, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> jax.Array:
    """Pseudo-inverse: singular values of at most max(atol, rtol * largest) count as zero."""
    rows, columns = x.shape[-2:]
    if not x.size:
        return jnp.zeros((*x.shape[:-2], columns, rows), x.dtype)
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    if rtol is None:
        given = atol is not None
        rtol = (
            jnp.where(jnp.asarray(atol) > 0, 0.0, _default_rtol(x)) if given else _default_rtol(x)
        )
    limit = jnp.asarray(rtol)[..., None] * s.max(-1, keepdims=True)
    limit = limit if atol is None else jnp.maximum(jnp.asarray(atol)[..., None], limit)
    kept = s > limit
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0).astype(x.dtype)
    return (
        jnp.conj(jnp.swapaxes(vh, -1, -2))
        * inverse[..., None, :]
        @ jnp.conj(jnp.swapaxes(u, -1, -2))
    )


def _default_rtol(x: jax.Array) -> float:
    return max(x.shape[-2:]) * float(jnp.finfo(x.dtype).eps)


@lowering(
    aten.linalg_lstsq.default,
    reason="torchax reads the rank as a Python number, which fails under jit",
)
def _lstsq(
    a: jax.Array, b: jax.Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The solution of least norm.

    Residuals for full-rank tall systems, as LAPACK's `gelsy` (the default) gives none.
    """
    rows, columns = a.shape[-2:]
    is_vector = b.ndim == a.ndim - 1
    right = b[..., None] if is_vector else b
    solution = _pinv(a, rtol=_default_rtol(a) if rcond is None else rcond) @ right
    nothing = jnp.zeros(0, a.dtype)
    driver = driver or "gelsy"
    residuals = nothing
    if rows > columns and driver != "gelsy":
        error = right - a @ solution
        residuals = jnp.sum(jnp.square(jnp.abs(error)), -2)
    singular = jnp.linalg.svd(a, compute_uv=False)
    limit = _default_rtol(a) * singular.max(-1, keepdims=True, initial=0)
    rank = jnp.sum(singular > limit, -1) if driver != "gels" else jnp.zeros(0, jnp.int32)
    values = singular if driver in ("gelsd", "gelss") else nothing
    return solution[..., 0] if is_vector else solution, residuals, rank, values
