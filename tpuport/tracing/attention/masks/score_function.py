"""The effect of a function on the scores of attention, read from its graph."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.tracing.attention.masks.graph import Node, computed, leaf
from tpuport.tracing.attention.masks.two_valued import sides
from tpuport.tracing.attention.masks.views import broadcast, sunk, uniform

_MOST_NODES = 2000


@dataclass
class Changed:
    """The effect on scores: a factor, a cap, then a bias, then hiding where a condition fails.

    Attributes:
        conditions: Boolean nodes.
        bias: The number that is added, or None.
        softcap: The cap for which scores s become softcap * tanh(s / softcap), or None.
        scale: The factor.
        fill: What a hidden score becomes.
    """

    conditions: list[Node] = field(default_factory=list)
    bias: Node | None = None
    softcap: float | None = None
    scale: float = 1.0
    fill: float = -np.inf


@dataclass(frozen=True)
class ScoreFunction:
    """A graph that makes other scores of the scores.

    Attributes:
        score: The node of the scores.
        is_score: Whether a node is the scores themselves, or a view that the caller allows.
        shape: The shape of the result.
        rounds: Whether the result may be rounded to another dtype, or made of one that is.
    """

    score: Node
    is_score: Callable[[Node], bool]
    shape: tuple[int, ...]
    rounds: bool = False

    def effect(self, node: Node) -> Changed | None:
        """Return the effect that makes `node` of the scores; None if `Changed` cannot say it."""
        node = self._plain(node)
        if self.is_score(node):
            return Changed()
        if node.name == "select_n" and node.inputs[0].is_bool:
            return self._hidden(node)
        if node.name in ("add", "sub"):
            return self._added(node)
        if node.name in ("mul", "div"):
            softcap = self._softcap(node) if node.name == "mul" else None
            return softcap or self._scaled(node)
        return None

    def _hidden(self, node: Node) -> Changed | None:
        for hidden, seen, rest in sides(node):
            if hidden is None or not (hidden < 0) or self._depends(seen):
                continue
            inner = self.effect(rest)
            if inner is None or (inner.conditions and inner.fill != hidden):
                return None
            inner.fill = float(hidden)
            inner.conditions.append(broadcast(seen, self.shape))
            return inner
        return None

    def _added(self, node: Node) -> Changed | None:
        left, right = node.inputs
        for rest, bias in ((left, right), (right, left))[: 2 if node.name == "add" else 1]:
            if self._depends(bias):
                continue
            inner = self.effect(rest)
            if inner is None or (inner.conditions and np.isfinite(inner.fill)):
                return None
            if node.name == "sub":
                bias = computed(jax.lax.neg_p, {}, (bias,), bias)
            # A bias inside a condition only matters where the condition holds.
            bias = broadcast(bias, self.shape)
            if inner.bias is not None and inner.bias.dtype != bias.dtype:
                return None
            added = () if inner.bias is None else (inner.bias,)
            inner.bias = computed(jax.lax.add_p, {}, (*added, bias), bias) if added else bias
            return inner
        return None

    def _scaled(self, node: Node) -> Changed | None:
        left, right = node.inputs
        for rest, factor in ((left, right), (right, left))[: 2 if node.name == "mul" else 1]:
            c = uniform(factor)
            if c is None or not 0 < float(c) < np.inf:
                continue
            inner = self.effect(rest)
            if inner is None or inner.softcap is not None:
                return None
            by = float(c) if node.name == "mul" else 1 / float(c)
            bias = inner.bias
            if bias is not None:
                bias = node.over(bias, leaf(np.asarray(c, bias.dtype)), dtype=bias.dtype)
            return replace(inner, bias=bias, scale=inner.scale * by, fill=inner.fill * by)
        return None

    def _softcap(self, node: Node) -> Changed | None:
        """Return the effect of c * tanh(score / c)."""
        for factor, other in (node.inputs, node.inputs[::-1]):
            c, rest = uniform(factor), self._plain(other)
            if c is None or rest.name != "tanh":
                continue
            capped = self._plain(rest.inputs[0])
            if capped.name != "div" or uniform(capped.inputs[1]) != c:
                return None
            inner = self.effect(capped.inputs[0])
            if inner is None or inner.conditions or inner.softcap or inner.bias is not None:
                return None
            return replace(inner, softcap=float(c))
        return None

    def _plain(self, node: Node) -> Node:
        """Return the node without conversions that leave the values as they are."""
        node = sunk(node)
        while node.name == "convert_element_type" and self._keeps(node.inputs[0].dtype, node.dtype):
            node = sunk(node.inputs[0])
        return node

    def _keeps(self, before: Any, after: Any) -> bool:
        if self.rounds:
            return all(jnp.issubdtype(one, jnp.floating) for one in (before, after))
        return before == jnp.float32 == after

    def _depends(self, node: Node) -> bool:
        """Return whether a node may be computed from the scores."""
        seen: set[int] = set()
        # A list that keeps the nodes alive, so that no id is reused.
        found: list[Any] = [node]
        for one in found:
            if one is self.score or len(found) > _MOST_NODES:
                return True
            for x in one.inputs:
                if id(x) not in seen:
                    seen.add(id(x))
                    found.append(x)
        return False
