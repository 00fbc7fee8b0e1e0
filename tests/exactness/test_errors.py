"""What eager raises for values, the port raises: on any call, and only where eager does."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.exactness.scenario import normal

pytestmark = pytest.mark.filterwarnings("ignore:torch.cholesky is dep|index_reduce.. is in beta")

T = torch.tensor
_X = normal(4, 3)
_W = torch.arange(12).reshape(4, 3)
_WRONG = (9, 4, -1, -4, -5)


def _rows(*values: int) -> list[torch.Tensor]:
    return [T([v]) for v in values]


# By name: the op on x [4, 3] and an operand, operands that eager takes, and others.
_Op = tuple[Callable[[torch.Tensor, Any], Any], list[torch.Tensor], list[torch.Tensor]]
_INDEXED: dict[str, _Op] = {
    name: (op, _rows(0, 2, -1 if negative else 3), _rows(*_WRONG))
    for name, negative, op in (
        ("embedding", False, lambda x, k: F.embedding(k, x)),
        ("embedding padded", False, lambda x, k: F.embedding(k, x, padding_idx=2)),
        ("embedding bag", False, lambda x, k: F.embedding_bag(k, x, T([0]))),
        ("embedding bag max", False, lambda x, k: F.embedding_bag(k, x, T([0]), mode="max")),
        ("index_select", False, lambda x, k: x.index_select(0, k)),
        ("index_add", False, lambda x, k: x.index_add(0, k, x[:1])),
        ("index_add 1d", False, lambda x, k: x[:, 0].index_add(0, k, x[:1, 0])),
        ("index_copy", False, lambda x, k: x.index_copy(0, k, x[:1])),
        ("index_fill", True, lambda x, k: x.index_fill(0, k, 1.0)),
        ("index_reduce", False, lambda x, k: x.index_reduce(0, k, x[:1], "amax")),
        ("gather", False, lambda x, k: x[:, 0].gather(0, k)),
        ("scatter", False, lambda x, k: x[:, 0].scatter(0, k, 1.0)),
        ("scatter src", False, lambda x, k: x[:, 0].scatter(0, k, x[0, :1] * 2)),
        ("scatter_add", False, lambda x, k: x[:, 0].scatter_add(0, k, x[0, :1])),
        ("scatter_reduce", False, lambda x, k: x[:, 0].scatter_reduce(0, k, x[0, :1], "amax")),
        ("scatter_", False, lambda x, k: x[:, 0].clone().scatter_(0, k, 2.0)),
        ("take", True, lambda x, k: x[:, 0].take(k)),
        ("put", True, lambda x, k: x[:, 0].put(k, T([1.0]))),
        ("take_along_dim", True, lambda x, k: torch.take_along_dim(x[:, 0], k, 0)),
        ("x[k]", True, lambda x, k: x[k]),
        ("x[:, None, k]", True, lambda x, k: x.T[:, None, k]),
        ("x[0-d]", True, lambda x, k: x[k[0]]),
        ("x[k, 0]", True, lambda x, k: x[k, 0]),
        ("x[host, k]", True, lambda x, k: x.T[T([0, 2]), k]),
        ("host[k]", True, lambda x, k: _X[k] * x[0]),
        ("x[k] = v", True, lambda x, k: _assigned(x, k)),
        ("x[0-d] = v", True, lambda x, k: _assigned(x, k[0])),
        ("index_put", True, lambda x, k: x.index_put((k,), T(1.0), accumulate=True)),
        ("select", True, lambda x, k: x.select(0, k.item())),
        ("one_hot", False, lambda x, k: F.one_hot(k, 4)),
    )
}
_CLASSES = _rows(3, -1, -5)
_TARGETS: dict[str, _Op] = {
    "nll_loss": (lambda x, k: F.nll_loss(x[:1], k), _rows(0, 2, -100), _CLASSES),
    "nll_loss ignoring": (
        lambda x, k: F.nll_loss(x[:1], k, ignore_index=-1, reduction="sum"),
        _rows(2, -1),
        _rows(3, -2, -100),
    ),
    "nll_loss2d": (
        lambda x, k: F.nll_loss(x.reshape(1, 4, 3, 1), T([[[0], [1], [2]]]) * 0 + k),
        _rows(0, 3),
        _rows(4, -1),
    ),
    "cross_entropy": (lambda x, k: F.cross_entropy(x[:1], k), _rows(0, 2), _CLASSES),
    "cross_entropy smooth": (
        lambda x, k: F.cross_entropy(x[:1], k, label_smoothing=0.1, weight=T([1.0, 2.0, 3.0])),
        _rows(0, 2),
        _CLASSES,
    ),
    "multi_margin_loss": (lambda x, k: F.multi_margin_loss(x[:1], k), _rows(0, 2), _CLASSES),
    "multilabel_margin_loss": (
        lambda x, k: F.multilabel_margin_loss(x[:1], k),
        [T([[0, 2, -1]]), T([[-1, 0, 0]])],
        [T([[3, 0, 0]]), T([[-2, 0, 0]]), T([[0, -1, 9]])],
    ),
    "bag offsets": (
        lambda x, k: F.embedding_bag(T([0, 1, 2]), x, k),
        [T([0, 1]), T([0, 3]), T([0, 0])],
        [T([1, 2]), T([0, 4])],
    ),
    "max_unpool2d": (
        lambda x, k: F.max_unpool2d(x[:1, :1, None, None], k.reshape(1, 1, 1, 1), [2, 2]),
        _rows(0, 3),
        _rows(4, -1),
    ),
}


def _as_int(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x * int(k.item())


_NUMBERS: dict[str, _Op] = {
    name: (op, [T([2]), T([-3])], [T([0])])
    for name, op in (
        ("//", lambda x, k: _W // k),
        ("%", lambda x, k: _W % k),
        ("fmod", lambda x, k: _W.fmod(k)),
        ("div trunc", lambda x, k: torch.div(_W, k, rounding_mode="trunc")),
        ("div floor", lambda x, k: torch.div(k, k, rounding_mode="floor")),
        ("number // x", lambda x, k: 5 // k),
        ("number % x", lambda x, k: 5 % k),
        ("//=", lambda x, k: k.clone().floor_divide_(k)),
        ("1 / number", lambda x, k: x * (1 / k.item())),
        ("1 // number", lambda x, k: x * (7 // k.item())),
        ("1 % number", lambda x, k: x * (7 % k.item())),
    )
} | {
    "int ** number": (lambda x, k: _W ** k.item(), [T([2]), T([0])], [T([-1])]),
    "int(x)": (_as_int, [T([2.5])], [T([np.nan]), T([np.inf])]),
    "round(x)": (lambda x, k: x * round(k.item()), [T([2.5])], [T([np.nan]), T([-np.inf])]),
    "kthvalue": (
        lambda x, k: x[:, 0].kthvalue(k.item())[0],
        [T(1), T(4)],
        [T(0), T(5), T(-1)],
    ),
    "is_integer": (lambda x, k: x * (k.item().is_integer() + 1), [T([2.5]), T([3.0])], []),
    "copysign": (lambda x, k: torch.copysign(T(1.0), k), [T([2.5]), T([-0.0])], []),
    "x // 0.0": (lambda x, k: x // k, [T([2.5]), T([0.0])], []),
    "bce": (
        lambda x, k: F.binary_cross_entropy(k, T([1.0])),
        [T([0.5]), T([1.0])],
        [T([-0.1]), T([1.1]), T([np.nan])],
    ),
    "bce target": (
        lambda x, k: F.binary_cross_entropy(x[0, :1].sigmoid(), k),
        [T([0.0]), T([1.0])],
        [T([-0.1]), T([1.1])],
    ),
    "assert_async": (lambda x, k: torch.ops.aten._assert_async(k), [T([1])], [T([0])]),
}
_EYE, _ZERO, _NAN = torch.eye(2), torch.zeros(2, 2), torch.full((2, 2), np.nan)
_L = torch.linalg
_MATRICES: dict[str, _Op] = {
    name: (op, [_EYE * 4], wrong)
    for name, wrong, op in (
        ("cholesky", [-_EYE, _ZERO, _NAN], lambda x, a: _L.cholesky(a)),
        ("torch.cholesky", [-_EYE], lambda x, a: torch.cholesky(a)),
        ("cholesky_ex", [-_EYE], lambda x, a: _L.cholesky_ex(a, check_errors=True)),
        ("inv", [_ZERO], lambda x, a: _L.inv(a)),
        ("inv_ex", [_ZERO], lambda x, a: _L.inv_ex(a, check_errors=True)),
        ("solve", [_ZERO], lambda x, a: _L.solve(a, a)),
        ("lu_factor", [_ZERO], lambda x, a: _L.lu_factor(a)),
        ("matrix_power", [_ZERO], lambda x, a: _L.matrix_power(a, -2)),
        ("svdvals", [_NAN], lambda x, a: _L.svdvals(a)),
        ("pinv", [_NAN], lambda x, a: _L.pinv(a)),
        ("matrix_rank", [_NAN], lambda x, a: _L.matrix_rank(a)),
        ("nuclear norm", [_NAN], lambda x, a: _L.matrix_norm(a, "nuc")),
        ("eigvals", [_NAN * T([[np.inf]])], lambda x, a: _L.eig(a)[0].real),
        ("cholesky_inverse", [_ZERO], lambda x, a: torch.cholesky_inverse(a)),
    )
}


def _assigned(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[k] = 7.0
    return y


def _eager_error(function: Callable[..., Any], *args: Any) -> Exception | None:
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def _notes(error: Exception | None) -> list[str]:
    return getattr(error, "__notes__", [])


def _same(got: Any, expected: Any) -> None:
    for name, value in expected.items():
        for a, b in zip(_parts(tpuport.to_torch(got[name])), _parts(value), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def _parts(value: Any) -> list[torch.Tensor]:
    return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("table", [_INDEXED, _TARGETS, _NUMBERS, _MATRICES])
def test_each_op_raises_where_eager_does(table: dict[str, _Op]) -> None:
    """One program holds all ops, each with an operand of its own, of which one is wrong."""

    def program(x: torch.Tensor, operands: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: op(x, operands[name]) for name, (op, _, _) in table.items()}

    ported = tpuport.convert(program)
    right = {name: fine[0] for name, (_, fine, _) in table.items()}
    for turn in range(3):
        given = {name: fine[turn % len(fine)] for name, (_, fine, _) in table.items()}
        _same(ported(_X, given), program(_X, given))
    for name, (_, _, wrong) in table.items():
        for operand in wrong:
            given = right | {name: operand}
            error = _eager_error(program, _X, given)
            got = _eager_error(ported, _X, given)
            assert isinstance(got, type(error)), (name, operand, error, got)
            assert error is None or any("test_errors.py" in note for note in _notes(got)), name
    _same(ported(_X, right), program(_X, right))


def test_random_ops_check_their_parameters() -> None:
    def draws(p: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
        made = torch.bernoulli(p), torch.ones(2).bernoulli_(p), torch.multinomial(w, 1)
        return [*made, torch.poisson(s), torch.normal(T([0.0, 0.0]), s)]

    ported = tpuport.convert(draws, verify=False)
    right = T([0.0, 1.0]), T([0.0, 1.0]), T([0.0, 2.0])
    assert tpuport.to_torch(ported(*right)[0]).tolist() == [0.0, 1.0]
    wrong = {0: ([-0.1, 1.0], [1.1, 0.0], [0.0, np.nan]), 2: ([-0.1, 1.0],)}
    wrong[1] = ([-0.1, 1.0], [0.0, 0.0], [np.inf, 1.0], [np.nan, 1.0])
    for number, values in wrong.items():
        for value in values:
            given = [*right[:number], T(value), *right[number + 1 :]]
            error = _eager_error(draws, *given)
            assert isinstance(error, RuntimeError), value
            assert isinstance(_eager_error(ported, *given), type(error)), value


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_checks_without_gradients(mode: Any) -> None:
    def program(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        with mode():
            return _L.cholesky(x[k][:, k])

    a, k = torch.eye(3), T([0, 1])
    _agrees(program, (a, k), (a, k + 2), (-a, k))


def _gradient(x: torch.Tensor) -> np.ndarray:
    assert x.grad is not None
    return x.grad.numpy()


@pytest.mark.parametrize("table", [_INDEXED, _TARGETS])
def test_gradients_of_checked_ops(table: dict[str, _Op]) -> None:
    right = {name: fine[-1] for name, (_, fine, _) in table.items()}

    def program(x: torch.Tensor) -> torch.Tensor:
        parts = [op(x, right[name] + x[0, 0].long() * 0) for name, (op, _, _) in table.items()]
        return torch.stack([(p * p).float().sum() for p in parts]).sum()

    x = _X.clone().requires_grad_()
    program(x).backward()
    ported = tpuport.convert(program)
    found = jax.jit(jax.grad(lambda v: ported.apply({}, {}, None, v)[0]))(jnp.asarray(_X.numpy()))
    np.testing.assert_allclose(np.asarray(found), _gradient(x), rtol=1e-4, atol=1e-4)


def _agrees(function: Any, *calls: tuple[Any, ...], **options: Any) -> Any:
    """Compare calls of a port with eager: what each returns, or the class of what it raises."""
    ported, eager = tpuport.convert(function, **options), copy.deepcopy(function)
    for args in calls:
        try:
            expected = eager(*args)
        except Exception as error:
            got = _eager_error(ported, *args)
            assert isinstance(got, type(error)), (args, got)  # noqa: PT017
        else:
            got = tpuport.to_torch(ported(*args))
            torch.testing.assert_close(got, expected, equal_nan=True, msg=str(args))
    return ported


def test_a_check_fires_only_in_the_branch_that_is_taken() -> None:
    def branch(x: torch.Tensor, k: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            y = x * F.embedding(k, _W.float())[0]
        else:
            y = x * (7 // n)
        return y

    x = torch.ones(3)
    good, bad = T([1]), T([5])
    zero, one = T([0]), T([1])
    calls = [(s * x, k, n) for s in (1, -1) for k in (good, bad) for n in (one, zero)]
    _agrees(branch, *calls)


def test_a_check_in_a_loop() -> None:
    def loop(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        while x.sum() > 0:
            x = x - F.embedding(k, _W.float() + 1)[0]
            k = k + 1
        return x

    # The rows are read until the sum is used up, or past the end.
    _agrees(loop, *((torch.ones(3) * n, T([k])) for n in (1, 5, 30) for k in (0, 3, 9)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.table(k))


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, k[number])
        return x


@pytest.mark.parametrize("blocks", ["once", "scan"])
def test_repeated_blocks_are_shared_with_their_checks(blocks: str) -> None:
    right, calls = T([[0], [3], [1], [2]]), []
    for number in range(4):
        wrong = right.clone()
        wrong[number] = 4 - number * 5
        calls += [(torch.ones(1, 3), right), (torch.ones(1, 3), wrong)]
    torch.manual_seed(0)
    ported = _agrees(_Stack().eval(), *calls, blocks=blocks)
    program = next(iter(ported._cache.values()))
    (record,) = program.outcome.trace.blocks.records.values()
    assert (record.programs, record.shared) == (1, 3)


def test_values_that_are_not_there_raise_nothing() -> None:
    def rows(x: torch.Tensor, k: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        kept = k[x > 0]
        return F.embedding(kept, _W.float()).sum() + (7 // n[x > 0]).sum() + _W[kept].sum()

    calls = [
        (T([1.0, -1, 1]), T([0, 9, 3]), T([1, 0, 2])),
        (T([1.0, -1, 1]), T([0, 1, 9]), T([1, 0, 2])),
        (T([1.0, -1, 1]), T([0, 1, -1]), T([1, 0, 2])),
        (T([1.0, -1, 1]), T([0, 9, 3]), T([1, 0, 0])),
        (T([-1.0, -1, -1]), T([9, 9, 9]), T([0, 0, 0])),
    ]
    _agrees(rows, *calls)


def test_what_is_provably_in_range_costs_nothing() -> None:
    def program(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        best = x.argmax(1)
        y = x.gather(1, best[:, None]) + x[:, x.topk(2).indices[0]].sum()
        return y + F.embedding(k.clamp(0, 3), x) + x[k % 4] + x.index_select(0, torch.arange(4))

    ported = tpuport.convert(program)
    _same({"y": ported(_X, T([9, -9, 0, 1]))}, {"y": program(_X, T([9, -9, 0, 1]))})
    assert not next(iter(ported._cache.values())).outcome.trace.recorder.checks


def test_indices_known_while_tracing() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x[T([0, 4])]

    error = _eager_error(tpuport.convert(wrong, verify=False), _X)
    assert type(error) is IndexError


class _Cache(nn.Module):
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(6, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[self.count : self.count + x.shape[0]] = x
        self.count += x.shape[0]
        return self.rows * 2


def test_writes_to_a_slice_past_the_end() -> None:
    rows = normal(4, 2, seed=2)
    ported = _agrees(_Cache(), (rows[:2],), (rows,), (rows[:2],), (rows[:1],))
    moved = ported.buffers | {"count": jnp.int32(3)}
    gradient = jax.jit(jax.grad(lambda x: ported.apply({}, moved, None, x)[0].sum()))
    found = gradient(rows[:2].numpy())
    np.testing.assert_array_equal(found, np.full((2, 2), 2.0))


def test_tensor_split_at_traced_places() -> None:
    def parts(x: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        return [part.sum(0) for part in torch.tensor_split(x, k)]

    _agrees(parts, *((_X, T(k)) for k in ([1, 3], [3, 1], [-9, 9], [0, 2])))
    _agrees(lambda x: parts(x, x[0, :2].long()), *((_X + n,) for n in (0, 2, -7, 7)))


def test_negative_counts() -> None:
    def counted(k: torch.Tensor) -> torch.Tensor:
        return torch.bincount(k.clamp(-2, 3)).sum()

    _agrees(counted, (T([0, 3]),), (T([-1, 3]),), (T([2, -2]),), (T([9, 1]),))


def test_without_checks_nothing_is_compiled() -> None:
    ported = tpuport.convert(lambda x, k: x[k], checks=False)
    ported(_X, T([0]))
    assert not next(iter(ported._cache.values())).outcome.trace.recorder.checks


def test_errors_leave_a_jit_of_the_user() -> None:
    ported = tpuport.convert(_Stack().eval(), verify=False)
    x, right = jnp.ones((1, 3)), jnp.asarray([[0], [3], [1], [2]])

    @jax.jit
    def step(k: Any) -> Any:
        return tpuport.errors_of(ported)(ported.params, ported.buffers, None, x, k)

    errors, (out, _) = step(right)
    errors.throw()
    np.testing.assert_allclose(out, ported(x, right).jax(), rtol=1e-5)
    errors, _ = step(right + 1)
    with pytest.raises(IndexError, match="expected 0 <= index < 4"):
        errors.throw()
    errors, _ = jax.vmap(step)(jnp.stack([right, right + 1]))
    assert errors.code.shape == (2,)
    with pytest.raises(IndexError):
        errors.throw()

    def loss(params: Any, k: Any) -> Any:
        errors, (out, _) = tpuport.errors_of(ported)(params, {}, None, x, k)
        return out.sum(), errors

    _, errors = jax.grad(jax.checkpoint(loss), has_aux=True)(ported.params, right - 1)
    with pytest.raises(IndexError):
        errors.throw()


def test_apply_outside_of_transformations_raises() -> None:
    ported = tpuport.convert(lambda x, k: x[k], verify=False)
    with pytest.raises(IndexError):
        ported.apply({}, {}, None, _X, T([4]))


# -- what the user's code catches ------------------------------------------------------------------


def _factor(a: torch.Tensor) -> torch.Tensor:
    return _L.cholesky(a)


def _jittered(a: torch.Tensor) -> torch.Tensor:
    try:
        return _factor(a)
    except _L.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return _factor(a + 10 * _EYE)


def _twice(a: torch.Tensor) -> torch.Tensor:
    try:
        try:
            return _factor(a)
        except (IndexError, ValueError):
            return a * 100
    except RuntimeError as error:
        return a * len(type(error).__name__)


def _cleaned_up(a: torch.Tensor) -> torch.Tensor:
    try:
        a = _factor(a)
    except RuntimeError:
        a = a * 0
        raise
    finally:
        a = a + 1
    return a


def _suppressed(a: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        a = _factor(a)
    return a * 3


def _retried(a: torch.Tensor) -> torch.Tensor:
    for jitter in (0.0, 2.0, 20.0):
        try:
            return _factor(a + jitter * _EYE)
        except RuntimeError:
            continue
    return a * 0


def _translated(a: torch.Tensor) -> torch.Tensor:
    try:
        return _factor(a)
    except RuntimeError as error:
        raise ValueError("no factor") from error


def _by_status(a: torch.Tensor) -> torch.Tensor:
    factor, info = _L.cholesky_ex(a)
    if info > 0:
        return a * info
    return factor


def _inverted(a: torch.Tensor) -> torch.Tensor:
    try:
        return _L.inv(a)
    except RuntimeError:
        return _L.pinv(a)


def _asserted(a: torch.Tensor) -> torch.Tensor:
    try:
        assert a.sum() < 5, "large"
        return a * 2
    except AssertionError:
        return a * 0


def _checked(a: torch.Tensor) -> None:
    if a.sum() > 5:
        if a[0, 0] > 50:
            raise ValueError("large")
        raise KeyError("odd")


def _raised(a: torch.Tensor) -> torch.Tensor:
    try:
        _checked(a)
    except ValueError:
        return a * 0
    return a * 2


class _Inner(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        _checked(a)
        return _factor(a)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()
        self.register_buffer("failures", torch.zeros(()))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(a)
        except (ValueError, RuntimeError):
            self.failures += 1
            return a * self.failures


_A = torch.tensor([[2.0, 0.5], [0.5, 1.0]])


_TRIES = (_jittered, _twice, _cleaned_up, _suppressed, _retried, _translated, _by_status)


@pytest.mark.parametrize(
    ("function", "checks"),
    [
        *((function, True) for function in (*_TRIES, _inverted, _asserted, _raised, _Outer())),
        *((function, False) for function in (_jittered, _asserted, _raised)),
    ],
)
def test_what_a_try_catches_is_a_branch(function: Any, checks: bool) -> None:
    calls = [(_A,), (-_A,), (_A * 0,), (_A * 2,), (_A * 100,), (_A - 10 * _EYE,)]
    if not checks:
        # An error that leaves the program is not seen then.
        calls = [args for args in calls if _eager_error(copy.deepcopy(function), *args) is None]
    _agrees(function, *calls, checks=checks)


def _looked_up(k: torch.Tensor) -> torch.Tensor:
    return F.embedding(k, _W.float())[0]


def _looped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    out = x * 0
    for number in range(3):
        try:
            out = out + _looked_up(k + number)
        except IndexError:
            break
    return out


def _all_clauses(x: torch.Tensor, k: torch.Tensor) -> Any:
    steps = []
    try:
        steps.append(1)
        y = _looked_up(k) * x
        steps.append(2)
    except IndexError:
        y = x * len(steps)
    else:
        y = y + len(steps)
    finally:
        y = y * 2  # pyright: ignore[reportPossiblyUnboundVariable]
    return y


def _in_place(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    try:
        y += 1
        y += _looked_up(k)
    except IndexError:
        y *= 10
    return y


def _generated(x: torch.Tensor, k: torch.Tensor) -> Any:
    def rows() -> Iterator[torch.Tensor]:
        for number in range(2):
            try:
                yield _looked_up(k + number)
            except IndexError:
                yield x * 7

    return sum(rows())


def _bare(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    try:
        if k.sum() > 2:
            x = x * 2
        return _looked_up(k) * x
    except:  # noqa: E722
        return x * 5


def _left_by_finally(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    y = x
    try:
        y = _looked_up(k)
    finally:
        return y * 2  # noqa: B012


def _several(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    try:
        y = _looked_up(k) + _W[k][0]
        return y.gather(0, k % 4)
    except (IndexError, RuntimeError):
        return x[:1]


@pytest.mark.parametrize(
    "function",
    [_looped, _all_clauses, _in_place, _generated, _bare, _left_by_finally, _several],
)
def test_all_forms_of_try(function: Any) -> None:
    _agrees(function, *((torch.ones(3), k) for k in _rows(0, 3, 4, -1)))


def test_a_try_without_source() -> None:
    namespace = {"F": F, "W": _W.float()}
    code = """
def looked_up(x, k):
    try:
        return F.embedding(k, W)[0]
    except IndexError:
        return x * 5
"""
    exec(code, namespace)
    _agrees(namespace["looked_up"], *((torch.ones(3), k) for k in _rows(0, 4)))


class _FactorBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(1, 1)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return _factor(a) + self.shift.bias.abs() * _EYE


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_FactorBlock() for _ in range(3))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        try:
            for block in self.blocks:
                a = block(a)
        except RuntimeError:
            return a * 0
        return a


def test_a_try_around_repeated_blocks_is_refused() -> None:
    with pytest.raises(tpuport.PortError, match=r"`try` at .*test_errors.py:\d+ around it"):
        tpuport.convert(_Around(), verify=False)(_A)
    _agrees(_Around(), (_A,), (-_A,), (_A * 2,), blocks="unroll")
