"""Products under autocast keep the dims of their operands, so that a sharded one stays sharded."""

from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tpuport
from tpuport.sharding import count_collectives, make_mesh


class Products(torch.nn.Module):
    """Linear layers with and without bias, a matmul, a bmm and an einsum on (B, S, 8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.biased, self.plain = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)
        self.matrix = torch.nn.Parameter(torch.randn(8, 8))
        self.heads = torch.nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x: torch.Tensor, mixed: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found = {
                "biased": self.biased(x),
                "plain": self.plain(x),
                "matmul": x @ self.matrix,
                "bmm": torch.bmm(x, mixed),
                "einsum": torch.einsum("bshd,hdc->bsc", x.unflatten(-1, (2, 4)), self.heads),
                # One dim of the weights is summed before the product, in float32.
                "einsum, summed": torch.einsum("bsc,hdc->bsd", x, self.heads),
                "einsum, elementwise": torch.einsum("bsc,bsc->bsc", x, x),
                "float64": F.linear(x.double(), x[0, :3].double(), x[0, :3, 0].double()),
            }
        return found


def given() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, 8, generator=rng), torch.randn(2, 8, 8, generator=rng)


def test_values_dtypes_and_gradients_are_those_of_eager_pytorch():
    model, (x, mixed) = Products(), given()
    wanted = model(x, mixed)
    grads = torch.autograd.grad(sum(v.double().sum() for v in wanted.values()), model.parameters())
    ported = tpuport.convert(model)
    found = ported(x, mixed)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        limit = 1e-6 if value.dtype == torch.float64 else 1e-2
        one, two = (np.asarray(v.detach().double()) for v in (found[name], value))
        np.testing.assert_allclose(one, two, rtol=limit, atol=limit, err_msg=name)

    def loss(params: Any) -> Any:
        out, _ = ported.apply(params, ported.buffers, None, x, mixed)
        return sum(jax.numpy.sum(v.astype("float32")) for v in out.values())

    own = jax.grad(loss)(ported.params)
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        np.testing.assert_allclose(own[name], grad, rtol=2e-2, atol=2e-2 * float(grad.abs().max()))


def test_tokens_that_are_sharded_within_a_batch_are_not_gathered():
    mesh = make_mesh({"sequence": 4}, jax.devices()[:4])
    model = Products()
    ported = tpuport.convert(model, verify=False)
    tokens = NamedSharding(mesh, P(None, "sequence"))

    def run(x: Any, mixed: Any) -> Any:
        out, _ = ported.apply(ported.params, ported.buffers, None, x, mixed)
        return {name: out[name] for name in ("biased", "plain", "matmul", "bmm", "einsum")}

    x, mixed = (jax.numpy.asarray(one.numpy()) for one in given())
    compiled = jax.jit(run, out_shardings=tokens).lower(jax.device_put(x, tokens), mixed).compile()
    assert not count_collectives(str(compiled.as_text()))
