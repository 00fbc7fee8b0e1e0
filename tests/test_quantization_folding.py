"""Orders of channels that layers in front make: nothing changes to the bit, and none is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tpuport
from tpuport.quantization import QuantizationScheme
from tpuport.quantization.folding import fold_orders
from tpuport.quantization.freeze import freeze

F = torch.nn.functional
Rule = Callable[["Gated", torch.Tensor], torch.Tensor]


class Gated(torch.nn.Module):
    """A gated product, whose channels reach `down` as its rule says."""

    count: torch.Tensor
    of_channels: torch.Tensor

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.gate, self.up = torch.nn.Linear(32, 64), torch.nn.Linear(32, 64, bias=False)
        self.down, self.other = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("of_channels", torch.arange(64) / 64 + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(self, x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.gate(x), approximate="tanh") * self.up(x)


def plain(m: Gated, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    return x + m.down((2 * m.gated(x)).flatten(0, 1).bfloat16().float()).view(x.shape)


def dropped(m: Gated, x: torch.Tensor) -> torch.Tensor:
    """Multiply rows by numbers of their own, in place of channels."""
    return m.down(m.gated(x).clamp(-3, 3) * x[..., :1])


def given_back(m: Gated, x: torch.Tensor) -> torch.Tensor:
    inner = m.gated(x)
    return torch.cat([m.down(inner), inner], -1)


def of_channels(m: Gated, x: torch.Tensor) -> torch.Tensor:
    return m.down(m.gated(x) * m.of_channels)


def normed(m: Gated, x: torch.Tensor) -> torch.Tensor:
    return m.down(torch.softmax(m.gated(x), -1))


def in_halves(m: Gated, x: torch.Tensor) -> torch.Tensor:
    low, high = m.gated(x).chunk(2, -1)
    return m.down(torch.cat([high, low], -1))


def read_twice(m: Gated, x: torch.Tensor) -> torch.Tensor:
    inner = m.gated(x)
    return m.down(inner) + m.other(inner)


def called_twice(m: Gated, x: torch.Tensor) -> torch.Tensor:
    return m.down(m.gated(x)) + m.down(x.repeat(1, 1, 2))


def written(m: Gated, x: torch.Tensor) -> torch.Tensor:
    inner = m.gated(x)
    inner[..., 3] = 0
    return m.down(inner)


def example(rule: Rule) -> tuple[Gated, torch.Tensor]:
    torch.manual_seed(0)
    return Gated(rule).eval(), torch.randn(2, 5, 32)


SCHEMES = {
    "w4a8": QuantizationScheme(4, 8, method="duquant"),
    "zeros": QuantizationScheme(
        4, 8, method="duquant", group=32, symmetric=False, activation_symmetric=False
    ),
    "w8a16": QuantizationScheme(8, 16, method="duquant"),
}


@pytest.mark.parametrize("rule", [plain, dropped], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", SCHEMES)
def test_an_order_moves_into_the_layers_in_front(rule: Rule, name: str):
    model, x = example(rule)
    frozen, layers, _ = freeze(model, SCHEMES[name], None)
    folded, pairs = fold_orders(model, layers, x)
    assert pairs == {"down": ("gate", "up")}
    # The call that is followed writes nothing of the model's.
    assert float(model.count) == 0
    inner: dict[str, torch.Tensor] = {}
    for key in ("gate", "up"):
        inner[key] = layers[key](x)
        order = layers["down"].get_buffer("inputs.0.order")
        assert torch.equal(folded[key](x), inner[key][..., order])
        assert not torch.equal(order, torch.arange(64))
    assert "inputs.0.blocks" in dict(folded["down"].named_buffers())
    made = tpuport.quantize(model, SCHEMES[name], calibration=[x])
    assert made.quantization.folded == pairs
    assert "its order is made by gate, up" in str(made.quantization)
    with torch.no_grad():
        assert torch.equal(made.to_torch()(x), frozen(x))


def test_a_folded_model_is_saved_and_loaded(tmp_path: Path):
    model, x = example(plain)
    made = tpuport.quantize(model, SCHEMES["w4a8"], calibration=[x])
    tpuport.save_checkpoint(tmp_path / "model.safetensors", made)
    with torch.device("meta"):
        empty = Gated(plain).eval()
    loaded = tpuport.quantize(empty, checkpoint=tmp_path / "model.safetensors")
    assert loaded.quantization == made.quantization
    assert "down.inputs.0.order" not in loaded.buffers
    assert torch.equal(tpuport.to_torch(loaded(x)), tpuport.to_torch(made(x)))


@pytest.mark.parametrize(
    "rule",
    [given_back, of_channels, normed, in_halves, read_twice, called_twice, written],
    ids=lambda one: one.__name__,
)
def test_where_more_than_one_channel_is_looked_at_nothing_moves(rule: Rule):
    model, x = example(rule)
    layers = freeze(model, SCHEMES["w4a8"], None)[1]
    folded, pairs = fold_orders(model, layers, x)
    assert pairs == {}
    assert all(folded[name] is one for name, one in layers.items())


def test_results_that_would_differ_keep_their_orders(monkeypatch: pytest.MonkeyPatch):
    """Let what is followed be wrong: the comparison finds it."""
    model, x = example(of_channels)
    layers = freeze(model, SCHEMES["w4a8"], None)[1]

    def pairs(self: Any) -> Any:
        yield "down", ("gate", "up")

    monkeypatch.setattr("tpuport.quantization.folding._Follower.pairs", pairs)
    assert fold_orders(model, layers, x)[1] == {}
