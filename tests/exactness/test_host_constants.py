"""Values that do not depend on the inputs stay concrete while tracing, and reach the program
without bloating it.

Contents:
    CONCRETE            item, int, if, masks, arange, linspace, tolist, numpy and ranges of host
                        tensors
    CACHES              tables that grow with the sequence, tables built on first use
    test_large_*        large constants are arguments of the compiled function, once however often
                        they are used
    test_compilation_*  one compilation for each signature, retraces named by cause
"""

import math
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import (
    Scenario,
    against_torchax,
    assert_same,
    by_tpuport,
    check_calls,
    expect_torchax_wrong,
    normal,
)

MIXED = "a CPU tensor meets a traced one"
X = normal(4, 6)


def _position_table(x: torch.Tensor) -> Any:
    places = torch.arange(x.shape[0])
    longest = places.max().item() + 1
    angles = places[:, None].float() * torch.exp(
        torch.arange(0, 6, 2).float() * (-math.log(1e4) / 6)
    )
    table = torch.zeros(longest, 6)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return x + table


def _masks(x: torch.Tensor) -> Any:
    steps = torch.linspace(0, 1, 6)
    inner = (steps > 0.3) & (steps < 0.9)
    kept = inner.nonzero().squeeze(1)
    if inner.any() and not inner.all():
        x = x * 2
    return x[:, inner], x.index_select(1, kept), x[:, kept[0] :], inner.sum().item() * x


def _numbers(x: torch.Tensor) -> Any:
    sizes = torch.tensor([1, 2, 3])
    parts = x.split(sizes.tolist(), dim=1)
    count = int(sizes.sum())
    scale = float(sizes.float().mean())
    total = 0
    for size in sizes:
        total = total + x[:, : int(size)].sum()
    return (
        *parts,
        x.repeat(int(sizes[1]), 1),
        torch.full((count,), scale) + x[0],
        total,
        x[:, sizes[0]],
    )


def _grid(x: torch.Tensor) -> Any:
    ys, xs = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
    index = (ys * 3 + xs).flatten()
    windows = torch.bucketize(torch.arange(6), torch.tensor([2, 4]))
    same = windows[:, None] == windows[None]
    return (
        x[:, index],
        x @ x.T @ torch.ones(4, 6) * same.float().sum(),
        (x.T @ x).masked_fill(~same, 0.0),
    )


def _numpy(x: torch.Tensor) -> Any:
    places = torch.arange(6).numpy()
    weights = torch.from_numpy(np.hanning(6).astype(np.float32))
    order = np.argsort(-weights.numpy())
    return x * weights, x[:, torch.as_tensor(order.copy())], x[:, places % 2 == 0]


def _shape_tensors(x: torch.Tensor) -> Any:
    size = torch.tensor(x.shape)
    half = size // 2
    return (
        x.reshape(-1)[: half.prod()],
        x[: half[0], : half[1]],
        x.new_zeros(tuple(size.tolist())) + x,
    )


def _betas(x: torch.Tensor) -> Any:
    betas = torch.linspace(1e-4**0.5, 0.02**0.5, 10, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, 0).float()
    for step in torch.tensor([7, 3, 0]):
        x = alphas[step].sqrt() * x + (1 - alphas[step]).sqrt() * x.cos()
        if step > 0:
            x = x + 0.1
    return x


class Masked(nn.Module):
    """A causal mask in a buffer, read as Python values and used as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "mask", torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False
        )
        self.steps = torch.arange(8)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        size = x.shape[0]
        scores = (self.linear(x) @ x.T).masked_fill(~self.mask[:size, :size], float("-inf"))
        return scores.softmax(-1) @ x * self.steps[:size].sum().item()


CONCRETE = [
    Scenario("position_table", lambda: _position_table, ((X,),), MIXED),
    Scenario("masks", lambda: _masks, ((X,),), MIXED),
    Scenario("numbers", lambda: _numbers, ((X,),), MIXED),
    Scenario("grid", lambda: _grid, ((X,),), MIXED),
    Scenario("numpy", lambda: _numpy, ((X,),), MIXED),
    Scenario("shape_tensors", lambda: _shape_tensors, ((X,),), None),
    Scenario("betas", lambda: _betas, ((X,),), None),
    Scenario("masked", Masked, ((X,),), None, rtol=1e-4),
]


class RotaryCache(nn.Module):
    """A table rebuilt when a longer sequence comes, kept in buffers registered in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = 0
        self.linear = nn.Linear(6, 6)
        self._build(4)

    def _build(self, size: int) -> None:
        self.cached = size
        angles = torch.outer(
            torch.arange(size).float(), 1.0 / 100.0 ** (torch.arange(0, 6, 2).float() / 6)
        )
        table = torch.cat([angles, angles], -1)
        self.register_buffer("cos", table.cos(), persistent=False)
        self.register_buffer("sin", table.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0]
        if size > self.cached:
            self._build(size * 2)
        left, right = x.chunk(2, -1)
        turned = torch.cat([-right, left], -1)
        return self.linear(x * self.cos[:size] + turned * self.sin[:size])


class RotaryFromPositions(RotaryCache):
    """The length that is needed is computed from a position tensor that forward makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        longest = positions.max().item() + 1
        if longest > self.cached:
            self._build(longest)
        return self.linear(x * self.cos[positions] + x * self.sin[positions])


class AnchorsByShape(nn.Module):
    """A dict of tables by shape, as detectors keep anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = tuple(x.shape)
        if shape not in self.tables:
            self.tables[shape] = torch.rand(
                shape, generator=torch.Generator().manual_seed(len(self.tables))
            )
        return x + self.tables[shape]


