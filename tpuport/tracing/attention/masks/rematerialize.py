"""Recomputation of a mask from short arrays, inside a function that took it as an argument.

A repeated block is traced as a function of its arguments. A mask among them would be an array of
the scores' size without a graph, so the short arrays behind it are passed instead.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import numpy as np

from tpuport.tracing.attention.masks.graph import Graph, Node
from tpuport.tracing.attention.masks.two_valued import split
from tpuport.tracing.core.context import current

_MOST_NODES = 100
# How many times shorter than the mask the arrays behind it have to be.
_SHORTER = 8


@dataclass(frozen=True, eq=False)
class Recipe:
    """A mask as a function of short arrays.

    Attributes:
        inputs: The short arrays.
        key: Equal for recipes that compute the same from equal inputs.
        nodes: The nodes to compute, each after its operands; the last one is the mask.
        given: The ids of the nodes that are inputs.
    """

    inputs: list[Any]
    key: tuple[Any, ...]
    nodes: list[Node]
    given: frozenset[int]

    def made(self, inputs: Sequence[Any]) -> Any:
        """Compute the mask from these inputs."""
        rest, values, trace = iter(inputs), {}, current()
        for node in self.nodes:
            if id(node) in values:
                continue
            if id(node) in self.given:
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
    """The recipes of the masks of one trace, each made once.

    Args:
        closed: The name of calls (of repeated blocks) whose floating results are activations: the
            graph behind these is the model, not a mask.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        # Weak references, because jax drops equations whose results nobody refers to any more.
        self._known: dict[tuple[int, bool], tuple[weakref.ref[Any], Recipe | None]] = {}

    def of(self, value: Any, *, frozen: bool) -> Recipe | None:
        """Return how a traced mask is computed from short arrays, or None if it is not, or is no
        mask.

        Args:
            value: An array or tracer.
            frozen: Whether no gradient flows into it.
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
    found = _Collected(top.shape)
    # This comes first because it is bounded: the graph behind an activation is long.
    if not found.collect(top):
        return None
    if not (top.is_bool or split(top).conditions):
        return None
    given = frozenset(found.given)
    inputs = [node for node in found.nodes if id(node) in given]
    # Numbers that are made of booleans are no longer known to be a mask if they are an argument.
    long = [node for node in inputs if top.is_bool or not node.is_bool]
    if sum(node.size for node in long) * _SHORTER > top.size:
        return None
    numbers = {id(node): i for i, node in enumerate(found.nodes)}
    key = tuple(_described(node, numbers, given) for node in found.nodes)
    return Recipe([node.value for node in inputs], key, found.nodes, given)


class _Collected:
    """The nodes that a mask is computed from, each after its operands.

    Attributes:
        nodes: All nodes.
        given: The ids of the nodes that are inputs: traced, and shorter than the mask.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.nodes: list[Node] = []
        self.given: set[int] = set()
        self._seen: set[int] = set()
        self._matrix, self._size = shape[-2:], math.prod(shape)

    def collect(self, node: Node) -> bool:
        """Add a node and its operands; return False if they are too many."""
        if id(node) in self._seen:
            return True
        self._seen.add(id(node))
        if len(self._seen) > _MOST_NODES:
            return False
        is_traced = isinstance(node.value, jax.core.Tracer)
        is_short = is_traced and node.size * _SHORTER <= self._size
        # A matrix of queries and keys that all examples share is shorter too, but reading its graph
        # is better.
        if is_short and (node.op is None or node.shape[-2:] != self._matrix):
            return self._listed(node, given=True)
        if node.op is None:
            if is_traced:
                return node.is_bool and node.size <= self._size and self._listed(node, given=True)
            return node.value is not None and self._listed(node)
        if not is_short:
            return all(map(self.collect, node.inputs)) and self._listed(node)
        before = len(self.nodes), set(self.given), set(self._seen)
        if all(map(self.collect, node.inputs)):
            return self._listed(node)
        del self.nodes[before[0] :]
        self.given, self._seen = before[1:]
        return self._listed(node, given=True)

    def _listed(self, node: Node, *, given: bool = False) -> bool:
        self.nodes.append(node)
        if given:
            self.given.add(id(node))
        return True


def _described(node: Node, numbers: dict[int, int], given: frozenset[int]) -> Any:
    kind = (node.shape, str(node.dtype))
    if id(node) in given:
        return ("input", *kind)
    if node.op is None:
        value = np.asarray(node.value)
        # Large ones are one array for equal content (`Hoisted`), so the id is enough.
        return ("known", *kind, value.tobytes() if value.size <= 1024 else id(node.value))
    return (node.name, *kind, str(node.params), tuple(numbers[id(x)] for x in node.inputs))
