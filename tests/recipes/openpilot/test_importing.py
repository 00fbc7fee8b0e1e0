"""Whole graphs as torch modules: what onnxruntime computes, in rows, traced, or refused."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import tpuport
from recipes.openpilot.contract import load_onnx, read_contract
from recipes.openpilot.generations import GENERATIONS
from recipes.openpilot.importing import import_onnx
from recipes.openpilot.small_model import build
from tests.recipes.openpilot.onnx_graphs import check_rows, make_graph, random_rows
from tpuport.foundation.errors import CheckpointError, UsageError


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_driving_model_is_imported_for_any_number_of_rows(
    driving_models: Callable[..., list[Path]], generation: str
):
    for path in driving_models(generation):
        graph = check_rows(load_onnx(path), random_rows(path, 3))
        kinds = [type(module) for module in graph.modules()]
        assert nn.Linear in kinds
        contract = read_contract(path)
        assert graph.leads == (generation != "2026-09")
        if contract.images:
            assert sum(kind is nn.Conv2d for kind in kinds) == 24


def test_another_opset_is_imported(driving_models: Callable[..., list[Path]]):
    (path,) = driving_models("2026-09", opset=18)
    check_rows(load_onnx(path), random_rows(path, 2))


def test_halves_are_computed_in_single_precision(driving_models: Callable[..., list[Path]]):
    (path,) = driving_models("2026-07", opset=21, fp16=True)
    # onnxruntime rounds each step to float16.
    graph = check_rows(load_onnx(path), random_rows(path, 2), tolerance=5e-3)
    assert {p.dtype for p in graph.parameters()} == {torch.float32}


def test_names_weights_and_gradients_are_those_of_the_model(
    driving_models: Callable[..., list[Path]],
):
    path = driving_models("0.10.3")[1]
    (kind,) = GENERATIONS["0.10.3"][1:]
    graph, eager = import_onnx(path), build(kind, 1)
    rows = random_rows(path, 2)
    inputs = {n: torch.from_numpy(np.concatenate([row[n] for row in rows])) for n in rows[0]}
    for model in (graph, eager):
        given = inputs if model is graph else dict(enumerate(inputs[n] for n in kind.buffers))
        out = model(**given) if model is graph else model(*given.values())
        out[:, :990].square().mean().backward()
    pairs = {
        "policy/temporal_hydra/plan/2/Gemm": "policy.temporal_hydra.plan.2",
        "policy/temporal_hydra/trunk/up/Gemm": "policy.temporal_hydra.trunk.up",
    }
    for name, original in pairs.items():
        mine, theirs = graph.get_submodule(name), eager.get_submodule(original)
        assert isinstance(mine, nn.Linear)
        assert isinstance(theirs, nn.Linear)
        assert mine.weight.grad is not None
        assert theirs.weight.grad is not None
        assert torch.equal(mine.weight, theirs.weight)
        torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-7)
    # Every weight of the module is in the file, under its name.
    missing = {n for n, p in graph.named_parameters() if p.requires_grad} - set(graph.origins)
    assert missing == set()
    assert len(graph.origins) >= len(list(eager.parameters())) - 2  # of a head that is not used


def test_a_part_of_a_graph(driving_models: Callable[..., list[Path]]):
    (path,) = driving_models("2026-07")
    contract, graph = read_contract(path), import_onnx(path)
    feature = graph.part_of("outputs", contract.slices["hidden_state"])
    assert feature is not None
    rows = random_rows(path, 2)
    given = {n: torch.from_numpy(np.concatenate([row[n] for row in rows])) for n in rows[0]}
    rows_first = {name: value.unsqueeze(1) for name, value in given.items()}
    images = {name: rows_first[name] for name in contract.images}
    with torch.no_grad():
        whole = graph(**given)
        seen = graph.compute(images, [feature])[feature]
        assert torch.equal(seen[:, 0], whole[:, contract.slices["hidden_state"]])
        rest = {name: value for name, value in rows_first.items() if name not in images}
        plan = graph.part_of("outputs", contract.slices["plan"])
        assert plan is not None
        found = graph.compute({**rest, feature: seen}, [plan])[plan]
    assert torch.equal(found[:, 0], whole[:, contract.slices["plan"]])
    assert graph.part_of("outputs", slice(3, 60)) is None
    with pytest.raises(UsageError, match="is needed for outputs, and not given"):
        graph.compute({**images}, ["outputs"])


def test_what_is_frozen_is_computed_before(driving_models: Callable[..., list[Path]]):
    (path,) = driving_models("2026-07")
    contract, graph = read_contract(path), import_onnx(path)
    feature = graph.part_of("outputs", contract.slices["hidden_state"])
    rows = random_rows(path, 2)
    given = {n: torch.from_numpy(np.stack([row[n] for row in rows])) for n in rows[0]}
    images = {name: given[name] for name in contract.images}
    rest = {name: value for name, value in given.items() if name not in images}
    with torch.no_grad():
        expected = graph.compute(given, ["outputs"])["outputs"]
    sizes = {}
    for kind, trained in {"none": "^$", "plan": "plan", "heads": "hydra", "all": "."}.items():
        for name, parameter in graph.named_parameters():
            parameter.requires_grad_(bool(re.search(trained, name)))
        frontier = graph.frozen_frontier(contract.images)
        with torch.no_grad():
            seen = graph.compute(images, frontier)
            found = graph.compute({**seen, **rest}, ["outputs"])["outputs"]
        assert torch.equal(found, expected)
        sizes[kind] = sum(value[0].numel() for value in seen.values())
        if kind == "heads":
            assert frontier[0] == feature
    assert sizes["heads"] == 2 * 512  # the feature, and once more as a token
    assert sizes["none"] == sizes["plan"] < 4 * 1576
    assert sizes["all"] == 2 * 12 * 128 * 256


def test_inputs_are_by_place_or_name():
    x, y = np.ones((1, 2), np.float32), np.full((1, 2), 3, np.float32)
    model = make_graph([helper.make_node("Sub", ["a", "b"], ["o"])], {"a": x, "b": y}, ["o"])
    graph = import_onnx(model)
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    assert torch.equal(graph(a, b), graph(a, b=b))
    for args, kwargs in (((a,), {}), ((a, b, b), {}), ((a,), {"b": b, "c": b})):
        with pytest.raises(UsageError, match=r"expected \['a', 'b'\]"):
            graph(*args, **kwargs)


def test_shapes_are_folded_and_never_computed():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["first"]),
        helper.make_node("Concat", ["first", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["r"]),
        helper.make_node("ConstantOfShape", ["target2"], ["ones"], value=_one()),
        helper.make_node("Add", ["r", "ones"], ["o"]),
    ]
    constants = {
        "zero": np.array([0], np.int64),
        "rest": np.array([3, -1], np.int64),
        "target2": np.array([1, 3, 2], np.int64),
    }
    rows = [{"x": np.random.default_rng(i).normal(size=(1, 6)).astype(np.float32)} for i in (0, 1)]
    graph = check_rows(make_graph(nodes, rows[0], ["o"], constants), rows)
    assert [step.op for step in graph.steps] == ["Reshape", "Add"]
    assert [p for p in graph.parameters() if p.requires_grad] == []


def _one() -> onnx.TensorProto:
    return helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [1.0])


def test_two_nodes_of_one_weight_share_it():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/a/MatMul"),
        helper.make_node("MatMul", ["h", "w"], ["o"], name="/b/MatMul"),
    ]
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    x = {"x": np.ones((1, 4), np.float32)}
    graph = check_rows(make_graph(nodes, x, ["o"], {"w": weight}), [x])
    first, second = graph.get_submodule("a/MatMul"), graph.get_submodule("b/MatMul")
    assert first.weight is second.weight
    assert len(list(graph.parameters())) == 1


def test_a_copy_is_another_module(driving_models: Callable[..., list[Path]]):
    path = driving_models("0.10.3")[1]
    graph = import_onnx(path)
    rows = {n: torch.from_numpy(v) for n, v in random_rows(path, 1)[0].items()}
    other = copy.deepcopy(graph)
    before = graph(**rows)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(graph(**rows), before)
    assert not torch.equal(other(**rows), before)


# -- traced ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "number"), [("2026-07", 0), ("2026-09", 0), ("0.10.3", 1)])
def test_a_port_equals_onnxruntime(
    driving_models: Callable[..., list[Path]], generation: str, number: int
):
    path = driving_models(generation)[number]
    rows = random_rows(path, 2)
    graph = check_rows(load_onnx(path), rows)
    join: Any = np.concatenate if graph.leads else np.stack
    given = {n: torch.from_numpy(join([row[n] for row in rows])) for n in rows[0]}
    ported = tpuport.convert(graph, verify=False)
    with torch.no_grad():
        expected = graph(**given)
    found = ported(**given)
    if not isinstance(expected, dict):
        expected, found = {"outputs": expected}, {"outputs": found}
    for name, value in expected.items():
        mine = tpuport.to_numpy(found[name])
        np.testing.assert_allclose(mine, value.numpy(), rtol=1e-4, atol=1e-4)
    # Only floats are state: shapes and indices are in the program.
    assert {value.dtype.name for value in ported.params.values()} == {"float32"}
    assert not ported.buffers


# -- refused ---------------------------------------------------------------------------------------

X = {"x": np.ones((1, 4), np.float32)}


def model_of(op: str, inputs: list[str], constants: Any = None, **attributes: Any) -> Any:
    domain = attributes.pop("domain", "")
    node = helper.make_node(op, inputs, ["o"], name="/head/it", domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, 1, v.shape) for n, v in X.items()],
        [helper.make_tensor_value_info("o", 1, (1, 4))],
        [onnx.numpy_helper.from_array(v, n) for n, v in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (model_of("NonZero", ["x"]), "(NonZero, opset 20): the operator is not supported"),
        (model_of("Gelu", ["x"], domain="com.microsoft"), "the domain 'com.microsoft' is not ONNX"),
        (model_of("Reshape", ["x", "x"]), "input 1 ('x') depends on the inputs of the model"),
        (
            model_of("Reshape", ["x", "s"], {"s": np.array([3, 3], np.int64)}),
            "(1, 4) cannot become (3, 3)",
        ),
        (model_of("Add", ["x", "gone"]), "its input 'gone' is not there: the file is damaged"),
        (
            model_of("Add", ["x", "c"], {"c": np.ones((1, 3), np.float32)}),
            "it does not fit its inputs",
        ),
        (model_of("Softmax", ["x"], axis=7), "axis 7 of 2"),
        (model_of("CumSum", ["x", "a"], {"a": np.int64(1)}, reverse=1), "exclusive or reverse"),
        (model_of("Resize", ["x"], mode="cubic"), "mode 'cubic' with 'half_pixel'"),
        (
            model_of("Transpose", ["x"], perm=[1, 0]),
            "'o' is declared as (1, 4) and computed as (4, 1): the file contradicts itself",
        ),
        (
            model_of("Identity", ["c"], {"c": np.ones((1, 4), np.float32)}),
            "the output 'o' does not depend on the inputs",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(model: onnx.ModelProto, said: str):
    with pytest.raises(CheckpointError, match=re.escape(said)) as error:
        import_onnx(model)
    assert "What to do" in str(error.value)
    if "declared" not in said and "does not depend" not in said:
        assert "node 'head/it'" in str(error.value)


@pytest.mark.parametrize("as_node", [False, True])
def test_a_tensor_that_was_cut_off_is_named(as_node: bool):
    tensor = onnx.numpy_helper.from_array(np.ones((1, 4), np.float32), "c")
    tensor.raw_data = tensor.raw_data[:-4]
    model = model_of("Add", ["x", "c"])
    if as_node:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=tensor))
    else:
        model.graph.initializer.append(tensor)
    with pytest.raises(CheckpointError, match=r"'c' is declared as \(1, 4\) and was not read"):
        import_onnx(model)


@pytest.mark.parametrize("opset", [8, 23])
def test_another_opset_is_refused(opset: int):
    model = model_of("Relu", ["x"])
    model.opset_import[0].version = opset
    with pytest.raises(CheckpointError, match=f"in opset {opset}: expected 9 to 22"):
        import_onnx(model)
