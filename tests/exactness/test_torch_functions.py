"""Functions of torch that read values, or draw until values fit, while a program has none."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError, UsageError

KNOWN = torch.tensor([True, False, True, True, False, True])


def uses_distinct(x: torch.Tensor) -> Any:
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    total = torch.zeros(6).index_add(0, inverse, torch.ones(6))
    return (values * counts).sum(), values[inverse], total, values


OPTIONS = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "what unique gives is used": uses_distinct,
    "unique of integers": lambda x: torch.unique(x.long()[None], return_counts=True),
    "unique of one": lambda x: torch.unique(x.max(), return_inverse=True),
    "unique of nothing": lambda x: torch.unique(x[:0], return_counts=True),
    "runs": lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    "combinations": lambda x: torch.combinations(x, 2),
    "masked_select by a known mask": lambda x: torch.masked_select(x, KNOWN),
    "masked_scatter to more dims": lambda x: x[:1].masked_scatter(x.reshape(2, 3) > 1, x),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x * 0, x.abs() + 1),
    "linear_cross_entropy in chunks": lambda x: F.linear_cross_entropy(
        x.reshape(3, 2), x.reshape(3, 2), torch.tensor([0, 2, 1]), options=OPTIONS
    ),
    "repeats": lambda x: x[:2].repeat_interleave((x[:2] > 0).long() + 1, output_size=4),
}
CALLS = (torch.tensor([3.0, 1, 2, 1, 3, 3]), torch.tensor([5.0, 5, 5, 2, 2, 9]))


def test_values_at_two_calls():
    port = tpuport.convert(lambda x: [read(x) for read in READERS.values()])
    for x in CALLS:
        got = pytree.flatten(port(x))[0]
        expected = pytree.flatten([read(x) for read in READERS.values()])[0]
        assert len(got) == len(expected)
        for want, have in zip(expected, got, strict=True):
            torch.testing.assert_close(tpuport.to_torch(have), want)


def test_the_check_of_gaussian_nll_loss_reaches_the_caller():
    port = tpuport.convert(lambda x, v: F.gaussian_nll_loss(x, x * 0, v))
    port(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="var has negative"):
        port(torch.ones(3), -torch.ones(3))


def test_repeats_without_a_size_name_it():
    port = tpuport.convert(lambda x: x.repeat_interleave((x > 0).long()))
    with pytest.raises(PortError, match="repeat_interleave depends on data") as caught:
        port(torch.ones(3))
    assert "output_size" in str(caught.value.remedy)
    sized = tpuport.convert(lambda x: x.repeat_interleave((x > 0).long(), output_size=3))
    sized(torch.ones(3))
    with pytest.raises(RuntimeError, match="does not match required size"):
        sized(torch.zeros(3))


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
def test_truncated_normal_numbers():
    bounds: dict[str, Any] = {"mean": 0.1, "std": 0.5, "a": -1.0, "b": 0.3}
    port = tpuport.convert(lambda x: nn.init.trunc_normal_(torch.empty_like(x), **bounds))
    first, second = (tpuport.to_torch(port(torch.zeros(4000))) for _ in range(2))
    eager = nn.init.trunc_normal_(torch.empty(4000), **bounds)
    assert not torch.equal(first, second)
    assert first.min() >= -1
    assert first.max() <= torch.tensor(0.3)
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert abs(first.quantile(share) - eager.quantile(share)) < 0.06
    far = tpuport.convert(lambda x: nn.init.trunc_normal_(torch.empty_like(x), a=6.0, b=7.0))
    with pytest.raises(PortError, match="far out on one side of the mean"):
        far(torch.zeros(3))


INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "take": lambda x, i: torch.take(x, i),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i, 1),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i[:, 0]),
    "one_hot": lambda x, i: F.one_hot(i, 3) * x[0],
    "max_unpool1d": lambda x, i: F.max_unpool1d(x[None, :, :2], i[None], [2]),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_from_jax_count_as_int64(name: str):
    x, i = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[0, 2], [1, 0]])
    expected = INTEGERS[name](torch.from_numpy(x), torch.from_numpy(i))
    port = tpuport.convert(INTEGERS[name])
    for _ in range(2):
        torch.testing.assert_close(
            tpuport.to_torch(port(jnp.asarray(x), jnp.asarray(i))), expected.to(torch.float32)
        )
    applied, _ = jax.jit(lambda x, i: port.apply({}, {}, None, x, i))(x, i.astype(np.int32))
    np.testing.assert_allclose(np.asarray(applied), expected.numpy(), rtol=1e-6)
    if name in ("take", "take_along_dim", "max_unpool1d"):
        with pytest.raises(RuntimeError, match=r"(?i)long|int64"):
            port(torch.from_numpy(x), torch.from_numpy(i).int())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_dtype_that_jax_lacks():
    with pytest.raises(UsageError, match="JAX has no complex32: compute in another dtype"):
        tpuport.convert(lambda x: x.chalf())(torch.ones(3))


def test_draws_over_numbers_of_64_bits_are_refused():
    port = tpuport.convert(lambda x: x + torch.full((3,), 2**40).random_(0, 10))
    with pytest.raises(PortError, match="does not fit in 32 bits"):
        port(torch.ones(3))


# Tensors [] where torch takes a Python number: C++ reads its value, which gets no gradient.
SCALARS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "full": lambda x, n: torch.full((2,), n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "new_full": lambda x, n: x.new_full((2,), n),
    "new_tensor": lambda x, n: x.new_tensor([[n, 1.0], [x[0], x[1]]]),
    "new_tensor of integers": lambda x, n: x.new_tensor([x.argmax(), 2]),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "beta": lambda x, n: torch.addmm(x, x[:, None], x[None], beta=n, alpha=x.min()),
    "value": lambda x, n: torch.addcmul(x, x, x, value=n),
    "clamp": lambda x, n: x.clamp(-n.item(), n),
    "leaky_relu": lambda x, n: F.leaky_relu(x - 1, n),
    "elu": lambda x, n: F.elu(x - 1, n),
    "threshold": lambda x, n: F.threshold(x, n, n * 2),
    "softplus": lambda x, n: F.softplus(x, beta=n),
    "hardtanh": lambda x, n: F.hardtanh(x, -n, n),
    "softshrink": lambda x, n: F.softshrink(x, n),
}


def test_a_tensor_where_torch_takes_a_number():
    x, n = torch.tensor([0.5, -2.0, 3.0]), torch.tensor(0.75)

    def results(x: Any, n: Any) -> Any:
        return [run(x, n) for run in SCALARS.values()]

    port = tpuport.convert(results)
    for scale in (1.0, 2.0):
        for name, want, have in zip(
            SCALARS, results(x, n * scale), port(x, n * scale), strict=True
        ):
            torch.testing.assert_close(tpuport.to_torch(have), want, msg=name)
    assert port.report.retraces == []


@pytest.mark.parametrize("name", ["full", "alpha", "value", "elu"])
def test_a_tensor_with_a_gradient_is_no_number(name: str):
    x, n = torch.tensor([0.5, -2.0, 3.0]), torch.tensor(0.75, requires_grad=True)
    for run in (SCALARS[name], tpuport.convert(SCALARS[name])):
        with pytest.raises(TypeError, match="Tensor"):
            run(x, n)


def test_a_tensor_where_the_number_decides_the_program():
    port = tpuport.convert(lambda x: F.dropout(x, p=x.max()))
    with pytest.raises(PortError, match="a Python float was made of a value that depends"):
        port(torch.tensor([0.25, 0.5]))


class Scaled(NamedTuple):
    """A value with its scale that takes functions of torch apart itself, and is no tensor."""

    value: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.mul:
            return NotImplemented
        plain = [a.value * a.scale if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Gained(Scaled):
    """A subclass goes first, as in eager."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs) + 1


class TakesApart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        a, b = Scaled(self.weight, x.abs().max()), Gained(x, x.new_tensor(0.5))
        drawn = F.dropout(b, 0.0)
        return F.linear(x, a), torch.add(a, 1.0), F.linear(b, a), drawn


def test_objects_that_are_no_tensors_take_functions_apart():
    eager = TakesApart()
    port = tpuport.convert(copy.deepcopy(eager))
    for scale in (1.0, 3.0):
        x = torch.arange(6.0).reshape(2, 3) * scale
        for have, want in zip(port(x), eager(x), strict=True):
            torch.testing.assert_close(tpuport.to_torch(have), want)
    sum(out.sum() for out in eager(x)).backward()

    def total(params: Any) -> Any:
        return sum(jnp.sum(out) for out in port.apply(params, port.buffers, None, x)[0])

    found = jax.jit(jax.grad(total))(port.params)["weight"]
    torch.testing.assert_close(torch.from_numpy(np.array(found)), eager.weight.grad)
    with pytest.raises(TypeError, match="returned NotImplemented"):
        tpuport.convert(lambda x: torch.mul(Scaled(x, x), x))(x)
