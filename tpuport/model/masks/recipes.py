"""How to compute a mask again from short arrays, inside a function that took it as an argument.

A repeated block is traced as a function of its arguments. A mask among them would be an array
there, of the scores' size and without a graph: the short arrays behind it go in, in its stead.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import numpy as np

from tpuport.model.masks.graph import Graph, Node
from tpuport.model.masks.two_valued import split
from tpuport.model.trace import current

_MOST_NODES = 100
# How much shorter than the mask the arrays behind it are to be.
_SHORTER = 8


@dataclass(frozen=True, eq=False)
class Recipe:
    """A mask as a function of short arrays.

    Attributes:
        inputs: The short arrays.
        key: Equal for recipes that compute the same of equal inputs.
        nodes: What to compute, each after its operands; the last one is the mask.
    """

    inputs: list[Any]
    key: tuple[Any, ...]
    nodes: list[Node]

    def made(self, inputs: Sequence[Any]) -> Any:
        """The mask of these inputs."""
        rest, values, trace = iter(inputs), {}, current()
        for node in self.nodes:
            if id(node) in values:
                continue
            if _is_input(node, self.nodes[-1].size):
                values[id(node)] = next(rest)
            elif node.op is None:
                values[id(node)] = node.value
            else:
                operands = [values[id(x)] for x in node.inputs]
                values[id(node)] = node.op.bind(*operands, **node.params)
                if trace is not None and trace.holds_int64(node.value):
                    trace.note_int64(values[id(node)])
        return values[id(self.nodes[-1])]


class Recipes:
    """The recipes of the masks of one trace, each worked out once.

    Args:
        closed: The name of calls (of repeated blocks) whose floating results are activations: what
            is behind them is the model so far.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        # Not the arrays themselves: jax drops equations whose results nobody holds any more.
        self._known: dict[tuple[int, bool], tuple[weakref.ref[Any], Recipe | None]] = {}

    def of(self, value: Any, *, frozen: bool) -> Recipe | None:
        """How a traced mask is computed from short arrays; None if it is not, or is no mask.

        Args:
            value: An array or tracer.
            frozen: No gradient flows into it.
        """
        if not isinstance(value, jax.core.Tracer) or value.ndim < 2:
            return None
        held, recipe = self._known.get((id(value), frozen), (None, None))
        if held is None or held() is not value:
            recipe = _recipe_of(Graph(frozen=frozen, closed=self._closed).of(value), frozen)
            self._known[id(value), frozen] = weakref.ref(value), recipe
        return recipe


def _recipe_of(top: Node, frozen: bool) -> Recipe | None:
    if top.op is None or not (top.is_bool or frozen):
        return None
    nodes: list[Node] = []
    # First, since it is bounded: the graph behind an activation is long.
    if not _collect(top, top.size, nodes, set()):
        return None
    if not (top.is_bool or split(top).conditions):
        return None
    inputs = [node for node in nodes if _is_input(node, top.size)]
    if sum(node.size for node in inputs) * _SHORTER > top.size:
        return None
    numbers = {id(node): i for i, node in enumerate(nodes)}
    key = tuple(_described(node, numbers, top.size) for node in nodes)
    return Recipe([node.value for node in inputs], key, nodes)


def _is_input(node: Node, size: int) -> bool:
    """Whether a node is given: it is traced, and shorter than the mask or not computed."""
    if not isinstance(node.value, jax.core.Tracer):
        return False
    return node.op is None or node.size * _SHORTER <= size


def _collect(node: Node, size: int, nodes: list[Node], seen: set[int]) -> bool:
    """List a node after all that it needs; False if that is too much."""
    if id(node) in seen:
        return True
    seen.add(id(node))
    if len(seen) > _MOST_NODES:
        return False
    if _is_input(node, size):
        if node.size * _SHORTER > size:
            return False
    else:
        if node.op is None and node.value is None:
            return False
        if not all(_collect(x, size, nodes, seen) for x in node.inputs):
            return False
    nodes.append(node)
    return True


def _described(node: Node, numbers: dict[int, int], size: int) -> Any:
    kind = (node.shape, str(node.dtype))
    if _is_input(node, size):
        return ("input", *kind)
    if node.op is None:
        value = np.asarray(node.value)
        # Long ones are held as one array for equal content (`Hoisted`).
        return ("known", *kind, value.tobytes() if value.size <= 1024 else id(node.value))
    return (node.name, *kind, str(node.params), tuple(numbers[id(x)] for x in node.inputs))
