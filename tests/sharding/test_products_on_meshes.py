"""Products of matrices on a mesh whose rules give one dim two axes, and another dim a third one.

XLA's partitioner takes the chips of the two axes in the wrong order, without an error.
"""

import copy
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import tpuport
from tpuport.sharding import Activations, ShardingRules, make_mesh
from tpuport.sharding.mixed_axes import mixes_axes
from tpuport.sharding.strategies import PRESETS
from tpuport.training import make_train_step

MESH = {"expert": 2, "tensor": 2, "sequence": 2}
PAIR = ("tensor", "sequence")
BOTH = P(PAIR, "expert")


class Chain(nn.Module):
    """Two products with a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.table = nn.Embedding(24, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(8, 16) to (8, 16, 8)."""
        x = torch.sin(self.table(ids))
        for _ in range(2):
            x = torch.tanh(self.first(x))
        return self.second(x)


RULES: dict[str, Any] = {
    "the other order": ShardingRules(
        {"second.weight": P("expert", ("sequence", "tensor"))},
        inputs={"0": P(None, "expert")},
        activations=Activations({"first": P(None, "expert", PAIR)}),
    ),
    "three dims": ShardingRules(
        {"second.weight": P("expert", PAIR), "first.weight": BOTH},
        inputs={"0": P("sequence", "tensor")},
        activations=Activations({"second": P(PAIR, "expert", None)}),
    ),
    "one of two": ShardingRules(
        {"first.weight": BOTH},
        inputs={"0": P("expert", "tensor")},
        activations=Activations({"first": P(None, "expert", "sequence")}),
    ),
    "of the head": ShardingRules(
        {"second.weight": BOTH},
        inputs={"0": P("expert", "tensor")},
        activations=Activations(
            {"first": P("expert", None, "sequence"), "second": P("expert", None, "tensor")}
        ),
    ),
}


def _batch(number: int) -> torch.Tensor:
    return torch.randint(0, 24, (8, 16), generator=torch.Generator().manual_seed(number))


def _trained(model: Chain, rules: Any) -> dict[str, np.ndarray]:
    ported = tpuport.convert(copy.deepcopy(model), verify=False)
    if rules is not None:
        tpuport.shard(ported, make_mesh(MESH), rules)
    seen = {"result": ported(_batch(0)).detach().numpy()}
    step = make_train_step(ported, lambda model, ids: model(ids).square().sum(), "sgd")
    state = step.init()
    for number in range(3):
        state, metrics = step(state, _batch(number))
        seen[f"loss {number}"] = np.asarray(metrics["loss"])
    return seen | {name: np.asarray(value) for name, value in state.params.items()}


@pytest.mark.parametrize("rules", RULES)
def test_steps_are_those_of_one_device(rules: str) -> None:
    torch.manual_seed(0)
    model = Chain()
    alone, spread = _trained(model, None), _trained(model, RULES[rules])
    for name, expected in alone.items():
        np.testing.assert_allclose(spread[name], expected, rtol=2e-4, atol=2e-5, err_msg=name)


def test_forward_mode_and_vmap_go_through_products() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(4, 8, 16)
    alone, spread = (tpuport.convert(copy.deepcopy(layer), verify=False) for _ in range(2))
    rules = ShardingRules({"weight": BOTH}, inputs={"0": P("sequence", "expert")})
    tpuport.shard(spread, make_mesh(MESH), rules)

    def seen(ported: tpuport.PortedModel) -> Any:
        def rows(x: jax.Array) -> jax.Array:
            return ported.apply(ported.params, ported.buffers, None, x)[0]

        values = x.numpy()
        return jax.jit(jax.vmap(lambda x: jax.jvp(rows, (x,), (2 * x,))))(values)

    for want, have in zip(seen(alone), seen(spread), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_mix_no_axes(name: str) -> None:
    ported = tpuport.convert(Chain(), verify=False)
    tpuport.shard(ported, make_mesh({"data": 2, "fsdp": 2, "tensor": 2}), name)
    assert not ported._placement.mixes_axes


@pytest.mark.parametrize(
    ("state", "arguments", "activations", "mixed"),
    [
        ([P("tensor", "expert")], [P(PAIR)], [P(PAIR, "expert")], False),
        ([P("tensor", "expert")], [P(PAIR, "expert")], [], False),
        ([P(PAIR)], [P("tensor")], [P("sequence")], False),
        ([BOTH], [], [], True),
        ([], [], [BOTH], True),
        ([], [P(PAIR)], [P("sequence")], True),
        ([], [P(PAIR)], [P(PAIR[::-1])], True),
        ([P(PAIR, None, P.UNCONSTRAINED)], [], [], False),
    ],
)
def test_axes_are_mixed_where_two_are_taken_beside_a_third(
    state: list[P], arguments: list[P], activations: list[P], mixed: bool
) -> None:
    assert mixes_axes(state, arguments, activations, MESH) is mixed
    assert not mixes_axes(state, arguments, activations, {**MESH, "expert": 1})


@pytest.mark.xfail(strict=True, reason="jax 0.10.2: products in tracing/patterns/products.py")
def test_the_partitioner_gives_each_chip_its_part_of_a_product() -> None:
    mesh = make_mesh(MESH)
    one, other = (
        jax.device_put(
            jax.random.normal(jax.random.key(i), (rows, 16)), NamedSharding(mesh, P(axis, "expert"))
        )
        for i, rows, axis in [(0, 16, "sequence"), (1, 8, "tensor")]
    )
    place = NamedSharding(mesh, BOTH)
    run = jax.jit(lambda a, b: jax.lax.with_sharding_constraint(a @ b.T, place))
    expected = np.asarray(one) @ np.asarray(other).T
    np.testing.assert_allclose(run(one, other), expected, rtol=1e-4, atol=1e-4)
