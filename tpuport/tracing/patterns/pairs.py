"""Numbers of a pair that change places, as rotary embeddings turn them, without an array of pairs.

`x.reshape(..., n, 2)`, its two halves, and both stacked again in another order or with other signs:
a TPU keeps the last dim in the 128 lanes of a register, so that an array whose last dim is 2 takes
64 times its size there, or is laid out anew before and after. The same numbers are those of `x`
itself, one place further to the left or to the right.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tpuport.tracing.core.context import Trace
from tpuport.tracing.patterns.program import FlatProgram, PatternMatch, RunningValues

# What drops or adds dims of size 1 between the halves and the pairs.
_KEEPS = ("reshape", "squeeze", "broadcast_in_dim")


class _Half(NamedTuple):
    """The first or the second numbers of all pairs, as they are or negated.

    Args:
        source: the array of pairs, or the one that it is reshaped from.
        index: 0 or 1.
        negated: whether the sign changes.
    """

    source: Any
    index: int
    negated: bool


def find_pairs(program: FlatProgram, trace: Trace) -> Iterator[PatternMatch]:
    """Yield the places of a program for a TPU where pairs are taken apart and put together."""
    if trace.options.target != "tpu":
        return
    for eqn in program.equations:
        halves = _halves(program, eqn)
        if halves is not None:
            yield PatternMatch(eqn, functools.partial(_run, eqn, *halves))


def _run(eqn: Any, even: _Half, odd: _Half, values: RunningValues) -> list[jax.Array]:
    """Return the equation's result, whose even and odd places are these halves."""
    shape = eqn.outvars[0].aval.shape
    x = values.read(even.source).reshape(shape)
    first = _signed(x if even.index == 0 else _moved(x, -1), even)
    second = _signed(x if odd.index == 1 else _moved(x, 1), odd)
    is_even = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) % 2 == 0
    return [jnp.where(is_even, first, second)]


def _signed(x: jax.Array, half: _Half) -> jax.Array:
    return -x if half.negated else x


def _moved(x: jax.Array, places: int) -> jax.Array:
    """Return each number this many places further along the last dim, and zeros behind them."""
    last = (places, -places, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [last])


def _halves(program: FlatProgram, eqn: Any) -> tuple[_Half, _Half] | None:
    """Return what the first and second numbers of all pairs of a reshape's result are, or None."""
    if eqn.primitive.name != "reshape" or not eqn.outvars[0].aval.shape:
        return None
    pairs, out = eqn.invars[0].aval, eqn.outvars[0].aval
    made = program.maker(eqn.invars[0])
    if made is None or not pairs.shape or pairs.shape[-1] != 2 or out.shape[-1] in (1, 2):
        return None
    axis = {"stack": "axis", "concatenate": "dimension"}.get(made.primitive.name)
    if axis is None or len(made.invars) != 2 or made.params[axis] != len(pairs.shape) - 1:
        return None
    even, odd = (_half(program, atom) for atom in made.invars)
    if even is None or odd is None or even.source is not odd.source or out.shape[-1] % 2:
        return None
    if even.source.aval.size != out.size:
        return None
    # Pairs that stay as they are need no other way.
    return None if (even.index, odd.index) == (0, 1) else (even, odd)


def _half(program: FlatProgram, atom: Any) -> _Half | None:
    """Return which numbers of which pairs a value is, or None."""
    negated, size = False, atom.aval.size
    while (eqn := program.maker(atom)) is not None:
        name = eqn.primitive.name
        if name == "neg":
            negated = not negated
        elif name == "slice":
            index = _index(eqn)
            return None if index is None else _Half(_source(program, eqn), index, negated)
        elif name not in _KEEPS or eqn.invars[0].aval.size != size:
            return None
        atom = eqn.invars[0]
    return None


def _index(eqn: Any) -> int | None:
    """Return which number of each pair a slice takes, or None if it takes others."""
    shape = eqn.invars[0].aval.shape
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    others = zip(starts[:-1], limits[:-1], strides[:-1], shape[:-1], strict=True)
    if any(one[:3] != (0, one[3], 1) for one in others) or starts[-1] > 1:
        return None
    of_pairs = shape[-1] == 2 and limits[-1] == starts[-1] + 1
    every_second = strides[-1] == 2 and shape[-1] % 2 == 0 and limits[-1] >= shape[-1] - 1
    return starts[-1] if of_pairs or every_second else None


def _source(program: FlatProgram, eqn: Any) -> Any:
    """Return what a slice is of, or the array that this is reshaped from."""
    atom = eqn.invars[0]
    while (made := program.maker(atom)) is not None and made.primitive.name == "reshape":
        atom = made.invars[0]
    return atom
