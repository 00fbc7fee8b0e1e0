"""Products, factorisations and solves of matrices, Fourier transforms and distances."""

import dataclasses
from typing import Any

import torch

from tests.model.lowering_cases.case import b, call, case, f, i, t, turned

aten = torch.ops.aten
NAN = float("nan")


def c(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.complex(f(*shape, seed=seed), f(*shape, seed=seed + 50))


def definite(*shape: int, seed: int = 1) -> torch.Tensor:
    """Symmetric positive definite matrices."""
    x = f(*shape, seed=seed)
    return x @ x.mT + 2 * torch.eye(shape[-1])


def solid(*shape: int, seed: int = 1) -> torch.Tensor:
    """Matrices far from singular, that need pivots."""
    return (f(*shape, seed=seed) + 3 * torch.eye(shape[-1])).flip(-2)


_NANS = torch.full((3, 5), NAN)
_A, _B = f(3, 4), f(4, 5, seed=2)
_LEFT, _RIGHT = f(2, 3, 4), f(2, 4, 5, seed=2)

PRODUCTS = [
    case(
        aten.addmm.default, call(_NANS, _A, _B, beta=0), call(f(5), _A, _B, beta=0.3, alpha=0.7),
        call(b(5), b(3, 64), b(64, 5, seed=2), alpha=0.3), call(f(3, 1), turned(_A), turned(_B)),
        call(i(5), i(3, 4), i(4, 5), alpha=2), call(f(), f(3, 0), f(0, 5)),
    ),
    case(
        aten.addmv.default, call(_NANS[:, 0], _A, f(4, seed=2), beta=0),
        call(f(3), turned(_A), f(4), beta=0.3, alpha=0.7),
        call(b(3), b(3, 64), b(64, seed=2), alpha=0.3), call(i(3), i(3, 4), i(4), beta=2),
        call(f(), _A, f(4)),
    ),
    case(
        aten.baddbmm.default, call(_NANS, _LEFT, _RIGHT, beta=0),
        call(f(2, 1, 5), turned(_LEFT), _RIGHT, beta=0.3, alpha=0.7),
        call(b(5), b(2, 3, 64), b(2, 64, 5, seed=2), alpha=0.3),
        call(i(5), i(2, 3, 4), i(2, 4, 5), beta=2),
    ),
    case(
        aten.addbmm.default, call(_NANS, _LEFT, _RIGHT, beta=0),
        call(f(1, 5), turned(_LEFT), _RIGHT, beta=0.3, alpha=0.7),
        call(b(3, 5), b(2, 3, 64), b(2, 64, 5, seed=2), alpha=0.3),
        call(i(3, 5), i(2, 3, 4), i(2, 4, 5), beta=2),
    ),
    case(
        aten.addr.default, call(_NANS, f(3), f(5, seed=2), beta=0),
        call(f(5), f(3), f(5, seed=2), beta=0.3, alpha=0.7),
        call(b(3, 5), b(3), b(5, seed=2), alpha=0.3), call(i(3, 5), i(3), i(5), alpha=2),
        call(t(True, False), t(True, True), t(False, True)),
    ),
    case(
        aten.mm.default, call(_A, turned(_B)), call(i(3, 4), i(4, 5)), call(b(3, 64), b(64, 5)),
        call(f(3, 0), f(0, 5)), call(c(2, 3), c(3, 2)),
    ),
    case(
        aten.bmm.default, call(turned(_LEFT), _RIGHT), call(i(2, 3, 4), i(2, 4, 5)),
        call(b(2, 3, 64), b(2, 64, 5)), call(f(0, 3, 4), f(0, 4, 5)),
    ),
    case(
        aten.mv.default, call(turned(_A), f(4)), call(i(3, 4), i(4)), call(b(3, 64), b(64)),
        call(f(3, 0), f(0)),
    ),
    case(
        aten.dot.default, call(f(9), f(9, seed=2)), call(i(4), i(4, seed=2)),
        call(b(64), b(64, seed=2)), call(f(0), f(0)), call(c(3), c(3, seed=2)),
    ),
    case(
        aten.vdot.default, call(c(3), c(3, seed=2)), call(f(9), f(9, seed=2)),
        call(i(4), i(4, seed=2)), call(f(0), f(0)),
    ),
]  # fmt: skip
PRODUCTS = [dataclasses.replace(one, bf16=8e-3) for one in PRODUCTS]


def both(symmetric: torch.Tensor, below: bool) -> torch.Tensor:
    """A symmetric matrix of which the triangle that must not be read holds nonsense."""
    noise = torch.full_like(symmetric, 7.0)
    if below:
        return torch.tril(symmetric) + torch.triu(noise, 1)
    return torch.triu(symmetric) + torch.tril(noise, -1)


def _triangle_of(op: Any, place: int) -> Any:
    """torch's gradient of the triangle that is not read is not zero: here it is cut off."""

    def run(*args: Any) -> torch.Tensor:
        *operands, upper = args if isinstance(args[-1], bool) else (*args, False)
        factor = operands[place]
        operands[place] = factor.triu() if upper else factor.tril()
        return op(*operands, upper)

    return run


_SPD = definite(2, 3, 3)
_FACTOR = torch.linalg.cholesky(_SPD)
_TRI = f(2, 3, 3).tril() + 3 * torch.eye(3)

CHOLESKY = [
    case(
        aten.cholesky.default, call(_SPD), call(_SPD, True), call(definite(3, 3)), call(f(0, 3, 3)),
    ),
    case(
        aten.linalg_cholesky_ex.default, call(_SPD, check_errors=True), call(_SPD, upper=True),
        call(turned(definite(3, 3))), call(f(0, 3, 3)),
    ),
    case(
        aten.cholesky_solve.default, call(f(2, 3, 2), _FACTOR), call(f(2, 3, 2), _FACTOR.mT, True),
        call(f(3, 2), _FACTOR), call(f(2, 3, 0), _FACTOR),
        run=_triangle_of(aten.cholesky_solve.default, 1),
    ),
    case(
        aten.cholesky_inverse.default, call(_FACTOR), call(_FACTOR.mT.contiguous(), True),
        call(torch.diag(t(1e-3, 1.0, 1e3))), run=_triangle_of(aten.cholesky_inverse.default, 0),
    ),
    case(
        aten.linalg_solve_triangular.default, call(_TRI, f(3, 2), upper=False),
        call(_TRI, f(2, 2, 3), upper=False, left=False),
        call(_TRI.mT, f(2, 3, 2), upper=True, unitriangular=True),
        call(_TRI, f(2, 3, 0), upper=False),
    ),
    case(
        aten.triangular_solve.default, call(f(3, 2), _TRI, False),
        call(f(2, 3, 2), _TRI, False, True), call(f(2, 3, 2), _TRI.mT, True, False, True),
        outputs=1,
    ),
]  # fmt: skip

_SQUARE = solid(2, 3, 3)
_LU, _PIVOTS = torch.linalg.lu_factor(_SQUARE)
_WIDE_LU, _WIDE_PIVOTS = torch.linalg.lu_factor(f(3, 5))
_TALL_LU, _TALL_PIVOTS = torch.linalg.lu_factor(f(5, 3))

LU = [
    case(
        aten.linalg_lu_factor_ex.default, call(_SQUARE), call(f(3, 5)), call(f(5, 3)),
        call(turned(solid(3, 3))), call(f(0, 3, 3)),
    ),
    case(aten.linalg_lu.default, call(_SQUARE), call(f(3, 5)), call(f(5, 3)), call(f(0, 3, 3))),
    case(
        aten.lu_unpack.default, call(_LU, _PIVOTS), call(_WIDE_LU, _WIDE_PIVOTS),
        call(_TALL_LU, _TALL_PIVOTS), call(_LU, _PIVOTS, True, False),
    ),
    case(aten.lu_unpack.default, call(_LU, _PIVOTS, False), grad=False),
    case(
        aten.linalg_lu_solve.default, call(_LU, _PIVOTS, f(3, 2)),
        call(_LU, _PIVOTS, f(2, 3, 2), adjoint=True), call(_LU, _PIVOTS, f(2, 2, 3), left=False),
        call(_LU, _PIVOTS, f(2, 2, 3), left=False, adjoint=True),
    ),
    case(
        aten._linalg_solve_ex.default, call(_SQUARE, f(2, 3)),
        call(_SQUARE, f(2, 2, 3), left=False), call(_SQUARE, f(3, 2)), call(solid(3, 3), f(3)),
        call(turned(solid(3, 3)), f(3, 2)), call(f(0, 3, 3), f(0, 3, 2)), outputs=1,
    ),
    case(
        aten.linalg_inv_ex.default, call(_SQUARE, check_errors=True), call(turned(solid(3, 3))),
        call(f(0, 3, 3)),
    ),
    case(
        aten._linalg_det.default, call(_SQUARE), call(turned(solid(3, 3))), call(f(0, 3, 3)),
        call(f(2, 0, 0)), run=lambda x: aten._linalg_det.default(x)[0],
    ),
    case(
        aten._linalg_slogdet.default, call(_SQUARE), call(turned(solid(3, 3))), call(f(0, 3, 3)),
        call(f(2, 0, 0)), run=lambda x: aten._linalg_slogdet.default(x)[:2],
    ),
]  # fmt: skip


def _same_sign(*vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Columns without their signs, which are a choice."""
    return tuple(v.abs() for v in vectors)


def _eigh(x: torch.Tensor, *args: Any) -> Any:
    values, vectors = aten._linalg_eigh.default(x, *args)
    return (values, *_same_sign(vectors)) if vectors.dim() > 1 else (values, vectors)


def _eig(x: torch.Tensor) -> Any:
    values, vectors = aten.linalg_eig.default(x)
    order = values.real.argsort(-1)
    columns = order[..., None, :].expand(vectors.shape)
    return values.gather(-1, order), vectors.abs().gather(-1, columns)


def _eigvals(op: Any) -> Any:
    def run(x: torch.Tensor) -> torch.Tensor:
        values = op(x)
        return values.gather(-1, values.real.argsort(-1))

    return run


def _svd(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    u, s, vh = aten._linalg_svd.default(x, *args, **kwargs)
    return s, u.abs(), vh.abs()


def _pinv(
    x: torch.Tensor, atol: float | None = None, rtol: float | None = None, **options: Any
) -> Any:
    """Tolerances have no gradient."""
    given = {"atol": atol, "rtol": rtol}
    limits = {k: None if v is None else torch.tensor(v) for k, v in given.items()}
    return aten.linalg_pinv.atol_rtol_tensor(x, **limits, **options)


_QR = f(2, 5, 3)
_GEQRF, _TAU = torch.geqrf(_QR)
_REAL_EIGENVALUES = torch.diag(t(1.0, 2.0, 4.0)) + 0.1 * f(3, 3)

FACTORIZATIONS = [
    case(
        aten.linalg_qr.default, call(_QR), call(f(2, 3, 5)), call(turned(f(4, 3)), "reduced"),
        call(f(0, 3)),
    ),
    case(
        aten.linalg_qr.default, call(_QR, "complete"), call(_QR, "r"), call(f(3, 0), "complete"),
        grad=False,
    ),
    case(aten.linalg_householder_product.default, call(f(0, 3, 2), f(0, 2)), call(_GEQRF, _TAU)),
    case(aten.geqrf.default, call(f(2, 5, 3)), call(turned(f(3, 4))), call(f(0, 3)), grad=False),
    case(
        aten.ormqr.default, call(f(3, 5), f(3), f(3, 2)), call(_GEQRF, _TAU, f(2, 5, 2)),
        call(_GEQRF, _TAU, f(2, 5, 2), True, True), call(_GEQRF, _TAU, f(2, 2, 5), False),
    ),
    case(
        aten._linalg_eigh.default, call(both(definite(3, 3), True)),
        call(both(definite(3, 3), False), "U"), call(_SPD), run=_eigh, rtol=1e-4,
    ),
    case(aten._linalg_eigh.default, call(_SPD, "L", False), run=_eigh, grad=False),
    case(
        aten.linalg_eig.default, call(f(0, 3, 3)), call(_REAL_EIGENVALUES),
        call(torch.stack([_REAL_EIGENVALUES, _REAL_EIGENVALUES.mT])), run=_eig, rtol=1e-4,
    ),
    case(
        aten._linalg_eigvals.default, call(f(0, 3, 3)), call(_REAL_EIGENVALUES),
        run=_eigvals(aten._linalg_eigvals.default), rtol=1e-4, grad=False,
    ),
    case(
        aten._linalg_svd.default, call(f(4, 3), False, True), call(f(2, 3, 5)),
        call(turned(f(3, 4))), run=_svd, rtol=1e-4,
    ),
    case(
        aten._linalg_svd.default, call(f(2, 3, 5), False, False), call(f(4, 2), True), run=_svd,
        rtol=1e-4, grad=False,
    ),
    case(aten.linalg_matrix_exp.default, call(f(0, 3, 3)), call(f(2, 3, 3)), call(turned(f(3, 3)))),
    case(
        aten.linalg_pinv.atol_rtol_tensor, call(f(2, 3, 5), rtol=0.1), call(f(5, 3)),
        call(_SPD, hermitian=True), call(f(3, 3), hermitian=True), call(f(0, 3, 2)),
        call(torch.diag(t(3.0, 2.0, 0.0)), atol=0.5),
        run=_pinv, rtol=1e-4,
    ),
    case(
        aten.linalg_lstsq.default, call(f(5, 3), f(5, 2)), call(f(2, 3, 5), f(2, 3, 2)),
        call(f(2, 5, 3), f(2, 5)), call(f(5, 3), f(5, 2), driver="gels"),
        call(f(5, 3), f(5, 2), 1e-3, driver="gelsd"), rtol=1e-4, outputs=1,
    ),
]  # fmt: skip

_FOUR = c(2, 3, 2, 5)
FOURIER = [
    case(
        aten._fft_c2c.default, call(_FOUR, [0, 1, 2, 3], 0, True), call(_FOUR, [1], 1, False),
        call(turned(c(3, 4)), [0, 1], 2, True), call(c(3), [], 0, True), grad=False,
    ),
    case(
        aten._fft_r2c.default, call(f(2, 3, 2, 5), [0, 1, 2, 3], 0, True),
        call(f(3, 5), [1], 1, False), call(turned(f(3, 4)), [0, 1], 2, True),
    ),
    case(
        aten._fft_c2r.default, call(torch.fft.rfftn(f(4, 5)), [0, 1], 2, 5),
        call(torch.fft.rfft(f(3, 4)), [1], 1, 4),
        call(torch.fft.rfftn(f(2, 3, 2, 5)), [0, 1, 2, 3], 0, 5), grad=False,
    ),
]  # fmt: skip

_MANY = f(30, 3)
_SAME_ROWS = torch.cat([f(2, 3), f(2, 3)])
DISTANCES = [
    case(
        aten.dist.default, call(f(3), f(3).clone()), call(f(2, 3), f(3, seed=2), 1),
        call(f(2, 3), f(2, 3, seed=2), 3.0), call(f(4), f(4, seed=2), float("inf")),
    ),
    case(
        aten._cdist_forward.default, call(_SAME_ROWS, _SAME_ROWS.clone(), 2.0, 2),
        call(f(2, 4, 3), f(2, 5, 3, seed=2), 1.0, None),
        call(turned(f(4, 3)), f(5, 3, seed=2), float("inf"), None),
        call(f(4, 3), f(5, 3, seed=2), 0.0, None), call(f(4, 3), f(5, 3, seed=2), 3.5, None),
        call(f(4, 0), f(5, 0), 2.0, None), call(f(0, 3), f(5, 3), 2.0, None),
    ),
    case(aten._euclidean_dist.default, call(_MANY, f(5, 3, seed=2)), rtol=1e-4),
    case(
        aten._pdist_forward.default, call(_SAME_ROWS), call(f(4, 3), 1.0), call(f(4, 3), 3.0),
        call(f(1, 3)), call(f(4, 0)),
    ),
]  # fmt: skip

CASES = [*PRODUCTS, *CHOLESKY, *LU, *FACTORIZATIONS, *FOURIER, *DISTANCES]
