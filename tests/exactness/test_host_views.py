"""Traced values written to host tensors that are seen as other dtypes, conjugated or negated.

`c = torch.zeros(n, dtype=torch.complex64); c.real = x` is one: the code makes the tensor and its
views on the host, before it knows of the program's values.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport
from tests.exactness.scenario import (
    Scenario,
    by_tpuport,
    check_calls,
    check_gradients,
    check_together,
    normal,
)
from tpuport.tracing.core import context

X = normal(2, 4)
Program = Callable[[torch.Tensor], Any]


def pairs(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z.resolve_conj())


def zeros(dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.zeros(2, 4, dtype=dtype)


def both_parts(x: torch.Tensor) -> Any:
    c = zeros()
    c.real, c.imag = x * 2, x.sin()
    return pairs(c)


def part_read_after_a_write(x: torch.Tensor) -> Any:
    c = zeros()
    part = c.imag
    c[0] = torch.complex(x, x * 3)[0]
    return part, pairs(c * c)


def conjugate_read_after_a_write(x: torch.Tensor) -> Any:
    c = zeros()
    turned = c.conj()
    c.imag[:, 1] = x[:, 1]
    return pairs(turned), pairs(c)


def negated_part_read_after_a_write(x: torch.Tensor) -> Any:
    c = zeros()
    negated = c.conj().imag
    c.imag[:, 1:] = x[:, 1:]
    return negated * 2


def conjugate_written(x: torch.Tensor) -> Any:
    c = zeros()
    c.conj()[0] = torch.complex(x, x * 2)[0]
    return pairs(c)


def part_of_the_conjugate_written(x: torch.Tensor) -> Any:
    c = zeros()
    c.conj().imag[:, 1] = x[:, 1]
    return pairs(c)


def part_of_a_transpose_multiplied(x: torch.Tensor) -> Any:
    c = zeros() + (1 + 2j)
    c.t()[1:].real.mul_(x.t()[1:])
    return pairs(c)


def strided_part_copied_to(x: torch.Tensor) -> Any:
    c = zeros() + 1
    part = c.imag[:, ::2]
    part.copy_(x[:, ::2])
    c.mul_(torch.complex(x, x))
    return part, pairs(c)


def double_parts(x: torch.Tensor) -> Any:
    c = zeros(torch.complex128)
    c.real, c.imag = x, x * 2
    return pairs(c).float()


def numbers_seen_as_complex(x: torch.Tensor) -> Any:
    base = torch.zeros(2, 8)
    torch.view_as_complex(base.view(2, 4, 2))[1] = torch.complex(x, -x)[1]
    return base * 2


def bits(dtype: torch.dtype) -> Program:
    def program(x: torch.Tensor) -> Any:
        c = zeros(torch.float32)
        seen = c.view(dtype)
        c[0] = x[0]
        return seen

    return program


WITH_GRADIENT = [
    *(both_parts, part_read_after_a_write, conjugate_read_after_a_write, double_parts),
    *(negated_part_read_after_a_write, conjugate_written, part_of_the_conjugate_written),
    *(part_of_a_transpose_multiplied, strided_part_copied_to, numbers_seen_as_complex),
]


def test_value_and_gradient():
    scenarios = [Scenario(one.__name__, lambda p=one: p, ((X,),)) for one in WITH_GRADIENT]
    check_together(scenarios, lambda one: check_gradients(one, by_tpuport))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bfloat16, torch.uint8], ids=str)
def test_bits(dtype):
    check_calls(Scenario("bits", lambda: bits(dtype), ((X,), (X * 2,))), by_tpuport)


def test_bits_of_a_double_are_refused():
    def program(x: torch.Tensor) -> torch.Tensor:
        c = zeros(torch.float64)
        seen = c.view(torch.int64)
        c[0] = x[0]
        return seen + 1

    with pytest.raises(tpuport.PortError, match=r"float64 as torch\.int64.*") as refused:
        tpuport.convert(program)(X)
    assert refused.value.line == program.__code__.co_firstlineno + 4


def test_the_comparison_with_eager_takes_no_wrong_sign_for_rounding(monkeypatch):
    """Eager PyTorch in float64, which is asked about a difference, writes the right sign."""
    monkeypatch.setattr(context, "sign_steps", lambda tensor: ())
    with pytest.raises(tpuport.PortError, match="differs"):
        tpuport.convert(conjugate_written)(X)