LENGTHS = (
    (normal(3, 6),),
    (normal(9, 6),),
    (normal(5, 6),),
    (normal(20, 6),),
    (normal(3, 6, seed=5),),
)
CACHES = [
    Scenario(
        "rotary_cache", RotaryCache, LENGTHS, "the table that a trace registers is lost", rtol=1e-4
    ),
    Scenario("rotary_from_positions", RotaryFromPositions, LENGTHS, MIXED, rtol=1e-4),
    Scenario("anchors_by_shape", AnchorsByShape, LENGTHS, MIXED),
]
SCENARIOS = [*CONCRETE, *CACHES]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_calls(scenario):
    check_calls(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", against_torchax(SCENARIOS))
def test_calls_under_plain_torchax(scenario):
    check_calls(scenario, PlainTorchax)


# Large constants.

TABLE = normal(256, 256, seed=3)


class UsesTable(nn.Module):
    """A large table that is neither parameter nor buffer, used by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + x @ TABLE
        return x


def _text_of_program(ported: Any, *args: torch.Tensor) -> str:
    """The HLO of the one program that `ported` has compiled."""
    (compiled,) = ported._cache.values()
    state = {name: ported._values()[name] for name in compiled.names}
    values = [a.numpy() for a in args]
    return compiled.run.lower(state, jax.random.key(0), values).as_text()


def test_large_constants_are_arguments():
    torch.manual_seed(0)
    model = UsesTable()
    ported = by_tpuport(model)
    x = normal(2, 256)
    assert_same(ported(x), model(x), "output", 1e-4)
    assert len(_text_of_program(ported, x)) < 30_000
    hoisted = ported.report.constants
    assert [(h.shape, h.bytes) for h in hoisted] == [((256, 256), TABLE.numel() * 4)]


def test_large_constant_under_apply_is_embedded_once():
    ported = by_tpuport(UsesTable())
    closed = jax.make_jaxpr(lambda p, x: ported.apply(p, {}, None, x)[0])(
        ported.params, normal(2, 256).numpy()
    )
    assert sum(c.size >= TABLE.numel() for c in closed.consts) == 1


def copied_in_each_layer(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + TABLE.clone() * 0.5
    return x


def written_between_reads(x: torch.Tensor) -> torch.Tensor:
    table = TABLE.clone()
    y = x + table
    table += 1
    return y * (x + table)


def filled_by_rows(x: torch.Tensor) -> torch.Tensor:
    rows, same = x.new_zeros(256, 256), torch.full((256, 256), -0.0)
    rows[1:3] = x
    return rows + torch.full((256, 256), float("nan")).nan_to_num(2.0) + 1 / same


@pytest.mark.parametrize(
    ("function", "count"),
    [(copied_in_each_layer, 1), (written_between_reads, 2), (filled_by_rows, 0)],
)
def test_large_constants_are_kept_once_each_and_uniform_ones_not_at_all(function: Any, count: int):
    ported = by_tpuport(function)
    x = normal(2, 256) if function is filled_by_rows else normal(256, 256)
    assert_same(ported(x), function(x), "output", 1e-6)
    (compiled,) = ported._cache.values()
    assert len(compiled.run.hoisted) == count
    assert [one.shape for one in ported.report.constants] == [(256, 256)] * count


@expect_torchax_wrong("a host tensor has to be moved by hand, and then is embedded")
def test_large_constants_under_plain_torchax():
    port = PlainTorchax(UsesTable())
    port(normal(2, 256))


# Compilations.


def test_compilation_count_by_shape_and_its_cause():
    ported = by_tpuport(nn.Linear(6, 3))
    for rows in (4, 4, 2, 4, 2):
        ported(normal(rows, 6))
    (retrace,) = ported.report.retraces
    assert "float32[4, 6] -> float32[2, 6]" in retrace.causes[0]


def test_compilation_is_shared_by_values_and_layouts_of_arguments():
    ported = by_tpuport(lambda x, flag, extra: (x * 2 if flag else x) + extra["y"][0])
    for seed in range(3):
        ported(normal(4, 6, seed=seed), True, {"y": [normal(6, seed=seed)]})
    assert ported.report.retraces == []
    ported(X, False, {"y": [normal(6)]})
    (retrace,) = ported.report.retraces
    assert "True -> False" in retrace.causes[0]


def test_compilation_names_the_dtype_and_the_mode():
    ported = by_tpuport(nn.Dropout(0.5))
    ported(X)
    ported(X.double().float())
    ported(X.bfloat16())
    ported.eval()
    assert_same(ported(X.bfloat16()), X.bfloat16(), "evaluation")
    first, second = ported.report.retraces
    assert "float32[4, 6] -> bfloat16[4, 6]" in first.causes[0]
    assert "training mode" in second.causes[0]
    ported.train()
    ported(X)
    assert len(ported.report.retraces) <= 3


def test_compilation_when_a_float_argument_changes_each_time_is_named():
    ported = by_tpuport(lambda x, scale: x * scale)
    for scale in (0.5, 0.25):
        assert_same(ported(X, scale), X * scale, "output")
    assert "0.5 -> 0.25" in ported.report.retraces[0].causes[0]
