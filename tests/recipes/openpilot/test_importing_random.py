"""Random chains of operators: all rows at once equal onnxruntime on each."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.recipes.openpilot.onnx_graphs import check_rows, make_graph

UNARY = ("Relu", "Gelu", "Tanh", "Sigmoid", "Erf", "Elu", "Neg", "Softplus")
REDUCTIONS = ("ReduceMean", "ReduceMax", "ReduceL2", "ReduceSum")


@dataclass
class Chain:
    """A graph that grows by one node at a time; `shapes` are of all values so far."""

    draw: st.DrawFn
    name: str
    shapes: dict[str, tuple[int, ...]]
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[self.name]

    def constant(self, value: Any) -> str:
        key = f"c{len(self.constants)}"
        self.constants[key] = np.asarray(value)
        return key

    def weight(self, *size: int) -> str:
        rng = np.random.default_rng(self.draw(st.integers(0, 9)))
        return self.constant(rng.normal(size=size).astype(np.float32))

    def put(self, op: str, shape: tuple[int, ...], *more: str, **attributes: Any) -> None:
        out = f"t{len(self.nodes)}"
        inputs = [self.name, *more]
        self.nodes.append(helper.make_node(op, inputs, [out], name=f"n/{out}", **attributes))
        self.name, self.shapes[out] = out, shape

    def axis(self) -> int:
        return self.draw(st.integers(0, len(self.shape) - 1))

    def with_size(self, axis: int, size: int) -> tuple[int, ...]:
        return tuple(size if a == axis else s for a, s in enumerate(self.shape))

    def unary(self) -> None:
        self.put(self.draw(st.sampled_from(UNARY)), self.shape)

    def matmul(self) -> None:
        width = self.draw(st.integers(1, 4))
        self.put("MatMul", (*self.shape[:-1], width), self.weight(self.shape[-1], width))

    def transpose(self) -> None:
        perm = self.draw(st.permutations(range(len(self.shape))))
        self.put("Transpose", tuple(self.shape[a] for a in perm), perm=perm)

    def reshape(self) -> None:
        rest = self.draw(st.sampled_from([(-1,), (1, -1), (-1, 1), (-1, self.shape[-1])]))
        known = -int(np.prod(rest))
        shape = tuple(int(np.prod(self.shape)) // known if s == -1 else s for s in rest)
        self.put("Reshape", shape, self.constant(np.array(rest, np.int64)))

    def reduce(self) -> None:
        axis = self.axis()
        axes = self.constant(np.array([axis], np.int64))
        self.put(self.draw(st.sampled_from(REDUCTIONS)), self.with_size(axis, 1), axes)

    def slice(self) -> None:
        axis = self.axis()
        size = self.shape[axis]
        start = self.draw(st.integers(0, size - 1))
        ends = [self.constant(np.array([v], np.int64)) for v in (start, size, axis)]
        self.put("Slice", self.with_size(axis, size - start), *ends)

    def concat(self) -> None:
        axis = self.axis()
        size = self.shape[axis]
        if self.draw(st.booleans()):
            more = self.weight(*self.with_size(axis, 2))
            self.put("Concat", self.with_size(axis, size + 2), more, axis=axis)
        else:
            self.put("Concat", self.with_size(axis, 2 * size), self.name, axis=axis)

    def softmax(self) -> None:
        self.put("Softmax", self.shape, axis=self.axis())

    def norm(self) -> None:
        width = self.shape[-1]
        self.put("LayerNormalization", self.shape, self.weight(width), self.weight(width))

    def unsqueeze(self) -> None:
        axis = self.axis()
        shape = (*self.shape[:axis], 1, *self.shape[axis:])
        self.put("Unsqueeze", shape, self.constant(np.array([axis], np.int64)))

    def broadcast(self) -> None:
        op = self.draw(st.sampled_from(["Add", "Mul", "Sub"]))
        fits = [name for name, shape in self.shapes.items() if broadcasts(shape, self.shape)]
        other = self.draw(st.sampled_from([*fits, None]))
        if other is None:
            start = self.draw(st.integers(0, len(self.shape)))
            self.put(op, self.shape, self.weight(*self.shape[start:]))
        else:
            self.put(op, np.broadcast_shapes(self.shape, self.shapes[other]), other)


KINDS = (
    *(Chain.unary, Chain.matmul, Chain.transpose, Chain.reshape, Chain.reduce, Chain.slice),
    *(Chain.concat, Chain.softmax, Chain.norm, Chain.unsqueeze, Chain.broadcast, Chain.broadcast),
)


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Up to seven nodes over (lead, rows, columns); the lead is not always 1."""
    shape = (draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    chain = Chain(draw, "x", {"x": shape})
    for _ in range(draw(st.integers(1, 7))):
        if len(chain.shape) < 5 and np.prod(chain.shape) < 300:
            draw(st.sampled_from(KINDS))(chain)
    return chain


@settings(max_examples=150)
@given(chains(), st.sampled_from([20, 21]))
def test_random_graphs(chain: Chain, opset: int):
    rng = np.random.default_rng(1)
    rows = [{"x": rng.normal(size=chain.shapes["x"]).astype(np.float32)} for _ in range(3)]
    model = make_graph(chain.nodes, rows[0], [chain.name], chain.constants, opset)
    check_rows(model, rows, tolerance=1e-4)
