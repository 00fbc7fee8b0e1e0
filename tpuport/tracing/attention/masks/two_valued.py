"""Masks as conjunctions of conditions: a key is seen where all of them hold.

A boolean mask is a conjunction of conditions. A mask of numbers that are added to the scores is one
too if it has two values: 0, and one that leaves a key no weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.tracing.attention.masks.graph import Node, computed, leaf
from tpuport.tracing.attention.masks.magnitudes import most_of_product
from tpuport.tracing.attention.masks.tiles import ELEMENTWISE
from tpuport.tracing.attention.masks.views import known_array, rebased, sunk, uniform

# A score that is lowered by so much has no weight next to one that is not: to outweigh it, products
# of queries and keys would have to be about as large, near the end of float32. A number that hides
# by less, say -1e4, is a bias, because scores of trained models do reach that. The lowest numbers
# of float32 and bfloat16 are below this limit, and so is -1e30.
NOTHING = -(2.0**99)
_FLIPPED = {
    **{"lt": jax.lax.ge_p, "ge": jax.lax.lt_p, "gt": jax.lax.le_p, "le": jax.lax.gt_p},
    **{"eq": jax.lax.ne_p, "ne": jax.lax.eq_p},
}


@dataclass
class Two:
    """The two values of an array: `yes` where every condition holds, `no` elsewhere."""

    conditions: list[Node]
    yes: Any
    no: Any


@dataclass
class Split:
    """A mask of numbers: a bias where every condition holds, no weight elsewhere.

    Attributes:
        conditions: Boolean nodes.
        bias: The number added to the scores; None for 0.
        is_finite: Hidden scores are lowered by a finite number, so in a row where no condition
            holds they count after all.
    """

    conditions: list[Node]
    bias: Node | None
    is_finite: bool = False


def conditions(node: Node) -> list[Node]:
    """Return boolean nodes that all hold exactly where a boolean node holds."""
    node = sunk(node)
    value = uniform(node)
    if value is not None and bool(value):
        return []
    if node.name == "and":
        return [c for x in node.inputs for c in conditions(x)]
    if node.name == "not":
        return _negated(node)
    if node.name == "select_n" and len(node.inputs) == 3:
        return _selected(node)
    if node.name in _FLIPPED or node.name == "convert_element_type":
        return _compared(node)
    return [node]


def _negated(node: Node) -> list[Node]:
    inner = sunk(node.inputs[0])
    found = known_array(inner)
    if found is not None:
        return conditions(rebased(inner, leaf(~found)))
    if inner.name == "not":
        return conditions(inner.inputs[0])
    if inner.name == "or":
        return [c for x in inner.inputs for c in conditions(inverse(x))]
    flipped = _FLIPPED.get(inner.name)
    if flipped is None or not _is_ordered(inner):
        return [node]
    made = (flipped, inner.params, inner.inputs)
    return conditions(Node(node.shape, node.dtype, None, lambda: made))


def _is_ordered(compare: Node) -> bool:
    """Return whether a comparison or its opposite always holds, because there can be no NaN."""
    return compare.name in ("eq", "ne") or all(
        not jnp.issubdtype(x.dtype, jnp.floating) for x in compare.inputs
    )


def inverse(node: Node) -> Node:
    """Return the negation of a boolean node."""
    aval = jax.ShapeDtypeStruct(node.shape, np.dtype(bool))
    return computed(jax.lax.not_p, {}, (node,), aval)


def _selected(node: Node) -> list[Node]:
    chooser, on_false, on_true = node.inputs
    if not node.is_bool or not chooser.is_bool:
        return [node]
    low, high = uniform(on_false), uniform(on_true)
    if low is not None and not low:
        return conditions(chooser) + conditions(on_true)
    if high is not None and not high:
        return conditions(inverse(chooser)) + conditions(on_false)
    return [node]


def _compared(node: Node) -> list[Node]:
    """Return the conditions of a comparison of a two-valued array with a number."""
    found = _pointwise(node) if any(not x.is_bool for x in node.inputs) else None
    if node.name == "convert_element_type" and node.inputs[0].is_bool:
        return conditions(node.inputs[0])
    if found is None:
        return _product(node)
    if found.yes and not found.no:
        return found.conditions
    if found.no and not found.yes and len(found.conditions) == 1:
        return conditions(inverse(found.conditions[0]))
    return [node]


def _product(node: Node) -> list[Node]:
    """Return the conditions of `a * b != 0` for integers, an outer product of padding masks."""
    if node.name == "convert_element_type":
        (x,) = node.inputs
    elif node.name == "ne" and uniform(node.inputs[1]) == 0:
        x = node.inputs[0]
    else:
        return [node]
    if sunk(x).name == "mul" and jnp.issubdtype(x.dtype, jnp.integer):
        if most_of_product(x) is not None:
            return [c for y in sunk(x).inputs for c in _product(_nonzero(y))]
    return [node]


def _nonzero(node: Node) -> Node:
    zero = leaf(np.zeros((), node.dtype))
    aval = jax.ShapeDtypeStruct(node.shape, np.dtype(bool))
    return computed(jax.lax.ne_p, {}, (node, zero), aval)


def two(node: Node) -> Two | None:
    """Return the two values of an array with their conditions, or None for any other array."""
    if node.is_bool:
        return Two(conditions(node), np.True_, np.False_)
    node = sunk(node)
    found = known_array(node)
    if found is not None:
        return _two_known(node, found)
    if node.name not in ELEMENTWISE:
        return None
    return _upright(_two_selected(node) if node.name == "select_n" else _pointwise(node))


def _upright(found: Two | None) -> Two | None:
    """Return zero as the value where conditions hold, if the other one is lower and holds there.

    So `where(hidden, -inf, 0)` has the same form as `where(seen, 0, -inf)`, whatever is done to it
    afterwards, such as a conversion to bfloat16.
    """
    if found is None or len(found.conditions) != 1 or not (found.no == 0 > found.yes):
        return found
    return Two(conditions(inverse(found.conditions[0])), found.no, found.yes)


def _two_known(node: Node, found: np.ndarray) -> Two | None:
    """Return the two values of a known array of zeros and one other number, or None."""
    zero = found == 0
    others = found[~zero]
    if not zero.any() or (others.size and not bool((others == others[0]).all())):
        return None
    if not others.size:
        return Two([], found.dtype.type(0), found.dtype.type(-np.inf))
    return Two([rebased(node, leaf(zero))], found.dtype.type(0), others[0])


def _two_selected(node: Node) -> Two | None:
    chooser, on_false, on_true = node.inputs
    if not chooser.is_bool:
        return None
    low, high = uniform(on_false), uniform(on_true)
    if low is not None and high is not None:
        return Two(conditions(chooser), high, low)
    if low is not None:
        inner, other, value = two(on_true), chooser, low
    elif high is not None:
        inner, other, value = two(on_false), inverse(chooser), high
    else:
        return None
    if inner is None or inner.no != value:
        return None
    return Two([*conditions(other), *inner.conditions], inner.yes, inner.no)


def _pointwise(node: Node) -> Two | None:
    """Apply an operation to one two-valued array and numbers, or to two such arrays."""
    values = [uniform(x) for x in node.inputs]
    found = [two(x) if v is None else None for x, v in zip(node.inputs, values, strict=True)]
    unknown = [i for i, v in enumerate(values) if v is None]
    if any(found[i] is None for i in unknown) or not unknown:
        return None
    if len(unknown) == 1:
        one = found[unknown[0]]
        assert one is not None
        yes, no = (
            _evaluated(node, [given if v is None else v for v in values])
            for given in (one.yes, one.no)
        )
        return Two(one.conditions, yes, no)
    a, b = (found[i] for i in unknown[:2])
    if len(unknown) > 2 or a is None or b is None:
        return None
    return _both(node, a, b)


def _both(node: Node, a: Two, b: Two) -> Two | None:
    either = [*a.conditions, *b.conditions]
    if node.name == "mul" and a.yes == b.yes == 1 and a.no == b.no == 0:
        return Two(either, a.yes, a.no)
    # The sum of two finite numbers that hide would be a third value.
    is_two = a.no == b.no and (node.name == "min" or np.isneginf(a.no))
    if node.name in ("add", "add_any", "min") and is_two and a.yes == b.yes == 0 > a.no:
        return Two(either, a.yes, a.no)
    return None


def _evaluated(node: Node, values: list[Any]) -> Any:
    with jax.ensure_compile_time_eval():
        arrays = [jnp.asarray(v, x.dtype) for v, x in zip(values, node.inputs, strict=True)]
        return np.asarray(node.op.bind(*arrays, **node.params))[()]


def sides(node: Node) -> Iterator[tuple[Any, Node, Node]]:
    """Yield each way to read a `select_n` of two sides.

    Each is the number that one side is (None if it has several), the condition for the other
    side, and the other side.
    """
    chooser, on_false, on_true = node.inputs
    yield uniform(on_false), chooser, on_true
    yield uniform(on_true), inverse(chooser), on_false


def split(node: Node) -> Split:
    """Split a mask of numbers into what it hides and what it adds elsewhere."""
    node = sunk(node)
    found = two(node)
    if found is not None and found.yes == 0 and found.no <= NOTHING:
        return Split(found.conditions, None, bool(np.isfinite(found.no)))
    if uniform(node) == 0:
        return Split([], None)
    if node.name == "select_n" and node.inputs[0].is_bool:
        for value, seen, rest in sides(node):
            if value is not None and np.isneginf(value):
                inner = split(rest)
                return Split(conditions(seen) + inner.conditions, inner.bias, inner.is_finite)
    if node.name == "stop_gradient":
        inner = split(node.inputs[0])
        return replace(inner, bias=None if inner.bias is None else node.over(inner.bias))
    if node.name == "add":
        a, b = (split(x) for x in node.inputs)
        both = [x for x in (a.bias, b.bias) if x is not None]
        bias = node.over(*both) if len(both) == 2 else (both or [None])[0]
        return Split(a.conditions + b.conditions, bias, a.is_finite or b.is_finite)
    return Split([], node)
