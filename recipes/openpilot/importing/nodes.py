"""The nodes of an ONNX graph as they become steps in torch, and the table of operators.

Every tensor that a step computes has a batch axis before its axes in the graph: where the graph
says (1, 12, 128, 256), the step computes (n, 1, 12, 128, 256). So no axis of the graph has to be
guessed to be the batch, and rows never mix. Axes in steps are counted from the end, where they are
those of the graph. A rank is that in the graph.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tpuport.foundation.errors import CheckpointError

# A step is a function of tensors with one or several results.
Call = Callable[..., Any]

# The dtypes that steps compute in, by ONNX's element types. Halves are computed in float32.
DTYPES = {
    **{1: torch.float32, 10: torch.float32, 11: torch.float32, 16: torch.float32},
    **{2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64},
    **{9: torch.bool},
}


@dataclass(frozen=True)
class Origin:
    """The origin of a constant in the file, and the changes made to it since.

    Attributes:
        name: Name of the initialiser, or of the output of a Constant node.
        shape: Shape in the file.
        changes: Changes in order: permutations and new shapes.
    """

    name: str
    shape: tuple[int, ...]
    changes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def permuted(self, axes: Sequence[int]) -> "Origin":
        """Return the origin of the transposed constant."""
        change = ("transpose", tuple(axes))
        return Origin(self.name, self.shape, (*self.changes, change))

    def reshaped(self, shape: Sequence[int]) -> "Origin":
        """Return the origin of the constant in another shape."""
        return Origin(self.name, self.shape, (*self.changes, ("reshape", tuple(shape))))

    def undo(self, array: np.ndarray) -> np.ndarray:
        """Return a value of the constant in the layout of the file."""
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
        array: Value in the dtype of the file.
        origin: Origin in the file, if nothing was computed from it.
    """

    array: np.ndarray
    origin: Origin | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array."""
        return self.array.shape


@dataclass(frozen=True)
class Variable:
    """A value that a step computes, or an input.

    Attributes:
        name: Name in the graph.
        shape: Shape in the graph, without the batch axis.
        dtype: Dtype that it is computed in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Value = Constant | Variable


@dataclass(frozen=True)
class Weight:
    """A float constant as a parameter, by its name in the module."""

    name: str


# An argument of a step: the name of a value, a parameter, a tensor of integers, or a number.
Operand = str | Weight | torch.Tensor | float | int | bool


@dataclass
class Node:
    """One node, with helpers for its builder.

    Attributes:
        op: Operator of the node.
        name: Unique name, also of the module that it becomes.
        attributes: Attributes of ONNX, as Python values.
        inputs: Inputs of the node; None for one that is left out.
        num_outputs: Number of outputs.
        opset: Opset of the graph.
        register: Makes a parameter of a float constant, and a tensor of an integer constant.
    """

    op: str
    name: str
    attributes: dict[str, Any]
    inputs: list[Value | None]
    num_outputs: int
    opset: int
    register: Callable[[Constant], Weight | torch.Tensor]

    def refuse(self, reason: str) -> CheckpointError:
        """Return the error for a node that cannot be imported."""
        return CheckpointError(
            f"node {self.name!r} ({self.op}, opset {self.opset}): {reason}. What to do: export the"
            " model without it, or add it to recipes/openpilot/importing"
        )

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default."""
        return self.attributes.get(name, default)

    def input(self, index: int) -> Value | None:
        """Return an input, or None if it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def value(self, index: int) -> Value:
        """Return an input that must be present."""
        value = self.input(index)
        if value is None:
            raise self.refuse(f"input {index} is missing")
        return value

    def variable(self, index: int) -> Variable:
        """Return an input that must be a variable."""
        value = self.value(index)
        if isinstance(value, Constant):
            raise self.refuse(f"input {index} is a constant, and the others are not")
        return value

    def constant(self, index: int) -> np.ndarray:
        """Return the array of an input that must be a constant."""
        value = self.value(index)
        if isinstance(value, Variable):
            raise self.refuse(
                f"input {index} ({value.name!r}) depends on the inputs of the model, and has to be"
                " known when it is imported"
            )
        return value.array

    def ints(self, index: int, attribute: str | None = None) -> tuple[int, ...] | None:
        """Return constant integers from an attribute (as in older opsets) or an input."""
        if attribute is not None and attribute in self.attributes:
            found = self.attributes[attribute]
            return (found,) if isinstance(found, int) else tuple(found)
        if self.input(index) is None:
            return None
        return tuple(int(v) for v in np.atleast_1d(self.constant(index)))

    def axis(self, axis: int, rank: int) -> int:
        """Return an axis of the graph, counted from the end."""
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} of {rank}")
        return axis - rank if axis >= 0 else axis

    def operand(self, index: int) -> Operand:
        """Return the operand for an input: a value, a parameter, or a number if it is one."""
        value = self.value(index)
        if isinstance(value, Variable):
            return value.name
        if value.array.size == 1:
            return value.array.reshape(()).item()
        return self.register(value)

    def operands(self) -> list[Operand]:
        """Return the operands for all inputs that are present."""
        return [self.operand(i) for i in range(len(self.inputs)) if self.inputs[i] is not None]


@dataclass
class Built:
    """The step that a builder makes of a node.

    Attributes:
        call: Function of the operands.
        operands: Arguments of the call.
        module: Module of the step, registered under the node's name. `call` takes it as its first
            argument.
        origins: Origins of the module's parameters in the file.
    """

    call: Call
    operands: Sequence[Operand]
    module: nn.Module | None = None
    origins: dict[str, Origin | None] | None = None


Builder = Callable[[Node], Built]
BUILDERS: dict[str, Builder] = {}


def builds(*ops: str) -> Callable[[Builder], Builder]:
    """Return a decorator that enters a builder for these operators in the table."""

    def enter(builder: Builder) -> Builder:
        for op in ops:
            assert op not in BUILDERS, op
            BUILDERS[op] = builder
        return builder

    return enter


def lifted(x: Any, by: int) -> Any:
    """Insert axes of size 1 after the batch axis, as broadcasting in the graph would."""
    if not by:
        return x
    return x.reshape(x.shape[0], *(1,) * by, *x.shape[1:])


def lifts(values: Sequence[Value]) -> tuple[int, ...]:
    """Return how many axes each value must be lifted by to broadcast as in the graph.

    A constant has no batch axis, and broadcasts from the right without lifting.
    """
    rank = max(len(value.shape) for value in values)
    return tuple(rank - len(v.shape) if isinstance(v, Variable) else 0 for v in values)


def size(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)
