"""Functions and scalars of numpy with numbers that depend on the program's inputs."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.exactness.scenario import assert_outputs_same, by_tpuport
from tpuport.model.parity.structure import pairs

X = torch.tensor([0.75, -0.25, 0.5])
OTHERS = (X, X * 0.5, torch.tensor([2.0, -1.0, 3.0]))

_OF_ONE = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "cbrt", "square", "sin"),
    *("cos", "tan", "sinh", "cosh", "tanh", "arctan", "arcsinh", "degrees", "radians", "abs"),
    *("floor", "ceil", "trunc", "rint", "sign", "negative", "reciprocal", "fabs"),
)
_OF_TWO = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "mod", "power", "maximum"),
    *("minimum", "arctan2", "hypot", "copysign", "logaddexp", "float_power"),
)


def of_floats(x: torch.Tensor) -> Any:
    a, b = x[0].item(), x[1].item()
    found = [getattr(np, name)(a) for name in _OF_ONE]
    found += [getattr(np, name)(a, 2) for name in _OF_TWO]
    found += [getattr(np, name)(1.5, b) for name in _OF_TWO]
    return torch.tensor(found), x * np.exp(b) / np.sqrt(a), np.clip(a, 0.1, 0.6) * x


def of_integers(x: torch.Tensor) -> Any:
    n, kept = int(x[2].item() * 8), x[x > 0]
    found = [getattr(np, name)(n) for name in _OF_ONE if name != "reciprocal"]
    found += [getattr(np, name)(n, 3) for name in _OF_TWO]
    whole = [np.sign(n), np.floor(n), np.maximum(n, 3), np.multiply(np.int64(2), n)]
    return (
        torch.tensor([float(one) for one in found]),
        *(torch.tensor(one) for one in whole),
        x / np.sqrt(kept.shape[0]),
        x * np.log(len(kept)),
    )


def of_scalars(x: torch.Tensor) -> Any:
    a = x[0].item()
    third = np.float64(1 / 3)
    return (
        torch.tensor(third * a),
        torch.tensor([a * third, 2.0]),
        torch.tensor(-np.sqrt(a) * 2 + 1),
        torch.tensor(float(np.sqrt(a))),
        torch.tensor(np.sqrt(a).item()),
        torch.tensor(np.float32(1 / 3) * a),
        torch.full((2,), np.exp(a)),
        x * (third * a) + round(np.sqrt(a) * 10),
        x.double() * np.log(a),
    )


def of_tests(x: torch.Tensor) -> Any:
    a = x[0].item()
    y = x * 2 if np.isnan(a) or np.isinf(a) else x * 3
    y = y + 1 if np.greater(a, 0.5) else y - 1
    return y if np.isfinite(np.log(a)) else -y


PROGRAMS = [of_floats, of_integers, of_scalars, of_tests]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_results_and_dtypes_are_numpys(program: Callable[[torch.Tensor], Any]):
    ported = by_tpuport(program)
    for given in OTHERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            want = program(given)
        assert_outputs_same(ported(given), want, rtol=2e-5)


@pytest.mark.parametrize(
    "program",
    [
        lambda a: np.float64(2.5) / a,
        lambda a: (a + 1) / np.float64(0) + np.float64(0) * a,
        lambda a: np.divide(1.0, a),
        lambda a: np.log(a),
        lambda a: np.log(a - 1),
        lambda a: np.sqrt(a - 1),
        lambda a: np.exp(a + 800),
        lambda a: np.power(a - 2, 0.5),
        lambda a: np.mod(a + 1, 0.0),
        lambda a: np.divide(math.floor(a) + 1, 0),
    ],
)
def test_no_error_where_numpy_only_warns(program: Callable[[Any], Any]):
    def run(x: torch.Tensor) -> torch.Tensor:
        return x * program(x[0].item())

    given = torch.tensor([0.0, 1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        want = run(given)
        assert not want.isfinite().all()
        assert_outputs_same(tpuport.convert(run)(given), want)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * np.float16(0.3) * x.sum().item() + x * (np.float16(0.3) * x[0].item()),
        lambda x: x * (np.int8(3) * int(x[0].item())),
        lambda x: x * np.power(x[0].item(), 2).astype(np.float32),
        lambda x: x * np.spacing(x[0].item()),
        lambda x: x * np.reciprocal(math.floor(x[0].item())),
        lambda x: np.log(x.abs()),
    ],
    ids=["half", "byte", "astype", "another function", "integer", "tensor"],
)
def test_refused_at_the_line(program: Callable[[torch.Tensor], torch.Tensor]):
    with pytest.raises(tpuport.PortError, match=r"TPU103|TPU301") as refused:
        tpuport.convert(program, verify=False)(X)
    assert refused.value.line == program.__code__.co_firstlineno


def test_a_python_number_has_no_attribute_of_numpy():
    def program(x: torch.Tensor) -> torch.Tensor:
        number = x[0].item()
        return x * 2 if hasattr(number, "dtype") or hasattr(number, "item") else x * 3

    assert_outputs_same(by_tpuport(program)(X), X * 3)


def test_results_are_numbers_of_python():
    def program(x: torch.Tensor) -> Any:
        a, n = x[0].item(), int((x > 0).sum())
        return {"log": np.log(a), "root": np.sqrt(n), "sum": np.sum([n, 2]), "nan": np.isnan(a)}

    ported = tpuport.convert(program)
    for x in OTHERS:
        want, got = program(x), ported(x)
        assert [type(one) for one in got.values()] == [float, float, int, bool]
        assert list(got.values()) == pytest.approx([one.item() for one in want.values()])


def test_other_numbers_are_found():
    (pair,) = pairs(np.float64(2.5), 2.75, "output")
    assert (pair.want, pair.have, pair.problem) == (2.5, 2.75, "")
    for want, have in ((np.float64(2.0), 2), (np.int64(3), 4), (np.bool_(True), False)):
        (pair,) = pairs(want, have, "output")
        assert "where eager PyTorch gives" in pair.problem


WINDOW = np.hanning(5)[1:4]


def with_arrays(x: torch.Tensor) -> Any:
    single = WINDOW.astype(np.float32)
    made = [x * WINDOW, x + np.array(2.0), x[0] - np.array(3), x / single, x.abs() ** single]
    return [*made, (x > 0) * WINDOW, x.mean() * np.ones_like(0.5), x * np.float32(0.5)]


@pytest.mark.filterwarnings("ignore:__array_wrap__ must:DeprecationWarning")
def test_arithmetic_with_arrays_of_numpy_has_the_dtypes_of_eager() -> None:
    ported = tpuport.convert(with_arrays)
    for x in OTHERS:
        for mine, want in zip(ported(x), with_arrays(x), strict=True):
            assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
            torch.testing.assert_close(mine.torch(), want)
    with pytest.raises(RuntimeError, match="requires grad"):
        tpuport.convert(with_arrays)(X.clone().requires_grad_())
