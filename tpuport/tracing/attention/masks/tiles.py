"""Tiles of an array, computed from the graph behind it without the array.

A tile is requested by one `TilePart` for each dim. The request is pushed back through the
operations until it reaches arrays that are short, or whose operation has no rule here. The tile is
computed from slices of those. A dim along which an array does not vary comes back with size 1.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tpuport.tracing.attention.masks.graph import Node
from tpuport.tracing.attention.masks.short_forms import short_form
from tpuport.tracing.core import int64

ELEMENTWISE = frozenset(
    "add sub mul div rem max min pow integer_pow square and or not xor neg sign floor ceil round"
    " abs eq ne lt le gt ge select_n convert_element_type exp exp2 log log1p expm1 tanh logistic"
    " sqrt rsqrt is_finite clamp stop_gradient copy copy_p reduce_precision erf sin cos".split()
)


@dataclass(frozen=True)
class TilePart:
    """A choice of elements along one dim: `size` of them from `start`, or those at `points`."""

    start: Any
    size: int
    points: Any = None

    @property
    def ids(self) -> Any:
        """Return the positions of the elements."""
        if self.points is not None:
            return self.points
        return self.start + jnp.arange(self.size, dtype=jnp.int32)

    def at(self, points: Any) -> "TilePart":
        """Return as many elements at other positions."""
        return TilePart(0, self.size, points)

    def is_whole(self, size: int) -> bool:
        """Return whether these are all elements of a dim, in order."""
        return self.points is None and isinstance(self.start, int) and self.size == size


ONE = TilePart(0, 1)
Parts = Sequence[TilePart]
Rule = Callable[["Tiles", Node, Parts], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule that computes a tile of these operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Whole(Exception):
    """Raised for an operation whose complete result is needed: no rule covers it."""


class Tiles:
    """A computation of tiles that computes each node of one tile once.

    Args:
        limit: Arrays of at most so many elements are read, however they were computed.
        read: Returns the value of a leaf.
    """

    def __init__(self, limit: int, read: Callable[[Node], Any]) -> None:
        self.limit, self._read = limit, read
        self._known: dict[Any, Any] = {}

    def tile(self, node: Node, parts: Parts) -> Any:
        """Return a tile of a node; see the module docstring."""
        parts = [ONE if n == 1 else p for n, p in zip(node.shape, parts, strict=True)]
        key = (id(node), tuple((id(p.start), p.size, id(p.points)) for p in parts))
        if key not in self._known:
            # The objects in the key are kept alive, so that no id is reused.
            # Outside of the scope jnp would make 32 bits of an operand of 64.
            is_wide = any(map(int64.is_wide, (node, *node.inputs)))
            with int64.scope() if is_wide else contextlib.nullcontext():
                self._known[key] = (self._computed(node, parts), node, parts)
        return self._known[key][0]

    def _computed(self, node: Node, parts: Parts) -> Any:
        if node.value is not None and node.size <= self.limit:
            return picked(self._read(node), parts)
        if node.op is None and node.size > self.limit >= 0:
            short = short_form(node)
            if short is not None:
                return self.tile(short, parts)
        if node.name in ELEMENTWISE:
            operands = [self.operand(x, parts) for x in node.inputs]
            if any(map(int64.is_wide, node.inputs)):  # what was read of one has 32 bits
                operands = [x.astype(n.dtype) for x, n in zip(operands, node.inputs, strict=True)]
            return elementwise(node, operands)
        if node.name in RULES:
            try:
                return RULES[node.name](self, node, parts)
            except Whole:
                pass
        return picked(self.whole(node), parts)

    def operand(self, node: Node, parts: Parts) -> Any:
        """Return the tile of an operand of an elementwise operation, which may be a scalar."""
        return self.tile(node, parts if node.shape else ())

    def whole(self, node: Node) -> Any:
        """Return the complete array, for operations without a rule."""
        if node.value is not None or node.op is None:
            return self._read(node)
        return self._bound(node)

    def _bound(self, node: Node) -> Any:
        key = (id(node), "whole")
        if key not in self._known:
            inputs = [self.whole(x) for x in node.inputs]
            self._known[key] = (node.op.bind(*inputs, **node.params), node)
        return self._known[key][0]

    def varying(self, node: Node) -> frozenset[int]:
        """Return the dims along which an array can vary, which keep their size in its tiles."""
        key = (id(node), "varying")
        if key not in self._known:
            shapes = Tiles(self.limit, lambda x: jnp.zeros(x.shape, x.dtype))
            whole = [TilePart(0, n) for n in node.shape]
            shape = jax.eval_shape(lambda: shapes.tile(node, whole)).shape
            self._known[key] = (frozenset(d for d, n in enumerate(shape) if n > 1), node)
        return self._known[key][0]


def elementwise(node: Node, operands: list[Any]) -> Any:
    """Apply an operation to tiles, whose dims of size 1 broadcast to any size."""
    shape = jnp.broadcast_shapes(*[x.shape for x in operands])
    # Numbers that were broadcast have lost their dims, and all operands may be such.
    shape = (1,) * (len(node.shape) - len(shape)) + shape
    operands = [jnp.broadcast_to(x, shape) if jnp.ndim(x) else x for x in operands]
    return node.op.bind(*operands, **node.params).reshape(shape)


def picked(value: Any, parts: Parts) -> Any:
    """Return these elements of an array; elements past its end are arbitrary."""
    for dim, part in enumerate(parts):
        size = value.shape[dim]
        if size == 1 or part.is_whole(size):
            continue
        if part.points is not None:
            value = jnp.take(value, part.points, axis=dim, mode="clip")
            continue
        if size % part.size:
            # Padded, because jax would clamp the start of a slice that reaches past the end.
            pads = [(0, part.size if d == dim else 0) for d in range(value.ndim)]
            value = jnp.pad(value, pads)
        value = jax.lax.dynamic_slice_in_dim(value, part.start, part.size, axis=dim)
    return value


class NotKnownError(Exception):
    """An error for a value that depends on something traced."""


class _Known(Tiles):
    """A computation of tiles that depend on nothing traced."""

    def __init__(self, budget: int) -> None:
        super().__init__(-1, self._array)
        self._left = budget

    def _array(self, node: Node) -> Any:
        if isinstance(node.value, jax.core.Tracer) or node.value is None:
            raise NotKnownError
        return jnp.asarray(node.value)

    def _computed(self, node: Node, parts: Parts) -> Any:
        self._left -= 1
        if self._left < 0:
            raise NotKnownError
        return super()._computed(node, parts)

    def whole(self, node: Node) -> Any:
        self._left -= 1
        if self._left < 0 or node.size > (_LARGEST_THERE if node.op is None else _LARGEST):
            raise NotKnownError
        return self._array(node) if node.op is None else self._bound(node)


# Limits on the elements of arrays to compute, and of arrays that exist already, such as a mask of
# 32768 tokens that the user's code made on the host.
_LARGEST, _LARGEST_THERE = 1 << 24, 1 << 30


def known_tile(node: Node, parts: Parts, budget: int = 200) -> np.ndarray | None:
    """Return a tile whose value is concrete, or None if it depends on something traced.

    Args:
        node: The array.
        parts: The tile.
        budget: The number of operations to look at, at most.
    """
    with jax.ensure_compile_time_eval():
        try:
            return np.asarray(_Known(budget).tile(node, parts))
        except NotKnownError:
            return None
