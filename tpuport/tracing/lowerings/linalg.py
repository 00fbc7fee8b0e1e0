"""Factorisations, solves and products of matrices [..., n, n]."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.tracing.core.lowering_registry import SAME, lowering, special
from tpuport.tracing.core.redispatch import call
from tpuport.tracing.lowerings._numeric import is_low, value_and_gradient, wide

aten = torch.ops.aten


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _first(failed: jax.Array) -> jax.Array:
    """Return LAPACK's status of matrices: which row [..., n] failed first, counted from 1, or 0."""
    if not failed.shape[-1]:
        return jnp.zeros(failed.shape[:-1], jnp.int32)
    return jnp.where(failed.any(-1), jnp.argmax(failed, -1) + 1, 0).astype(jnp.int32)


def _singular(factors: jax.Array) -> jax.Array:
    """Return the status of LU factors: the first place of the diagonal of U that is 0."""
    return _first(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0)


def _minor(x: jax.Array, factor: jax.Array, upper: bool) -> jax.Array:
    """Return the order of the first leading minor of `x` that is not positive definite, or 0.

    It is computed only if the factorization has failed.
    """

    def eliminate(_: None) -> jax.Array:
        def step(k: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rest, failed = carried
            row, pivot = rest[..., k, :], rest[..., k, k].real
            scaled = jnp.conj(row) / jnp.where(pivot > 0, pivot, 1)[..., None]
            rest = rest - scaled[..., :, None] * row[..., None, :]
            return rest, failed.at[..., k].set(~(pivot > 0))

        lower = jnp.tril(_adjoint(x) if upper else x)
        whole = lower + _adjoint(jnp.tril(lower, -1))
        start = (whole, jnp.zeros(x.shape[:-1], bool))
        return _first(lax.fori_loop(0, x.shape[-1], step, start)[1])

    status = (~jnp.isfinite(factor)).any((-2, -1))
    if not x.size:
        return status.astype(jnp.int32)
    none = jnp.zeros(x.shape[:-2], jnp.int32)
    order = lax.cond(status.any(), eliminate, lambda _: none, None)
    # Rounding may let the last minor pass here that the factorization found to fail.
    return jnp.where(status, jnp.where(order == 0, x.shape[-1], order), 0)


def _matched(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Broadcast both to the same leading dims."""
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, lead + a.shape[-2:]), jnp.broadcast_to(b, lead + b.shape[-2:])


# -- products --------------------------------------------------------------------------------------


def _blend(x: jax.Array, product: jax.Array, beta: Any, alpha: Any, dtype: Any) -> jax.Array:
    """Return beta * x + alpha * product; with beta 0 even nan in `x` is ignored.

    For integer dtypes the factors are truncated to integers.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        alpha, beta = (int(v) if isinstance(v, float) else v for v in (alpha, beta))
    if isinstance(alpha, int | float | complex) and alpha == 1:
        scaled = product
    else:
        scaled = alpha * product
    if isinstance(beta, int | float | complex):
        if beta == 0:
            return jnp.broadcast_to(scaled, jnp.broadcast_shapes(x.shape, scaled.shape)).astype(
                dtype
            )
        return ((x if beta == 1 else beta * x) + scaled).astype(dtype)
    return (beta * x + scaled).astype(dtype)


def _fused(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def run(
        x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any = 1, alpha: Any = 1
    ) -> jax.Array:
        if is_low(x):
            kept = {"preferred_element_type": jnp.float32}
            return _blend(wide(x), product(a, b, **kept), beta, alpha, x.dtype)
        return _blend(x, product(a, b), beta, alpha, x.dtype)

    return run


_REASON = "torchax rounds alpha and beta to bfloat16 and does not ignore nan under beta=0"
lowering(aten.addmm.default, aten.addmv.default, aten.baddbmm.default, reason=_REASON)(
    _fused(jnp.matmul)
)


def _batch_sum(a: jax.Array, b: jax.Array, **kept: Any) -> jax.Array:
    return jnp.einsum("bij,bjk->ik", a, b, **kept)


lowering(aten.addbmm.default, reason=_REASON)(_fused(_batch_sum))


@lowering(aten.addr.default, reason=_REASON)
def _addr(x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    if x.dtype == jnp.bool_:
        outer = a[:, None] & b
        return (x & bool(beta)) | (outer & bool(alpha))
    return _blend(wide(x) if is_low(x) else x, wide_outer(a, b), beta, alpha, x.dtype)


def wide_outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the outer product of vectors, low precision in float32."""
    a, b = (wide(v) if is_low(v) else v for v in (a, b))
    return a[:, None] * b


@lowering(aten.mv.default, aten.mm.default, aten.bmm.default, aten.dot.default, reason=SAME)
def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b)


@lowering(aten.vdot.default, reason=SAME)
def _vdot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(jnp.conj(a), b)


# -- Cholesky --------------------------------------------------------------------------------------


def _cholesky_of(x: jax.Array, upper: bool) -> jax.Array:
    """Factor one triangle only, as LAPACK reads it.

    The gradient is that of a symmetric input.
    """
    lower = jnp.tril(_adjoint(x) if upper else x)
    whole = lower + _adjoint(jnp.tril(lower, -1))
    whole = value_and_gradient(whole, (x + _adjoint(x)) / 2)
    factor = lax.linalg.cholesky(whole, symmetrize_input=False)
    return _adjoint(factor) if upper else factor


@special(aten.cholesky.default)
def _cholesky(x: torch.Tensor, upper: bool = False) -> torch.Tensor:
    factor, info = call(aten.linalg_cholesky_ex.default, (x,), {"upper": upper})
    call(aten._linalg_check_errors.default, (info, "cholesky"), {"is_matrix": x.dim() == 2})
    return factor


@lowering(aten.linalg_cholesky_ex.default, reason="torchax refuses check_errors=True")
def _cholesky_ex(
    x: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    factor, fixed = _cholesky_of(x, upper), lax.stop_gradient(x)
    return factor, _minor(fixed, lax.stop_gradient(factor), upper)


@lowering(aten.cholesky_solve.default, reason="torchax solves with the wrong triangle of a batch")
def _cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    factor, b = _matched(factor, b)
    return _solved(b, factor, upper) if b.size else b


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _solved(b: jax.Array, factor: jax.Array, upper: bool) -> jax.Array:
    """Solve with the product of a triangular factor and its adjoint."""
    factor = jnp.triu(factor) if upper else jnp.tril(factor)
    lower = _adjoint(factor) if upper else factor
    half = _triangular(lower, b, upper=False)
    return _triangular(_adjoint(lower), half, upper=True)


@_solved.defjvp
def _solved_jvp(upper: bool, primals: Any, tangents: Any) -> Any:
    """Differentiate as torch does: with respect to all elements, not to one triangle."""
    (b, factor), (change, bend) = primals, tangents
    found = _solved(b, factor, upper)
    if upper:
        bent = _adjoint(bend) @ (factor @ found) + _adjoint(factor) @ (bend @ found)
    else:
        bent = bend @ (_adjoint(factor) @ found) + factor @ (_adjoint(bend) @ found)
    return found, _solved(change - bent, factor, upper)


@lowering(
    aten.cholesky_inverse.default,
    reason="torchax multiplies the factors and inverts, losing precision",
)
def _cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(eye, factor, upper)


# -- triangular solves -----------------------------------------------------------------------------


def _triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, unit: bool = False, left: bool = True
) -> jax.Array:
    a = jnp.triu(a) if upper else jnp.tril(a)
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, lead + a.shape[-2:])
    b = jnp.broadcast_to(b, lead + b.shape[-2:])
    if not b.size:
        return b
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unit)


@lowering(
    aten.linalg_solve_triangular.default,
    reason="torchax does not broadcast batches, nor transpose a with left=False",
)
def _solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    return _triangular(a, b, upper=upper, unit=unitriangular, left=left)


@lowering(aten.triangular_solve.default, reason="torchax does not broadcast batches")
def _triangular_solve(
    b: jax.Array,
    a: jax.Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[jax.Array, jax.Array]:
    a, b = _matched(a, b)
    triangle = jnp.triu(a) if upper else jnp.tril(a)
    if transpose:
        return _triangular(
            jnp.swapaxes(triangle, -1, -2), b, upper=not upper, unit=unitriangular
        ), a
    return _triangular(triangle, b, upper=upper, unit=unitriangular), a


@lowering(
    aten.linalg_ldl_factor_ex.default,
    reason="torchax factors by Cholesky: nan unless positive definite",
)
def _ldl_factor(x: jax.Array, **options: Any) -> Any:
    msg = "jax has no symmetric indefinite factorisation; use torch.linalg.solve or cholesky"
    raise NotImplementedError(msg)


_TRACED_SIZES = "torchax slices with traced sizes, which fails under jit"


# -- LU --------------------------------------------------------------------------------------------


def _lu(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return packed factors, pivots counted from 1 as in LAPACK, and the permutation."""
    if not x.size:
        rows = min(x.shape[-2:])
        pivots = jnp.zeros((*x.shape[:-2], rows), jnp.int32)
        return x, pivots, jnp.broadcast_to(jnp.arange(x.shape[-2]), x.shape[:-1])
    factors, pivots, permutation = lax.linalg.lu(x)
    return factors, pivots + 1, permutation


def _without_pivots(x: jax.Array) -> jax.Array:
    """Compute packed LU factors by plain elimination, row by row."""
    rows = jnp.arange(x.shape[-2])
    columns = jnp.arange(x.shape[-1])

    def step(k: int, a: jax.Array) -> jax.Array:
        column = jnp.where(rows > k, a[..., :, k] / a[..., k, k][..., None], 0)
        a = a - column[..., :, None] * jnp.where(columns > k, a[..., k, :], 0)[..., None, :]
        return jnp.where((rows > k)[:, None] & (columns == k), column[..., :, None], a)

    for k in range(min(x.shape[-2:])):
        x = step(k, x)
    return x


@lowering(aten.linalg_lu_factor_ex.default, reason="torchax pivots under pivot=False")
def _lu_factor(
    x: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, ...]:
    if pivot:
        factors, pivots, _ = _lu(x)
        return factors, pivots, _singular(factors)
    count, factors = min(x.shape[-2:]), _without_pivots(x)
    pivots = jnp.broadcast_to(jnp.arange(1, count + 1), (*x.shape[:-2], count))
    return factors, pivots, _singular(factors)


def _triangles(factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, columns = factors.shape[-2:]
    count = min(rows, columns)
    eye = jnp.eye(rows, count, dtype=factors.dtype)
    return jnp.tril(factors[..., :count], -1) + eye, jnp.triu(factors[..., :count, :])


def _permutation_matrix(order: jax.Array, dtype: Any) -> jax.Array:
    """Return P with P[order[i], i] = 1, so that P @ (L @ U) has its rows back in place."""
    return (jnp.arange(order.shape[-1])[:, None] == order[..., None, :]).astype(dtype)


def _order_of(pivots: jax.Array, rows: int) -> jax.Array:
    """Return the permutation that a sequence of row swaps (counted from 1) makes."""
    order = jnp.broadcast_to(jnp.arange(rows), (*pivots.shape[:-1], rows))
    for k in range(pivots.shape[-1]):
        other = pivots[..., k : k + 1] - 1
        mine, theirs = order[..., k : k + 1], jnp.take_along_axis(order, other, -1)
        order = jnp.where(jnp.arange(rows) == other, mine, order)
        order = jnp.where(jnp.arange(rows) == k, theirs, order)
    return order


@lowering(aten.linalg_lu.default, reason=_TRACED_SIZES)
def _linalg_lu(x: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not pivot:
        return (jnp.zeros(0, x.dtype), *_triangles(_without_pivots(x)))
    factors, _, order = _lu(x)
    return (_permutation_matrix(order, x.dtype), *_triangles(factors))


@lowering(aten.lu_unpack.default, reason=_TRACED_SIZES)
def _lu_unpack(
    factors: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    nothing = jnp.zeros(0, factors.dtype)
    lower, upper = _triangles(factors) if unpack_data else (nothing, nothing)
    if not unpack_pivots:
        return nothing, lower, upper
    return _permutation_matrix(_order_of(pivots, factors.shape[-2]), factors.dtype), lower, upper


@lowering(
    aten.linalg_lu_solve.default,
    reason="torchax does not broadcast batches, and conjugates real transposes",
)
def _lu_solve(
    factors: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    if not left:
        # X A = B is A^H X^H = B^H.
        return _adjoint(_lu_solve(factors, pivots, _adjoint(b), left=True, adjoint=not adjoint))
    lower, upper = _triangles(factors)
    lead = jnp.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    order = jnp.broadcast_to(_order_of(pivots, factors.shape[-2]), (*lead, factors.shape[-2]))
    b = jnp.broadcast_to(b, lead + b.shape[-2:])
    if not adjoint:
        b = jnp.take_along_axis(b, order[..., None], -2)
        return _triangular(upper, _triangular(lower, b, upper=False, unit=True), upper=True)
    half = _triangular(_adjoint(upper), b, upper=False)
    solved = _triangular(_adjoint(lower), half, upper=True, unit=True)
    return jnp.take_along_axis(solved, jnp.argsort(order, -1)[..., None], -2)


# -- general solves --------------------------------------------------------------------------------


@lowering(
    aten._linalg_solve_ex.default, reason="torchax takes neither left=False nor vectors in a batch"
)
def _solve(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Solve a x = b for x (x a = b if not `left`); `b` may be a batch of vectors."""
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    rows = b[..., None] if is_vector else b
    factors, pivots, _ = _lu(a)
    solved = _lu_solve(factors, pivots, rows, left=left or is_vector)
    return solved[..., 0] if is_vector else solved, factors, pivots, _singular(factors)


@lowering(aten.linalg_inv_ex.default, reason="torchax refuses check_errors=")
def _inverse(x: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    factors, _, _ = _lu(lax.stop_gradient(x))
    return (jnp.linalg.inv(x) if x.size else x), _singular(factors)


@lowering(aten._linalg_det.default)
def _det(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    factors, pivots, _ = _lu(lax.stop_gradient(x))
    return (jnp.linalg.det(x) if x.size else jnp.ones(x.shape[:-2], x.dtype)), factors, pivots


@lowering(aten._linalg_slogdet.default, reason="torchax returns two of four results")
def _slogdet(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    factors, pivots, _ = _lu(lax.stop_gradient(x))
    if not x.size:
        one = jnp.ones(x.shape[:-2], x.dtype)
        return one, jnp.zeros(one.shape, one.real.dtype), factors, pivots
    sign, logarithm = jnp.linalg.slogdet(x)
    return sign, logarithm, factors, pivots
