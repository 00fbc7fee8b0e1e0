"""A trained import becomes the original file with other weights, or nothing at all."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from recipes.openpilot.contract import load_onnx, read_contract
from recipes.openpilot.exporting import export, write_weights
from recipes.openpilot.importing import ImportedGraph, import_onnx
from recipes.openpilot.student import DoraOptions, add_dora, merge
from tests.recipes.openpilot.onnx_graphs import make_graph, random_rows, run_onnx
from tpuport.foundation.errors import CheckpointError, UsageError


def moved(path: Path, scale: float = 0.02) -> ImportedGraph:
    """An import with every weight a little different."""
    graph = import_onnx(path)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in graph.named_parameters():
            if name in graph.origins:
                parameter.add_(scale * torch.randn_like(parameter) * parameter.abs().mean())
    return graph


# Opsets 18, 20 and 21; halves; a policy, a supercombo, one with its state.
FILES = [
    ("2026-09", 0, {"opset": 18}),
    ("2026-09", 0, {}),
    ("0.10.3", 1, {}),
    ("0.9.7", 0, {}),
    ("2026-07", 0, {"opset": 21, "fp16": True}),
]


@pytest.mark.parametrize(("generation", "number", "options"), FILES)
def test_an_import_that_was_not_trained_is_the_original(
    driving_models: Callable[..., list[Path]],
    tmp_path: Path,
    generation: str,
    number: int,
    options: dict[str, Any],
):
    path = driving_models(generation, **options)[number]
    out = tmp_path / "out" / "model.onnx"
    report = export(import_onnx(path), path, out, rows=random_rows(path))
    assert report.changed == ()
    assert report.path == out
    assert report.largest_difference <= report.tolerance
    original, written = load_onnx(path), load_onnx(out)
    assert written.SerializeToString(deterministic=True) == original.SerializeToString(
        deterministic=True
    )
    (row,) = random_rows(path, 1)
    for a, b in zip(run_onnx(original, row), run_onnx(written, row), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("generation", "number", "options"), FILES)
def test_a_trained_import_is_what_the_module_computes(
    driving_models: Callable[..., list[Path]],
    tmp_path: Path,
    generation: str,
    number: int,
    options: dict[str, Any],
):
    path = driving_models(generation, **options)[number]
    graph, out = moved(path), tmp_path / "model.onnx"
    report = export(graph, path, out, rows=random_rows(path))
    assert len(report.changed) > 20
    assert report.largest_difference < (6e-3 if options.get("fp16") else 1e-5)
    before, after = load_onnx(path), load_onnx(out)
    assert read_contract(out) == read_contract(path)
    assert [n.SerializeToString() for n in after.graph.node if n.op_type != "Constant"] == [
        n.SerializeToString() for n in before.graph.node if n.op_type != "Constant"
    ]
    kinds = [[(t.name, t.data_type, *t.dims) for t in m.graph.initializer] for m in (before, after)]
    assert kinds[0] == kinds[1]
    # Every weight comes back: exactly, or as the nearest half.
    again = dict(import_onnx(out).named_parameters())
    for name, parameter in graph.named_parameters():
        if name in graph.origins:
            kept = parameter.half().float() if options.get("fp16") else parameter
            assert torch.equal(again[name], kept), name


def test_adapters_are_merged_first(driving_models: Callable[..., list[Path]], tmp_path: Path):
    path, out = driving_models("0.10.3")[1], tmp_path / "model.onnx"
    graph = import_onnx(path)
    names = add_dora(graph, DoraOptions(("plan",), rank=4))
    with torch.no_grad():
        for name, parameter in graph.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    rows = random_rows(path)
    with pytest.raises(UsageError, match="still has adapters"):
        export(graph, path, out, rows=rows)
    given = {n: torch.from_numpy(v) for n, v in rows[0].items()}
    with torch.no_grad():
        before = graph(**given)
    merge(graph)
    report = export(graph, path, out, rows=rows)
    assert len(report.changed) == len(names)
    assert all("plan" in name and "weight" in name for name in report.changed)
    (found,) = run_onnx(load_onnx(out), rows[0])
    np.testing.assert_allclose(found, before.numpy(), atol=1e-5)


WEIGHT = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
X = {"x": np.ones((1, 4), np.float32)}


def test_weights_that_the_file_holds_otherwise():
    """Transposed, reshaped and cast on the way, and in a Constant node."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["h"], name="/a/MatMul"),
        helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(WEIGHT, "v")),
        helper.make_node("Gemm", ["h", "c", "b"], ["o"], name="/b/Gemm", transB=1),
        helper.make_node("Cast", ["half"], ["scale"], to=1),
        helper.make_node("Mul", ["o", "scale"], ["p"]),
    ]
    constants = {
        "w": np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32),
        "b": np.arange(4, dtype=np.float32).reshape(1, 4),
        "half": np.arange(1, 5, dtype=np.float16),
    }
    model = make_graph(nodes, X, ["p"], constants)
    graph = import_onnx(model)
    with torch.no_grad():
        for parameter in graph.parameters():
            parameter.add_(torch.randn_like(parameter))
    changed = write_weights(model, graph)
    assert sorted(changed) == ["b", "c", "half", "w"]
    assert {t.name: tuple(t.dims) for t in model.graph.initializer} == {
        "w": (3, 4),
        "b": (1, 4),
        "half": (4,),
    }
    with torch.no_grad():
        expected = graph(torch.from_numpy(X["x"])).numpy()
    np.testing.assert_allclose(run_onnx(model, X)[0], expected, rtol=5e-3)


