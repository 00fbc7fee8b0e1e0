"""One node of an ONNX graph while it becomes a step in torch, and the table of operators.

Every tensor that a step computes has a batch axis in front of the axes that it has in the graph:
where the graph says (1, 12, 128, 256), the step computes (n, 1, 12, 128, 256). So no axis of the
graph has to be guessed to be the batch, and a row never meets another one. Axes in steps are
counted from the end, where they are those of the graph; a rank is that in the graph.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tpuport.errors import CheckpointError

# All that a step may be: a function of tensors to one or several.
Call = Callable[..., Any]

# ONNX's element types as what steps compute in: halves are computed in float32.
DTYPES = {
    **{1: torch.float32, 10: torch.float32, 11: torch.float32, 16: torch.float32},
    **{2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64},
    **{9: torch.bool},
}


@dataclass(frozen=True)
class Origin:
    """Where in the file a constant comes from, and what was done to it since.

    Attributes:
        name: of the initialiser, or of the output of a Constant node.
        shape: there.
        changes: what was done: a permutation, or a new shape.
    """

    name: str
    shape: tuple[int, ...]
    changes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def permuted(self, axes: Sequence[int]) -> "Origin":
        """The origin of the transposed constant."""
        change = ("transpose", tuple(axes))
        return Origin(self.name, self.shape, (*self.changes, change))

    def reshaped(self, shape: Sequence[int]) -> "Origin":
        """The origin of the constant in another shape."""
        return Origin(self.name, self.shape, (*self.changes, ("reshape", tuple(shape))))

    def undo(self, array: np.ndarray) -> np.ndarray:
        """A value of the constant as the file has it."""
        shapes, shape = [], self.shape
        for kind, value in self.changes:
            shapes.append(shape)
            shape = tuple(shape[a] for a in value) if kind == "transpose" else value
        for (kind, value), before in zip(reversed(self.changes), reversed(shapes), strict=True):
            array = array.transpose(np.argsort(value)) if kind == "transpose" else array
            array = array.reshape(before)
        return array


@dataclass(frozen=True)
class Constant:
    """A value that is known when the graph is imported.

    Attributes:
        array: in the dtype of the file.
        origin: where it is in the file, if it is nothing but that.
    """

    array: np.ndarray
    origin: Origin | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape


@dataclass(frozen=True)
class Variable:
    """A value that a step computes, or an input.

    Attributes:
        name: in the graph.
        shape: in the graph, so without the batch axis.
        dtype: that it is computed in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Value = Constant | Variable


@dataclass(frozen=True)
class Weight:
    """A float constant as a parameter: the name that the module has it under."""

    name: str


# What a step takes: a name of a value, a parameter, a tensor of integers, or a number.
Operand = str | Weight | torch.Tensor | float | int | bool


@dataclass
class Node:
    """One node, and what its builder may ask.

    Attributes:
        op: the operator.
        name: unique; a module that it becomes has this name.
        attributes: of ONNX, as Python has them.
        inputs: None for one that is left out.
        num_outputs: how many it has.
        opset: of the graph.
        register: makes a parameter of a constant of floats, and a tensor of one of integers.
    """

    op: str
    name: str
    attributes: dict[str, Any]
    inputs: list[Value | None]
    num_outputs: int
    opset: int
    register: Callable[[Constant], Weight | torch.Tensor]

    def refuse(self, reason: str) -> CheckpointError:
        """The error of a node that cannot be imported."""
        return CheckpointError(
            f"node {self.name!r} ({self.op}, opset {self.opset}): {reason}. What to do: export the"
            " model without it, or add it to recipes/openpilot/importing"
        )

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return self.attributes.get(name, default)

    def input(self, index: int) -> Value | None:
        """An input, or None if it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def value(self, index: int) -> Value:
        """An input that has to be there."""
        value = self.input(index)
        if value is None:
            raise self.refuse(f"input {index} is missing")
        return value

    def variable(self, index: int) -> Variable:
        """An input that has to be computed."""
        value = self.value(index)
        if isinstance(value, Constant):
            raise self.refuse(f"input {index} is a constant, and the others are not")
        return value

    def constant(self, index: int) -> np.ndarray:
        """An input that has to be known."""
        value = self.value(index)
        if isinstance(value, Variable):
            raise self.refuse(
                f"input {index} ({value.name!r}) depends on the inputs of the model, and has to be"
                " known when it is imported"
            )
        return value.array

    def ints(self, index: int, attribute: str | None = None) -> tuple[int, ...] | None:
        """Known integers, from an attribute (as older opsets have them) or an input."""
        if attribute is not None and attribute in self.attributes:
            found = self.attributes[attribute]
            return (found,) if isinstance(found, int) else tuple(found)
        if self.input(index) is None:
            return None
        return tuple(int(v) for v in np.atleast_1d(self.constant(index)))

    def axis(self, axis: int, rank: int) -> int:
        """An axis of the graph, counted from the end."""
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} of {rank}")
        return axis - rank if axis >= 0 else axis

    def operand(self, index: int) -> Operand:
        """What a step takes for an input: a value, a parameter, or a number for one number."""
        value = self.value(index)
        if isinstance(value, Variable):
            return value.name
        if value.array.size == 1:
            return value.array.reshape(()).item()
        return self.register(value)

    def operands(self) -> list[Operand]:
        """What a step takes, for all inputs that are there."""
        return [self.operand(i) for i in range(len(self.inputs)) if self.inputs[i] is not None]


@dataclass
class Built:
    """What a builder makes of a node.

    Attributes:
        call: of the operands.
        operands: what it takes.
        module: a module instead of a call, registered under the node's name; `call` then takes
            it first.
        origins: where the module's parameters are in the file.
    """

    call: Call
    operands: Sequence[Operand]
    module: nn.Module | None = None
    origins: dict[str, Origin | None] | None = None


Builder = Callable[[Node], Built]
BUILDERS: dict[str, Builder] = {}


def builds(*ops: str) -> Callable[[Builder], Builder]:
    """Enter a builder for these operators in the table."""

    def enter(builder: Builder) -> Builder:
        for op in ops:
            assert op not in BUILDERS, op
            BUILDERS[op] = builder
        return builder

    return enter


def lifted(x: Any, by: int) -> Any:
    """A batched tensor with more axes of size 1 before those of the graph, as broadcasting adds."""
    if not by:
        return x
    return x.reshape(x.shape[0], *(1,) * by, *x.shape[1:])


def lifts(values: Sequence[Value]) -> tuple[int, ...]:
    """By how many axes each value has to be lifted to broadcast as in the graph.

    A constant has no batch axis, and broadcasts from the right as it is.
    """
    rank = max(len(value.shape) for value in values)
    return tuple(rank - len(v.shape) if isinstance(v, Variable) else 0 for v in values)


def size(shape: Sequence[int]) -> int:
    """How many elements a shape has."""
    return math.prod(shape)
