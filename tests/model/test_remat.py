"""Remat policies by module: values, gradients, random numbers and state stay, memory falls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import Var
from torch import nn
from torch.utils import checkpoint

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.tracing.core.remat_policy import NAMES

POLICIES = [name for name in NAMES if name != "none"]


class Block(nn.Module):
    """A block with what must not go wrong in a region: dropout, a buffer, Python state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += x.detach().abs().mean()
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + scale * self.drop(self.down(inner))


class Net(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        scale = x.detach().abs().mean(0)
        for layer in self.layers:
            x = layer(x, scale)
        return self.last(x).square().mean()


def step_of(ported: Any, x: Any) -> Any:
    """Loss, gradients and buffers of one step, as a function of the parameters."""

    def loss(params: dict[str, jax.Array]) -> Any:
        return ported.apply(params, ported.buffers, jax.random.key(3), x)

    return jax.value_and_grad(loss, has_aux=True)


def kept_bytes(ported: Any, x: Any) -> dict[str, int]:
    """Bytes that the forward pass keeps for the backward pass, by memory; without parameters."""

    def pulled(params: dict[str, jax.Array]) -> Any:
        key = jax.random.key(3)
        return jax.vjp(lambda p: ported.apply(p, ported.buffers, key, x)[0], params)[1]

    jaxpr = jax.make_jaxpr(pulled)(ported.params).jaxpr
    found = {"Device": 0, "Host": 0}
    for var in {v for v in jaxpr.outvars if isinstance(v, Var) and v not in jaxpr.invars}:
        found[str(var.aval.memory_space).rpartition(".")[2]] += (
            var.aval.size * var.aval.dtype.itemsize
        )
    return found


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


@pytest.fixture(scope="module")
def plain() -> Any:
    """The model, an input, and what a step gives without a policy."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 8)
    ported = tpuport.convert(model, verify=False)
    return model, x, jax.jit(step_of(ported, x))(ported.params)


@pytest.mark.parametrize("policy", POLICIES)
def test_values_gradients_random_numbers_and_buffers_are_those_of_the_plain_call(
    plain: Any, policy: str
):
    model, x, want = plain
    ported = tpuport.convert(model, verify=False)
    plan = tpuport.remat(ported, {"layers.*": policy})
    assert plan == {f"layers.{i}": policy for i in range(3)}
    assert str(plan) == f"layers.*: {policy} (3 modules)"
    close(jax.jit(step_of(ported, x))(ported.params), want)


def test_python_state_counts_each_call_once(plain: Any):
    model, x, _ = plain
    ported = tpuport.convert(model, verify=False)
    tpuport.remat(ported, {"layers.*": "full"})
    for _ in range(2):
        ported(x)
    module = ported.to_torch()
    assert module.layers[0].calls == 2
    assert module.layers[0].norm.num_batches_tracked == 2
    assert float(module.layers[0].seen) > 0


def test_gradients_equal_eager_pytorchs():
    torch.manual_seed(0)
    model = Net().eval()
    ported = tpuport.convert(model, verify=False)
    tpuport.remat(ported, "full")
    assert ported.verify(torch.randn(32, 8)).ok
    assert any(record.kind == "gradient" for record in ported.report.parity)


def test_what_is_kept_for_the_backward_pass_falls_and_offloading_moves_it(plain: Any):
    model, x, _ = plain
    ported = tpuport.convert(model, verify=False)
    kept = {}
    for policy in NAMES:
        tpuport.remat(ported, {"layers.*": policy})
        kept[policy] = kept_bytes(ported, x)
    device = {policy: found["Device"] for policy, found in kept.items()}
    assert device["none"] > 2 * device["dots"] > 2 * device["full"] > 2 * device["offload"]
    tokens = 32 * 4  # bytes of one channel of all rows
    products = 3 * (4 * 16 + 16) * tokens
    # The second product's result is needed by no gradient, the first one's by gelu's.
    assert kept["dots"]["Device"] - kept["full"]["Device"] == products - 3 * 16 * tokens
    assert kept["dots_offload"]["Host"] == products - 3 * 16 * tokens
    assert device["dots_offload"] == device["full"]
    # The input of each block, and not the scale that all of them get.
    assert kept["offload"]["Host"] == 3 * 16 * tokens
    assert {policy for policy, found in kept.items() if found["Host"]} == {
        "offload",
        "dots_offload",
    }


class Nested(nn.Module):
    """A checkpoint of torch's, and a branch on a traced value, inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Choosing(), Choosing())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        x *= 2.0
        try:
            if x.sum() > 0:
                return x.sin()
        finally:
            x = x + 1
        return x.cos()


@pytest.mark.parametrize("policies", [{"blocks.*": "offload"}, {"blocks.1": "full"}])
def test_a_region_holds_a_region_and_a_branch(policies: dict[str, str]):
    model, x = Nested(), torch.randn(4, 8)
    ported = tpuport.convert(model)
    tpuport.remat(ported, policies)
    for sign in (1, -1):
        assert ported.verify(sign * x).ok


class Halting(nn.Module):
    """Adaptive depth: whether it goes on depends on data, once in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done = x.new_zeros(())
        for _ in range(3):
            x = torch.tanh(self.inner(x))
            done = done + x.abs().mean()
            if done > 0.9:
                break
        return x


def test_blocks_that_branch_in_each_round_are_computed_again():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Halting() for _ in range(3))), torch.randn(4, 8)
    ported = tpuport.convert(model)
    tpuport.remat(ported, "full")

    def loss(params: Any) -> jax.Array:
        return ported.apply(params, ported.buffers, None, jnp.asarray(x.numpy()))[0].sum()

    gradients = jax.jit(jax.grad(loss))(ported.params)
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_one_name_is_for_every_outermost_list_of_blocks():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU()), "b": Net()})
    plan = tpuport.remat(tpuport.convert(model, verify=False), "dots")
    assert list(plan) == ["a.0", "a.1", "b.layers.0", "b.layers.1", "b.layers.2"]


def test_the_first_pattern_decides_and_what_is_inside_goes_with_it(plain: Any):
    ported = tpuport.convert(plain[0], verify=False)
    table = {"layers.0": "none", "layers.*": "dots", "**.up": "full"}
    plan = tpuport.remat(ported, table)
    assert plan == {"layers.0.up": "full", "layers.1": "dots", "layers.2": "dots"}
    assert str(plan) == "layers.*.up: full (1 module)\nlayers.*: dots (2 modules)"
    assert str(tpuport.remat(ported, {"**": "none"})) == "nothing is computed again"


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"layer.*": "full"},
            r"the pattern 'layer\.\*' matches no module of Net; there are 'layers\.\*'",
        ),
        ({"layers.*": "ful"}, r"policy of 'layers\.\*' is 'ful'; expected one of 'none', 'full'"),
    ],
)
def test_a_wrong_table_is_refused(plain: Any, policies: dict[str, str], message: str):
    ported = tpuport.convert(plain[0], verify=False)
    with pytest.raises(UsageError, match=message):
        tpuport.remat(ported, policies)


def test_what_has_no_blocks_says_how_to_name_them():
    ported = tpuport.convert(nn.Linear(2, 2), verify=False)
    with pytest.raises(UsageError, match=r"Linear has no ModuleList or Sequential"):
        tpuport.remat(ported, "full")


def test_only_ported_models_have_policies():
    with pytest.raises(UsageError, match=r"tpuport\.convert\(model\) gives, got a Linear"):
        tpuport.remat(nn.Linear(2, 2), "full")  # pyright: ignore[reportArgumentType]
