"""Each operator of an imported graph, on three rows at once, equals onnxruntime on each."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.recipes.openpilot.onnx_graphs import check_rows, make_graph

F32 = "float32"


@dataclass(frozen=True)
class Case:
    """One node: its computed inputs by shape, then its constants, in the order of `order`."""

    op: str
    shapes: tuple[tuple[int, ...], ...] = ((1, 6),)
    constants: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    order: str = ""  # v for a computed input, c for a constant, - for one that is left out
    outputs: int = 1
    dtype: str = F32
    positive: bool = False
    opsets: tuple[int, ...] = (18, 20, 21)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


IMAGE = ((1, 4, 8, 6),)
MATRIX = ((1, 5, 4),)


def unary(*ops: str, **kwargs: Any) -> list[Case]:
    return [Case(op, **kwargs) for op in ops]


ELEMENTWISE = [
    *unary("Abs", "Neg", "Exp", "Floor", "Ceil", "Sign", "Erf", "Sin", "Cos", "Tan", "Atan"),
    *unary("Round", "Identity", "Sigmoid", "Tanh", "Relu", "Softplus", "Softsign", "Mish"),
    *unary("HardSwish", "Elu", "Celu", "LeakyRelu", "HardSigmoid", "ThresholdedRelu", "Selu"),
    *unary("Sqrt", "Log", "Reciprocal", positive=True),
    Case("Elu", attributes={"alpha": 0.7}),
    Case("LeakyRelu", attributes={"alpha": 0.3}),
    Case("HardSigmoid", attributes={"alpha": 0.3, "beta": 0.4}),
    Case("Gelu", opsets=(20, 21)),
    Case("Gelu", attributes={"approximate": "tanh"}, opsets=(20, 21)),
    *(
        Case(op, ((1, 3, 4), (1, 3, 4)), positive=op == "Pow")
        for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean")
    ),
    # Ranks that differ: the batch must not meet the graph's axes.
    *(Case(op, ((3, 3), (3,))) for op in ("Add", "Sub", "Mul", "Div", "Max")),
    *(Case(op, ((3,), (2, 3, 3))) for op in ("Add", "Sub")),
    Case("Add", ((3, 3),), (floats(2, 3, 1),)),
    Case("Mul", ((1, 4, 2, 3),), (floats(4, 1, 1),)),
    Case("Sub", ((1, 4),), (floats(4),), order="cv"),
    Case("Div", ((1, 4),), (np.float32(3.0),)),
    Case("Div", ((1, 4),), (np.float32(3.0),), order="cv", positive=True),
    Case("Pow", ((1, 4),), (np.float32(3.0),)),
    Case("Pow", ((1, 4),), (np.int64(2),)),
    Case("Pow", ((1, 4),), (np.float32(2.0),), order="cv"),
    Case("Div", ((1, 4), (1, 4)), dtype="int64", positive=True),
    Case("Div", ((1, 4),), (ints(3),), dtype="int64"),
    Case("Add", ((1, 4),), (np.ones((1, 1), np.float32),)),
    Case("Mul", ((4,),), (np.full((1, 1, 1), 2.0, np.float32),)),
    Case("PRelu", ((1, 4, 2, 2),), (floats(4, 1, 1),)),
    *(
        Case(op, ((1, 4), (1, 4)))
        for op in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal")
    ),
    Case("Greater", ((2, 4),), (np.float32(0.1),)),
    Case("Equal", ((1, 4),), (ints(1),), dtype="int64"),
    *(Case(op, ((1, 4), (3, 4)), dtype="bool") for op in ("And", "Or", "Xor")),
    Case("Not", dtype="bool"),
    Case("IsNaN"),
    Case("Clip", ((1, 9),), (np.float32(-0.3), np.float32(0.2))),
    Case("Clip", ((1, 9),), (np.float32(0.2),), order="v-c"),
    Case("Clip", ((1, 9),), attributes={"min": -0.3, "max": 0.2}, opsets=(9,)),
    Case("Clip", ((1, 9),), (np.float32(0.5), np.float32(-0.5))),
    Case("Dropout", opsets=(13, 18, 20)),
    Case("Cast", attributes={"to": 7}),
    Case("Cast", attributes={"to": 1}, dtype="uint8"),
    Case("Cast", attributes={"to": 9}),
]

REDUCING = [
    *(
        Case(f"Reduce{how}", MATRIX, (ints(-1),), {"keepdims": keep}, positive="Log" in how)
        for how in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "SumSquare")
        for keep in (0, 1)
    ),
    Case("ReduceLogSumExp", MATRIX, (ints(1, 2),)),
    Case("ReduceProd", ((2, 3, 4),), (ints(0, 2),), {"keepdims": 0}),
    Case("ReduceMean", MATRIX),
    Case("ReduceMean", MATRIX, attributes={"noop_with_empty_axes": 1}),
    Case("ReduceSum", ((3, 4),), (ints(0),), {"keepdims": 0}),  # the graph's first axis
    Case("ReduceSum", MATRIX, (ints(1),), dtype="int64"),
    Case("ReduceMax", ((25, 4, 1, 8),), (ints(1),), {"keepdims": 0}),
    Case("ReduceMean", MATRIX, attributes={"axes": [-1]}, opsets=(13, 17)),
    Case("ReduceSum", MATRIX, attributes={"axes": [1], "keepdims": 0}, opsets=(11,)),
    Case("ArgMax", MATRIX, attributes={"axis": 1, "keepdims": 0}),
    Case("ArgMin", MATRIX, attributes={"axis": -1}),
    Case("CumSum", MATRIX, (np.int64(1),)),
    Case("Softmax", MATRIX),
    Case("Softmax", MATRIX, attributes={"axis": 1}),
    Case("LogSoftmax", MATRIX, attributes={"axis": -1}),
    Case("Softmax", ((2, 3, 4),), attributes={"axis": 1}, opsets=(11, 12)),
    Case("TopK", MATRIX, (ints(2),), {"axis": -1}, outputs=2),
    Case("TopK", MATRIX, (ints(3),), {"axis": 1, "largest": 0}, outputs=2),
    Case("GlobalAveragePool", IMAGE),
    Case("GlobalMaxPool", IMAGE),
]

SHAPING = [
    Case("Reshape", ((1, 4, 6),), (ints(1, 2, -1),)),
    Case("Reshape", ((1, 4, 6),), (ints(0, 2, 2, 6),)),
    Case("Reshape", ((1, 4, 6),), (ints(4, 6),)),
    Case("Reshape", ((1, 0, 6),), (ints(0, 6),), {"allowzero": 1}),
    Case("Reshape", ((2, 3),), (ints(1, 6),), {"allowzero": 1}),
    Case("Flatten", ((2, 3, 4),), attributes={"axis": 0}),
    Case("Flatten", ((1, 3, 4),), attributes={"axis": -1}),
    Case("Squeeze", ((1, 3, 1),), (ints(-1),)),
    Case("Squeeze", ((1, 3, 1),)),
    Case("Squeeze", ((1, 3, 1),), attributes={"axes": [2]}, opsets=(11,)),
    Case("Unsqueeze", ((1, 3),), (ints(0, -1),)),
    Case("Unsqueeze", ((1, 3),), attributes={"axes": [1]}, opsets=(11,)),
    Case("Transpose", ((2, 3, 4),), attributes={"perm": [2, 0, 1]}),
    Case("Transpose", ((2, 3, 4),)),
    Case("Expand", ((3, 1),), (ints(2, 1, 4),)),
    Case("Tile", ((1, 3),), (ints(2, 2),)),
    Case("Slice", ((5, 6),), (ints(1), ints(4))),
    Case("Slice", ((5, 6),), (ints(-3, 0), ints(2**62, 5), ints(1, 0), ints(1, 2))),
    Case("Slice", ((5, 6),), (ints(-1), ints(-(2**62)), ints(1), ints(-2))),
    Case("Slice", ((5, 6),), (ints(4), ints(1), ints(0), ints(-1))),
    Case("Slice", ((5, 6),), (ints(4), ints(2), ints(1))),
    Case("Slice", ((5, 6),), attributes={"starts": [1], "ends": [3], "axes": [1]}, opsets=(9,)),
    Case("Split", ((1, 6),), (ints(1, 2, 3),), {"axis": 1}, outputs=3),
    Case("Split", ((1, 7),), attributes={"axis": -1, "num_outputs": 3}, outputs=3),
    Case("Split", ((6, 2),), attributes={"split": [2, 4]}, outputs=2, opsets=(11,)),
    Case("Concat", ((1, 2), (1, 3)), attributes={"axis": 1}),
    Case("Concat", ((2, 3), (4, 3)), attributes={"axis": 0}),
    Case("Concat", ((1, 2),), (floats(1, 3),), {"axis": -1}),
    Case("Concat", ((2, 2),), (floats(1, 2),), {"axis": 0}, order="cv"),
    Case("Gather", MATRIX, (np.int64(-1),), {"axis": 1}),
    Case("Gather", MATRIX, (np.array([[0, 2], [-1, 1]], np.int64),), {"axis": 1}),
    Case("Gather", ((5, 4),), (ints(3, 0),)),
    Case("Pad", ((1, 2, 3),), (ints(0, 1, 2, 0, 0, 1),)),
    Case("Pad", ((1, 2, 3),), (ints(0, 1, 0, 0, 0, -1), np.float32(2.5))),
    Case("Pad", ((1, 2, 3),), (ints(1, 1), np.float32(0.0), ints(-1)), opsets=(18, 20)),
    Case("Pad", ((1, 4, 3),), (ints(0, 2, 0, 0, 1, 2),), {"mode": "reflect"}),
    Case("Pad", ((1, 4, 3),), (ints(0, 2, 1, 0, 1, 2),), {"mode": "edge"}),
    Case("Pad", ((1, 4, 3),), (ints(0, 2, 1, 0, 1, 2),), {"mode": "wrap"}, opsets=(20,)),
    Case("Pad", ((1, 3),), attributes={"pads": [0, 1, 0, 2], "value": 1.5}, opsets=(9,)),
    Case("SpaceToDepth", IMAGE, attributes={"blocksize": 2}),
    Case("DepthToSpace", IMAGE, attributes={"blocksize": 2}),
    Case("DepthToSpace", IMAGE, attributes={"blocksize": 2, "mode": "CRD"}),
    Case("Trilu", ((1, 4, 4),), (np.int64(1),), {"upper": 0}),
    Case("Trilu", ((1, 4, 4),)),
]

WEIGHTS = [
    Case("Gemm", ((1, 4),), (floats(3, 4), floats(3)), {"transB": 1}),
    Case("Gemm", ((5, 4),), (floats(4, 3), floats(1, 3))),
    Case("Gemm", ((5, 4),), (floats(4, 3),)),
    Case("Gemm", ((5, 4),), (floats(4, 3), floats(5, 3)), {"alpha": 0.5, "beta": 2.0}),
    Case("Gemm", ((4, 5),), (floats(4, 3), floats(5, 1)), {"transA": 1}),
    Case("Gemm", ((4, 5), (5, 3)), (floats(3),)),
    Case("Gemm", ((4, 5), (5, 3), (3,))),
    Case("MatMul", ((1, 5, 4),), (floats(4, 3),)),
    Case("MatMul", ((4,),), (floats(4, 3),)),
    Case("MatMul", ((3, 4),), (floats(2, 5, 3),), order="cv"),
    Case("MatMul", ((1, 2, 5, 4), (1, 2, 4, 3))),
    Case("MatMul", ((5, 4), (2, 4, 3))),
    Case("MatMul", ((2, 5, 4), (4,))),
    Case("MatMul", ((4,), (2, 4, 3))),
    Case("MatMul", ((4,), (4,))),
    Case("Einsum", ((2, 3), (3, 4)), attributes={"equation": "ij, jk -> ik"}),
    Case("Einsum", ((1, 3),), (floats(3, 4),), {"equation": "ij,jk->ki"}),
    Case("Conv", IMAGE, (floats(3, 4, 3, 3), floats(3)), {"pads": [1, 1, 1, 1]}),
    Case("Conv", IMAGE, (floats(4, 1, 3, 3),), {"group": 4, "strides": [2, 2]}),
    Case("Conv", IMAGE, (floats(6, 2, 2, 3),), {"group": 2, "pads": [0, 2, 1, 0]}),
    Case("Conv", IMAGE, (floats(2, 4, 3, 3),), {"strides": [2, 1], "auto_pad": "SAME_UPPER"}),
    Case("Conv", IMAGE, (floats(2, 4, 2, 2),), {"strides": [2, 1], "auto_pad": "SAME_LOWER"}),
    Case("Conv", ((2, 3, 7),), (floats(2, 3, 3),)),  # more than one row in the graph itself
    Case("Conv", ((1, 2, 3, 4, 5),), (floats(2, 2, 2, 2, 2),)),
    Case("ConvTranspose", IMAGE, (floats(4, 3, 2, 2), floats(3)), {"strides": [2, 2]}),
    Case(
        "ConvTranspose",
        IMAGE,
        (floats(4, 1, 3, 3),),
        {"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 2], "output_padding": [1, 0]},
    ),
    Case("LayerNormalization", MATRIX, (floats(4), floats(4))),
    Case("LayerNormalization", MATRIX, (floats(5, 4),), {"axis": 1, "epsilon": 0.1}),
    Case(
        "BatchNormalization",
        IMAGE,
        (floats(4), floats(4), floats(4), np.abs(floats(4)) + 0.1),
        {"epsilon": 0.01},
    ),
    Case("InstanceNormalization", ((2, 4, 5),), (floats(4), floats(4))),
    Case("GroupNormalization", IMAGE, (floats(4), floats(4)), {"num_groups": 2}, opsets=(21,)),
    Case("LpNormalization", MATRIX, attributes={"axis": 1, "p": 1}),
    Case("MaxPool", IMAGE, attributes={"kernel_shape": [2, 3], "pads": [1, 1, 0, 1]}),
    Case("MaxPool", IMAGE, attributes={"kernel_shape": [3, 3], "strides": [2, 2]}),
    Case("AveragePool", IMAGE, attributes={"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("AveragePool", IMAGE, attributes={"kernel_shape": [3, 3], "pads": [1, 1, 0, 1]}),
    Case(
        "AveragePool",
        IMAGE,
        attributes={"kernel_shape": [3, 3], "pads": [1, 1, 0, 1], "count_include_pad": 1},
    ),
    *(
        Case(
            "Resize",
            IMAGE,
            (np.array([1, 1, 2, 0.5], np.float32),),
            {"mode": mode, "coordinate_transformation_mode": where, "nearest_mode": rounding},
            order="v-c",
        )
        for mode, rounding in (("linear", "floor"), ("nearest", "floor"), ("nearest", "ceil"))
        for where in ("half_pixel", "asymmetric", "align_corners")
    ),
    Case("Resize", IMAGE, (ints(1, 4, 5, 9),), {"mode": "linear"}, order="v--c"),
    *(
        Case(
            op,
            ((5, 1, 3),),
            (floats(d, g * 4, 3), floats(d, g * 4, 4), floats(d, 2 * g * 4)),
            {"hidden_size": 4, "direction": direction, **more},
            outputs=outputs,
        )
        for op, g, outputs in (("GRU", 3, 2), ("LSTM", 4, 3))
        for direction, d in (("forward", 1), ("reverse", 1), ("bidirectional", 2))
        for more in ([{}, {"linear_before_reset": 1}] if op == "GRU" else [{}])
    ),
    Case(
        "GRU",
        ((5, 1, 3), (1, 1, 4)),
        (floats(1, 12, 3), floats(1, 12, 4)),
        {"hidden_size": 4},
        order="vcc--v",
        outputs=2,
    ),
]

CASES = [*ELEMENTWISE, *REDUCING, *SHAPING, *WEIGHTS]


def label(case: Case) -> str:
    shapes = "+".join("x".join(map(str, shape)) for shape in case.shapes)
    return f"{case.op}-{shapes}-{'-'.join(map(str, case.attributes.values()))}"


def values(case: Case, shape: tuple[int, ...], seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=shape) * 1.5
    drawn = np.abs(drawn) + 0.2 if case.positive else drawn
    if case.dtype == "bool":
        return drawn > 0
    if case.dtype != F32:
        return (np.abs(drawn) * 3 + 1).astype(case.dtype)
    return drawn.astype(np.float32)


@pytest.mark.parametrize(
    ("case", "opset"),
    [(case, o) for case in CASES for o in case.opsets],
    ids=[f"{label(case)}-{o}" for case in CASES for o in case.opsets],
)
def test_an_operator(case: Case, opset: int):
    order = case.order or "v" * len(case.shapes) + "c" * len(case.constants)
    variables = [f"v{i}" for i in range(len(case.shapes))]
    constants = {f"c{i}": np.asarray(value) for i, value in enumerate(case.constants)}
    queues = {"v": iter(variables), "c": iter(constants), "-": iter([""] * 9)}
    node = helper.make_node(
        case.op,
        [next(queues[kind]) for kind in order],
        [f"o{i}" for i in range(case.outputs)],
        name="it",
        **case.attributes,
    )
    rows = [
        {
            name: values(case, shape, 10 * row + i)
            for i, (name, shape) in enumerate(zip(variables, case.shapes, strict=True))
        }
        for row in range(3)
    ]
    model = make_graph([node], rows[0], [f"o{i}" for i in range(case.outputs)], constants, opset)
    check_rows(model, rows)