def test_axes_go_back_to_where_they_were():
    """Three of them, in an order that is not its own inverse."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"], perm=[2, 0, 1]),
        helper.make_node("Mul", ["x", "turned"], ["o"]),
    ]
    given = {"x": np.random.default_rng(0).normal(size=(1, 4, 2, 3)).astype(np.float32)}
    weight = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    model = make_graph(nodes, given, ["o"], {"w": weight})
    graph = import_onnx(model)
    with torch.no_grad():
        next(graph.parameters()).add_(torch.randn(4, 2, 3))
        expected = graph(torch.from_numpy(given["x"])).numpy()
    assert write_weights(model, graph) == ["w"]
    np.testing.assert_allclose(run_onnx(model, given)[0], expected, rtol=1e-6)


# -- refused ---------------------------------------------------------------------------------------


@pytest.fixture
def policy(driving_models: Callable[..., list[Path]]) -> Path:
    return driving_models("0.10.3")[1]


def test_another_original_is_refused(
    driving_models: Callable[..., list[Path]], policy: Path, tmp_path: Path
):
    with pytest.raises(UsageError, match="the module was not imported from the original"):
        export(
            import_onnx(policy),
            driving_models("0.10.3")[0],
            tmp_path / "m.onnx",
            rows=random_rows(driving_models("0.10.3")[0]),
        )
    with pytest.raises(UsageError, match="rows is empty: expected real inputs"):
        export(import_onnx(policy), policy, tmp_path / "m.onnx", rows=[])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(policy: Path, tmp_path: Path, value: float):
    graph = import_onnx(policy)
    with torch.no_grad():
        graph.get_submodule("policy/project/MatMul").weight[0, 0] = value
    with pytest.raises(
        CheckpointError, match=r"policy/project/MatMul\.weight was trained to numbers"
    ):
        export(graph, policy, tmp_path / "m.onnx", rows=random_rows(policy))
    assert list(tmp_path.iterdir()) == []


def test_numbers_beyond_a_half_are_refused(driving_models: Callable[..., list[Path]]):
    (path,) = driving_models("2026-07", opset=21, fp16=True)
    graph = import_onnx(path)
    with torch.no_grad():
        graph.get_submodule("policy/temporal_hydra/plan/0/Gemm").weight[0, 0] = 1e5
    with pytest.raises(CheckpointError, match=re.escape("1e+05, and the file holds float16")):
        write_weights(load_onnx(path), graph)


def test_a_file_that_computes_something_else_is_not_kept(policy: Path, tmp_path: Path):
    graph = moved(policy, 0.5)
    with pytest.raises(CheckpointError, match="was not written: onnxruntime differs"):
        export(graph, policy, tmp_path / "m.onnx", rows=random_rows(policy), tolerance=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_no_numbers_is_not_kept(policy: Path, tmp_path: Path):
    """Not even where a later head, such as the pad, is the same."""
    rows = random_rows(policy, 1)
    rows[0]["features_buffer"][0, 0, 0] = np.nan
    with pytest.raises(CheckpointError, match="onnxruntime differs from the trained module by inf"):
        export(import_onnx(policy), policy, tmp_path / "m.onnx", rows=rows)
    assert list(tmp_path.iterdir()) == []


def _halve(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 10


def _forget(model: onnx.ModelProto) -> None:
    (entry,) = [one for one in model.metadata_props if one.key == "model_checkpoint"]
    model.metadata_props.remove(entry)


def _age(model: onnx.ModelProto) -> None:
    model.opset_import[0].version -= 1


@pytest.mark.parametrize("spoil", [_halve, _forget, _age])
def test_a_contract_that_would_change_is_refused(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[onnx.ModelProto], None],
):
    def write(model: onnx.ModelProto, module: ImportedGraph) -> list[str]:
        del module
        spoil(model)
        return []

    monkeypatch.setattr("recipes.openpilot.exporting.write_weights", write)
    with pytest.raises(CheckpointError, match="it would promise other inputs or outputs"):
        export(import_onnx(policy), policy, tmp_path / "m.onnx", rows=random_rows(policy))


def test_one_tensor_cannot_have_two_values():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/a/MatMul"),
        helper.make_node("Gemm", ["h", "w"], ["o"], name="/b/Gemm", transB=1),
    ]
    model = make_graph(nodes, X, ["o"], {"w": np.ones((4, 4), np.float32)})
    graph = import_onnx(model)
    with torch.no_grad():
        graph.get_submodule("a/MatMul").weight.add_(torch.randn(4, 4))
    with pytest.raises(CheckpointError, match=r"and b/Gemm\.weight are one tensor"):
        write_weights(model, graph)


def test_what_is_computed_from_constants_is_not_trained():
    nodes = [
        helper.make_node("Mul", ["w", "w"], ["square"]),
        helper.make_node("Add", ["x", "square"], ["o"]),
    ]
    model = make_graph(nodes, X, ["o"], {"w": np.arange(4, dtype=np.float32)})
    graph = import_onnx(model)
    assert write_weights(model, graph) == []
    with torch.no_grad():
        next(graph.parameters()).add_(1.0)
    with pytest.raises(CheckpointError, match="not a tensor of the file but computed from some"):
        write_weights(model, graph)
