"""Small ONNX graphs, and what onnxruntime makes of them, row by row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from recipes.openpilot.contract import read_contract
from recipes.openpilot.importing import ImportedGraph, import_onnx

TYPES = {
    **{"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64},
    **{"bool": TensorProto.BOOL, "uint8": TensorProto.UINT8, "int32": TensorProto.INT32},
}


def random_rows(path: Path, count: int = 2) -> list[dict[str, np.ndarray]]:
    """Inputs of a driving model, as its contract has them."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        row = {}
        for spec in read_contract(path).inputs:
            value = rng.normal(size=spec.shape)
            if len(spec.shape) > 3:
                value = rng.integers(0, 256, spec.shape)
            row[spec.name] = value.astype(spec.dtype)
        found.append(row)
    return found


def make_graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, np.ndarray],
    outputs: Sequence[str],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """A checked model; the shapes of outputs are those that onnxruntime computes."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, TYPES[v.dtype.name], v.shape) for n, v in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in (constants or {}).items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=min(10, onnx.IR_VERSION)
    )
    found = run_onnx(model, inputs)
    del graph.output[:]
    model.graph.ClearField("output")
    for name, value in zip(outputs, found, strict=True):
        model.graph.output.append(
            helper.make_tensor_value_info(name, TYPES[value.dtype.name], value.shape)
        )
    onnx.checker.check_model(model)
    return model


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    # Fused kernels round otherwise than the operators that the file has.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run_onnx(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(value) for value in session_of(model).run(None, inputs)]


def check_rows(
    model: onnx.ModelProto, rows: Sequence[dict[str, np.ndarray]], tolerance: float = 2e-5
) -> ImportedGraph:
    """Import a model, and compare all rows at once with onnxruntime, one by one."""
    graph = import_onnx(model)
    session = session_of(model)
    expected = [session.run(None, row) for row in rows]
    join: Any = np.concatenate if graph.leads else np.stack
    given = {name: torch.from_numpy(join([row[name] for row in rows])) for name in rows[0]}
    with torch.no_grad():
        found = graph(**given)
    found = found if isinstance(found, dict) else {model.graph.output[0].name: found}
    for number, value in enumerate(model.graph.output):
        wanted = join([one[number] for one in expected])
        mine = found[value.name].numpy()
        assert mine.shape == wanted.shape
        if wanted.dtype.kind == "f":
            scale = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)))
            np.testing.assert_allclose(
                mine.astype(np.float64), wanted, rtol=0, atol=tolerance * scale
            )
        else:
            np.testing.assert_array_equal(mine, wanted)
    return graph
