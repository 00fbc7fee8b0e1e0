"""Conditions that are a band: a query at position q sees the keys from q + low to q + high."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuport.tracing.attention.masks.graph import Node
from tpuport.tracing.attention.masks.tiles import ONE, TilePart, Tiles, known_tile
from tpuport.tracing.attention.masks.views import sunk, uniform

Q, K = 2, 3
_COMPARES = ("lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Band:
    """Limits of (position of the key - position of the query); None for no limit."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: "Band") -> "Band":
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return Band(max(lows, default=None), min(highs, default=None))

    def rows(self, num_q: int, num_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and the last key that each query sees; none if the first is larger."""
        q = np.arange(num_q)
        low = np.zeros(num_q, int) if self.low is None else np.maximum(0, q + self.low)
        high = np.full(num_q, num_k - 1)
        return low, high if self.high is None else np.minimum(high, q + self.high)

    def covers(self, num_q: int, num_k: int) -> bool:
        """Return whether every query sees a key."""
        low, high = self.rows(num_q, num_k)
        return bool((low <= high).all())


def band_of(node: Node, tiles: Tiles) -> Band | None:
    """Return a boolean node (batch, heads, queries, keys) as a band, or None if it is no band."""
    node = sunk(node)
    if node.name not in _COMPARES:
        return None
    x, y = (sunk(side) for side in node.inputs)
    strict = node.name in ("lt", "gt")
    if node.name in ("ge", "gt"):
        x, y = y, x
    # x <= y, or x < y
    limit = uniform(y)
    if x.name == "abs" and limit is not None:
        inner = _linear(x.inputs[0], tiles)
        if inner is None or not _is_whole(limit):
            return None
        a, b, c = inner
        negated = (-a, -b, -c)
        sides = [_below(s[0], s[1], s[2] - int(limit), strict) for s in (inner, negated)]
        return None if sides[0] is None or sides[1] is None else sides[0] & sides[1]
    left, right = _linear(x, tiles), _linear(y, tiles)
    if left is None or right is None:
        return None
    a, b, c = (m - n for m, n in zip(left, right, strict=True))
    return _below(a, b, c, strict)


def _below(a: int, b: int, c: int, strict: bool) -> Band | None:
    """Return the condition a q + b k + c <= 0 (< 0 if strict) as a band."""
    c += int(strict)
    if (a, b) == (-1, 1):
        return Band(high=-c)
    return Band(low=c) if (a, b) == (1, -1) else None


def _linear(node: Node, tiles: Tiles) -> tuple[int, int, int] | None:
    """Return (a, b, c) of an array that is a q + b k + c."""
    if not node.shape:
        value = uniform(node)
        return None if value is None or not _is_whole(value) else (0, 0, int(value))
    along = tiles.varying(node)
    if len(along) <= 1:
        return _progression(node, along)
    node = sunk(node)
    if node.name in ("add", "sub"):
        left, right = (_linear(x, tiles) for x in node.inputs)
        if left is None or right is None:
            return None
        sign = 1 if node.name == "add" else -1
        a, b, c = (m + sign * n for m, n in zip(left, right, strict=True))
        return a, b, c
    if node.name == "neg":
        inner = _linear(node.inputs[0], tiles)
        return None if inner is None else (-inner[0], -inner[1], -inner[2])
    # Floats represent integers of this size exactly.
    if node.name == "convert_element_type" and node.dtype in (jnp.int32, jnp.int64, jnp.float32):
        return _linear(node.inputs[0], tiles)
    return None


def _progression(node: Node, along: frozenset[int]) -> tuple[int, int, int] | None:
    if not along <= {Q, K} or node.is_bool:
        return None
    parts = [TilePart(0, n) if d in along else ONE for d, n in enumerate(node.shape)]
    value = known_tile(node, parts)
    if value is None or not np.isfinite(value).all():
        return None
    value = value.reshape(-1)
    if not (value == np.floor(value)).all() or np.abs(value).max() >= 1 << 24:
        return None
    steps = np.unique(np.diff(value.astype(np.int64)))
    if len(steps) > 1:
        return None
    step = int(steps[0]) if len(steps) else 0
    first = int(value[0])
    return (step, 0, first) if Q in along else (0, step, first)


def _is_whole(value: Any) -> bool:
    return bool(np.isfinite(value)) and float(value) == int(value)
