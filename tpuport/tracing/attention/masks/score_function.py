"""The effect of a FlexAttention function on a score, read from its graph."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuport.tracing.attention.masks.graph import Node
from tpuport.tracing.attention.masks.two_valued import sides
from tpuport.tracing.attention.masks.views import base, broadcast, sunk, uniform

_MOST_NODES = 2000


@dataclass
class Changed:
    """The effect on scores: a cap, then a bias, then hiding where a condition fails.

    Attributes:
        conditions: Boolean nodes.
        bias: The number that is added, or None.
        softcap: The cap for which scores s become softcap * tanh(s / softcap), or None.
    """

    conditions: list[Node] = field(default_factory=list)
    bias: Node | None = None
    softcap: float | None = None


def changed(node: Node, score: Node) -> Changed | None:
    """Return the effect that makes `node` of `score`, or None if `Changed` cannot describe it."""
    node = _plain(node)
    if base(node) is score and node.shape == score.shape:
        return Changed()
    if node.name == "select_n" and node.inputs[0].is_bool:
        for hidden, seen, rest in sides(node):
            if hidden is not None and np.isneginf(hidden):
                inner = changed(rest, score)
                if inner is None or _depends(seen, score):
                    return None
                inner.conditions.append(broadcast(seen, score.shape))
                return inner
    if node.name == "add":
        return _added(node, score)
    softcap = _softcap(node, score) if node.name == "mul" else None
    return None if softcap is None else Changed(softcap=softcap)


def _added(node: Node, score: Node) -> Changed | None:
    for rest, bias in (node.inputs, node.inputs[::-1]):
        if _depends(bias, score):
            continue
        inner = changed(rest, score)
        # A bias inside a condition only matters where the condition holds.
        if inner is None or inner.bias is not None:
            return None
        inner.bias = broadcast(bias, score.shape)
        return inner
    return None


def _softcap(node: Node, score: Node) -> float | None:
    """Return c of c * tanh(score / c)."""
    for factor, other in (node.inputs, node.inputs[::-1]):
        c, rest = uniform(factor), _plain(other)
        if c is None or rest.name != "tanh":
            continue
        inner = _plain(rest.inputs[0])
        if inner.name != "div" or base(_plain(inner.inputs[0])) is not score:
            return None
        return float(c) if uniform(inner.inputs[1]) == c else None
    return None


def _plain(node: Node) -> Node:
    """Return the node without conversions from float32 to float32."""
    node = sunk(node)
    while node.name == "convert_element_type" and node.inputs[0].dtype == jnp.float32 == node.dtype:
        node = sunk(node.inputs[0])
    return node


def _depends(node: Node, score: Node) -> bool:
    """Return whether a node may be computed from the score."""
    seen: set[int] = set()
    # A list that keeps the nodes alive, so that no id is reused.
    found: list[Any] = [node]
    for one in found:
        if one is score or len(found) > _MOST_NODES:
            return True
        for x in one.inputs:
            if id(x) not in seen:
                seen.add(id(x))
                found.append(x)
    return False
