"""Dtypes that eager PyTorch refuses, for operands, results in place and `out=`."""

from typing import Any

import pytest
import torch

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls
from tpuport.foundation.errors import PortError

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, -1.0], [0.5, 0.25, 2.0]])
K = torch.tensor([0, 1, 2])

REFUSED = {
    "mul_": lambda x, k: k.mul_(x[:, 0]),
    "add_": lambda x, k: k.add_(x[:, 0], alpha=2),
    "div_": lambda x, k: k.div_(k),
    "number": lambda x, k: k.mul_(0.5),
    "pow_": lambda x, k: k.pow_(x[:, 0]),
    "row": lambda x, k: k[0:1].sub_(x[0, :1]),
    "bool": lambda x, k: (k > 0).add_(k),
    "out of add": lambda x, k: torch.add(x[:, 0], 1, out=k),
    "out of mm": lambda x, k: torch.mm(x, x, out=torch.empty(3, 3, dtype=torch.float64)),
    "index_put_": lambda x, k: k.index_put_((k,), x[:, 0]),
    "mask": lambda x, k: k.index_put_((k > 0,), x[1:, 0]),
    "one value by an index": lambda x, k: x.index_put_((k[:1],), k.sum()),
    "one value by a mask and an index": lambda x, k: x.index_put_((k > 0, k[1:]), k.sum()),
    "masked_scatter_": lambda x, k: k.masked_scatter_(k > 0, x[:, 0]),
    "lerp": lambda x, k: torch.lerp(x, x.double(), 0.5),
    "einsum with a sum": lambda x, k: torch.einsum("ij,j->i", x, k),
    "cross": lambda x, k: torch.linalg.cross(x, x.double()),
    "argmax": lambda x, k: (k > 0).argmax(),
    "argmin": lambda x, k: (k > 0).argmin(0),
    "topk": lambda x, k: (k > 0).topk(1),
    "std": lambda x, k: (k > 0).std(),
    "var": lambda x, k: k.var(),
    "minus a bool": lambda x, k: k.sub_(True),
    "minus a mask": lambda x, k: x - (k > 0),
    "minus a truth": lambda x, k: k - bool(x.sum() > 0),
    "one minus a mask": lambda x, k: 1 - (k > 0),
    "two masks": lambda x, k: (k > 0) - (k > 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str):
    function = REFUSED[name]
    with pytest.raises(RuntimeError) as eager:
        function(X.clone(), K.clone())
    with pytest.raises(RuntimeError) as ours:
        tpuport.convert(function)(X.clone(), K.clone())
    assert type(ours.value) is type(eager.value)
    if name.endswith("_"):
        assert str(eager.value).split()[:2] == str(ours.value).split()[:2]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, k: torch.sum(x, 1, out=k),  # eager computes in the dtype of `k`
        lambda x, k: k.view(torch.int32),
        lambda x, k: torch.zeros(3, 3).set_(x),
    ],
)
def test_what_has_no_exact_form_is_a_port_error(function: Any):
    with pytest.raises(PortError) as refused:
        tpuport.convert(function)(X.clone(), K.clone())
    assert refused.value.file == __file__


def test_casts_that_eager_makes_are_made():
    def casts(x: torch.Tensor, k: torch.Tensor) -> Any:
        a, b, c, h = torch.empty(3).double(), x.clone(), k.clone(), x.half()
        torch.add(x[:, 0], 1, out=a)
        b.mul_(x.double()).add_(k)
        c.mul_(2).bitwise_and_(k > 0)
        h.sub_(x)
        c[k > 1] = 1.75
        # One value by one mask is `masked_fill`, which casts; by other indices it has to fit.
        filled = [x.clone() for _ in range(4)]
        filled[0][x > 1] = k.sum()
        filled[1][k > 0] = (k > 0).sum(0, keepdim=True)
        filled[2][1:][:, k > 1] = x.double()[0, 0]
        filled[3][k > 0, 1] = k.sum().to(x.dtype)
        least = [torch.tensor([torch.iinfo(d).min, 6, 4]).to(d) for d in (torch.int8, torch.int32)]
        gcd = [torch.gcd(k.to(one.dtype) * 2, one) for one in least]
        return a, b, c, h, gcd, filled, x[:0].unfold(1, 2, 1)

    check_calls(Scenario("casts", lambda: casts, ((X, K), (-X, K.flip(0)))), by_tpuport)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, k: torch.einsum("ij,j->ij", x, k),
        lambda x, k: torch.einsum("ij,k->ikj", torch.complex(x, x), k),
        lambda x, k: torch.einsum("ij,k->k", x, k.bool()),
        lambda x, k: torch.einsum("ij,ij,i->ij", x, x.bfloat16(), k),
    ],
)
def test_an_einsum_without_a_sum_of_products_promotes_dtypes(function: Any):
    check_calls(Scenario("einsum", lambda: function, ((X, K), (X * 2, K + 1))), by_tpuport)
