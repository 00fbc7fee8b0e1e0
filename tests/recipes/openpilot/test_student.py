"""Adapters on chosen layers: trained as eager PEFT trains them, and merged."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
import torch
from onnx import helper

import tpuport
from recipes.openpilot.contract import read_contract
from recipes.openpilot.importing import ImportedGraph, import_onnx
from recipes.openpilot.losses import winner_takes_all
from recipes.openpilot.outputs import predictions
from recipes.openpilot.student import (
    DoraOptions,
    add_dora,
    choose_layers,
    count_trained,
    merge,
    trainable_layers,
)
from tests.recipes.openpilot.onnx_graphs import make_graph
from tpuport.foundation.errors import UsageError
from tpuport.training import make_train_step

RATE = 0.05


@pytest.fixture
def policy(driving_models: Callable[..., list[Path]]) -> Path:
    return driving_models("0.10.3")[1]


def batch_of(path: Path, rows: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    given = {
        spec.name: torch.randn(rows, *spec.shape[1:], generator=generator)
        for spec in read_contract(path).inputs
    }
    return {**given, "plan": torch.randn(rows, 33, 15, generator=generator)}


def plan_loss(slices: Any) -> Callable[..., torch.Tensor]:
    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "plan"}
        found: Any = predictions(model(**given), slices)["plan"]
        return winner_takes_all(found, batch["plan"], torch.ones(len(batch["plan"])))

    return loss


def test_layers_are_chosen_by_pattern(policy: Path):
    graph = import_onnx(policy)
    assert choose_layers(graph, ["temporal_hydra/plan"]) == [
        *("policy/temporal_hydra/plan/0/Gemm", "policy/temporal_hydra/plan/2/Gemm")
    ]
    assert choose_layers(graph, ["qkv", "attention"]) == [
        *("policy/attention/qkv/MatMul", "policy/attention/out/MatMul")
    ]
    everything = choose_layers(graph, ["."])
    assert everything == list(trainable_layers(graph))


def test_adapters_begin_as_the_identity_and_alone_are_trained(policy: Path):
    graph = import_onnx(policy)
    batch = batch_of(policy)
    del batch["plan"]
    with torch.no_grad():
        before = graph(**batch)
    names = add_dora(graph, DoraOptions(("plan", "qkv"), rank=4))
    trained = [name for name, p in graph.named_parameters() if p.requires_grad]
    assert len(trained) == 3 * len(names) == 9  # two factors and the magnitude
    assert all("lora_" in name for name in trained)
    some, all_ = count_trained(graph)
    assert 0 < some < 0.1 * all_
    with torch.no_grad():
        torch.testing.assert_close(graph(**batch), before, rtol=1e-5, atol=1e-5)
    merge(graph)
    with torch.no_grad():
        torch.testing.assert_close(graph(**batch), before, rtol=1e-5, atol=1e-5)
    assert not [name for name, _ in graph.named_parameters() if "lora_" in name]


def test_adapters_are_those_of_the_seed(policy: Path):
    graphs = [import_onnx(policy) for _ in range(3)]
    for graph, seed in zip(graphs, (0, 0, 1), strict=True):
        add_dora(graph, DoraOptions(("plan",), seed=seed))
    one, same, other = (dict(graph.named_parameters()) for graph in graphs)
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not all(torch.equal(value, other[name]) for name, value in one.items())


def adapted(policy: Path) -> ImportedGraph:
    """With adapters that do something, as after some steps."""
    graph = import_onnx(policy)
    add_dora(graph, DoraOptions(("plan", "attention", "trunk"), rank=4))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in graph.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return graph


def test_a_step_is_that_of_eager_peft(policy: Path):
    slices, batch = read_contract(policy).slices, batch_of(policy)
    eager = adapted(policy)
    optimizer = torch.optim.SGD([p for p in eager.parameters() if p.requires_grad], RATE)
    expected = plan_loss(slices)(eager, batch)
    expected.backward()
    optimizer.step()

    graph = adapted(policy)
    before = {name: p.detach().clone() for name, p in graph.named_parameters()}
    ported = tpuport.convert(graph, verify=False)
    step = make_train_step(ported, plan_loss(slices), optax.sgd(RATE))
    trained = [name for name, p in eager.named_parameters() if p.requires_grad]
    assert sorted(step.trained) == sorted(trained)
    state, metrics = step(step.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-5)
    after: Any = step.load_state(state).to_torch()
    found = dict(after.named_parameters())
    for name, parameter in eager.named_parameters():
        if name not in trained:
            assert torch.equal(found[name], before[name])
            continue
        # The gradient, from how far a step went.
        mine = (before[name] - found[name]) / RATE
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        assert scale > 0
        np.testing.assert_allclose(
            mine.detach().numpy(), parameter.grad.numpy(), atol=2e-3 * scale, err_msg=name
        )


def test_what_was_learned_is_merged(policy: Path):
    graph, batch = adapted(policy), batch_of(policy)
    del batch["plan"]
    plain = import_onnx(policy)
    with torch.no_grad():
        before, base = graph(**batch), plain(**batch)
        assert not torch.allclose(before, base, atol=1e-2)
        names = merge(graph)
        torch.testing.assert_close(graph(**batch), before, rtol=1e-4, atol=1e-4)
    assert {name: type(m) for name, m in graph.named_modules()} == {
        name: type(m) for name, m in plain.named_modules()
    }
    assert all(
        not torch.equal(graph.get_submodule(n).weight, plain.get_submodule(n).weight) for n in names
    )


def test_convolutions_too(driving_models: Callable[..., list[Path]]):
    path = driving_models("0.10.3")[0]
    graph = import_onnx(path)
    names = add_dora(graph, DoraOptions(("road/",), rank=3))
    # Depthwise ones have no product of lower rank.
    assert "road/blocks/0/mix/Conv" in names
    assert not [name for name in names if "depthwise" in name or "down" in name]
    images = {n: torch.randint(0, 256, (2, 12, 128, 256)) for n in ("img", "big_img")}
    given = {name: value.to(torch.uint8) for name, value in images.items()}
    with torch.no_grad():
        for name, parameter in graph.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn_like(parameter))
        before = graph(**given)
        other = copy.deepcopy(graph)
        merge(graph)
        torch.testing.assert_close(graph(**given), before, rtol=1e-3, atol=1e-3)
        found = tpuport.convert(other, verify=False)(**given)
    np.testing.assert_allclose(tpuport.to_numpy(found), before.numpy(), rtol=1e-3, atol=1e-3)


# -- refused ---------------------------------------------------------------------------------------


def test_wrong_choices_are_refused(policy: Path):
    graph = import_onnx(policy)
    with pytest.raises(UsageError, match=r"'nowhere' finds none of the \d+ layers, such as"):
        choose_layers(graph, ["nowhere"])
    with pytest.raises(UsageError, match=r"'\(' is no regular expression"):
        choose_layers(graph, ["("])
    with pytest.raises(UsageError, match="find no layer that can have an adapter"):
        choose_layers(graph, [])
    with pytest.raises(UsageError, match=r"rank=0, alpha=16\.0: expected numbers above 0"):
        add_dora(graph, DoraOptions(rank=0))


def test_one_weight_of_two_layers_is_refused():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/a/MatMul"),
        helper.make_node("MatMul", ["h", "w"], ["o"], name="/b/MatMul"),
    ]
    x = {"x": np.ones((1, 4), np.float32)}
    graph = import_onnx(make_graph(nodes, x, ["o"], {"w": np.ones((4, 4), np.float32)}))
    with pytest.raises(UsageError, match="a/MatMul and b/MatMul are one weight in the file"):
        choose_layers(graph, ["a/"])


def test_a_merge_that_breaks_is_refused(policy: Path):
    graph = adapted(policy)
    with torch.no_grad():
        next(p for n, p in graph.named_parameters() if "lora_A" in n).fill_(float("nan"))
    with pytest.raises(UsageError, match="was not merged: NaNs detected"):
        merge(graph)
