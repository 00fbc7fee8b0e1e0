"""Pairs of numbers that are turned, as rotary embeddings are, without an array of pairs.

`x.reshape(..., n, 2)`, something done with the first and the second numbers, and both as `x` was: a
TPU keeps the last dim in the 128 lanes of a register, so that an array whose last dim is 2 takes 64
times its size there, or is laid out anew before and after. The numbers beside them are those of `x`
itself, one place further to the left or to the right. Three ways to write it are known:

- both numbers stacked again in another order or with other signs, as diffusers and rotary libraries
  have it;
- a product of complex numbers, as Llama's first code has it;
- products with the columns of matrices of 2 by 2, as Flux's own code has it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tpuport.tracing.core.context import Trace
from tpuport.tracing.patterns.program import FlatProgram, PatternMatch, RunningValues

# What drops or adds dims of size 1 between the halves and the pairs.
_KEEPS = ("reshape", "squeeze", "broadcast_in_dim")
# Computes the pairs, as the last dim of an array without a dim of them.
_Way = Callable[[RunningValues], jax.Array]


class _Half(NamedTuple):
    """The first or the second numbers of all pairs, as they are or negated.

    Args:
        source: the array of pairs, or the one that it is reshaped from.
        number: 0 for the first ones, 1 for the second.
        negated: whether the sign changes.
    """

    source: Any
    number: int
    negated: bool


def find_pairs(program: FlatProgram, trace: Trace) -> Iterator[PatternMatch]:
    """Yield the places of a program for a TPU where pairs are taken apart and put together."""
    if trace.options.target != "tpu":
        return
    for eqn in program.equations:
        if eqn.primitive.name != "reshape":
            continue
        pairs, out = eqn.invars[0].aval, eqn.outvars[0].aval
        # Pairs (..., n, 2) of which the dim before is joined with them.
        if pairs.ndim < 2 or pairs.shape[-1] != 2 or out.shape[-1:] in ((), (1,), (2,)):
            continue
        for find in (_exchanged, _complex_product, _columns):
            way = find(program, eqn.invars[0])
            if way is not None:
                yield PatternMatch(eqn, functools.partial(_run, out.shape, way))
                break


def _run(shape: tuple[int, ...], way: _Way, values: RunningValues) -> list[jax.Array]:
    return [way(values).reshape(shape)]


def _joined(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of pairs (..., n, 2) in one dim."""
    return (*shape[:-2], 2 * shape[-2])


def _exchanged(program: FlatProgram, pairs: Any) -> _Way | None:
    """Return how to compute pairs that are stacked of two halves of others, or None."""
    parts = _stacked(program, pairs)
    if parts is None:
        return None
    even, odd = (_half(program, atom) for atom in parts)
    if even is None or odd is None or even.source is not odd.source:
        return None
    # Pairs that stay as they are need no other way.
    if even.source.aval.size != pairs.aval.size or (even.number, odd.number) == (0, 1):
        return None

    def compute(values: RunningValues) -> jax.Array:
        x = values.read(even.source).reshape(_joined(pairs.aval.shape))
        first, second = _first(x, even.number), _second(x, odd.number)
        return _by_place(-first if even.negated else first, -second if odd.negated else second)

    return compute


def _complex_product(program: FlatProgram, pairs: Any) -> _Way | None:
    """Return how to compute the parts of a product of complex numbers, one made of pairs."""
    parts = _stacked(program, pairs)
    makers = [program.maker(_through(program, atom)) for atom in parts or ()]
    if [maker and maker.primitive.name for maker in makers] != ["real", "imag"]:
        return None
    product = program.maker(makers[0].invars[0])
    if product is not program.maker(makers[1].invars[0]) or product is None:
        return None
    if product.primitive.name != "mul":
        return None
    for number, factor in (product.invars, product.invars[::-1]):
        source = _complex_source(program, number)
        if source is not None and number.aval.shape == pairs.aval.shape[:-1]:
            return functools.partial(_multiplied, source, factor, _joined(pairs.aval.shape))
    return None


def _multiplied(source: Any, factor: Any, shape: tuple[int, ...], values: RunningValues) -> Any:
    x, w = values.read(source).reshape(shape), values.read(factor)
    real, imaginary = (jnp.repeat(part, 2, -1) for part in (jnp.real(w), jnp.imag(w)))
    if w.shape[-1] == 1 != shape[-1] // 2:
        real, imaginary = real[..., :1], imaginary[..., :1]
    return x * real + _by_place(-_first(x, 1), _second(x, 0)) * imaginary


def _complex_source(program: FlatProgram, atom: Any) -> Any:
    """Return the pairs that are the parts of complex numbers, or what they are reshaped from."""
    made = program.maker(_through(program, atom))
    if made is None or made.primitive.name != "complex":
        return None
    halves = [_half(program, part) for part in made.invars]
    if [half and half[1:] for half in halves] != [(0, False), (1, False)]:
        return None
    first, second = (half.source for half in halves if half is not None)
    return first if first is second and first.aval.size == 2 * atom.aval.size else None


def _columns(program: FlatProgram, pairs: Any) -> _Way | None:
    """Return how to compute sums of both numbers, each times numbers of its own."""
    total = program.maker(pairs)
    if total is None or total.primitive.name != "add":
        return None
    found: dict[int, tuple[Any, Any]] = {}
    for atom in total.invars:
        product = program.maker(atom)
        if product is None or product.primitive.name != "mul":
            return None
        for number, factor in (product.invars, product.invars[::-1]):
            half = _half(program, number)
            if half is None or half.negated or not _is_column(number, factor, pairs):
                continue
            found[half.number] = half.source, factor
            break
    if set(found) != {0, 1} or found[0][0] is not found[1][0]:
        return None
    source, order = found[0][0], list(found)
    if source.aval.size != pairs.aval.size:
        return None

    def compute(values: RunningValues) -> jax.Array:
        x = values.read(source).reshape(_joined(pairs.aval.shape))
        factors = [values.read(found[index][1]) for index in (0, 1)]
        by = [factor.reshape(_joined(factor.shape)) for factor in factors]
        terms = [_by_place(_first(x, i), _second(x, i)) * by[i] for i in order]
        return terms[0] + terms[1]

    return compute


def _is_column(number: Any, factor: Any, pairs: Any) -> bool:
    """Return whether halves (..., n, 1) meet factors (..., n, 2), other dims of which may be 1."""
    shape = pairs.aval.shape
    return number.aval.shape == (*shape[:-1], 1) and factor.aval.shape[-2:] == shape[-2:]


def _by_place(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Return the first array at even places of the last dim, the second at odd ones."""
    place = lax.broadcasted_iota(jnp.int32, even.shape, even.ndim - 1)
    return jnp.where(place % 2 == 0, even, odd)


def _first(x: jax.Array, index: int) -> jax.Array:
    """Return, at even places, the number of this index in each pair."""
    return x if index == 0 else _moved(x, -1)


def _second(x: jax.Array, index: int) -> jax.Array:
    """Return, at odd places, the number of this index in each pair."""
    return x if index == 1 else _moved(x, 1)


def _moved(x: jax.Array, places: int) -> jax.Array:
    """Return each number this many places further along the last dim, and zeros behind them."""
    last = (places, -places, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [last])


def _stacked(program: FlatProgram, pairs: Any) -> Any:
    """Return the two values that are stacked to pairs, or None."""
    made = program.maker(pairs)
    axis = {"stack": "axis", "concatenate": "dimension"}.get(made.primitive.name) if made else None
    if axis is None or len(made.invars) != 2 or made.params[axis] != pairs.aval.ndim - 1:
        return None
    return made.invars


def _through(program: FlatProgram, atom: Any) -> Any:
    """Return what a value is, but for dims of size 1."""
    while (eqn := program.maker(atom)) is not None:
        if eqn.primitive.name not in _KEEPS or eqn.invars[0].aval.size != atom.aval.size:
            break
        atom = eqn.invars[0]
    return atom


def _half(program: FlatProgram, atom: Any) -> _Half | None:
    """Return which numbers of which pairs a value is, or None."""
    negated = False
    while (eqn := program.maker(_through(program, atom))) is not None:
        if eqn.primitive.name == "slice":
            index = _index(eqn)
            return None if index is None else _Half(_source(program, eqn), index, negated)
        if eqn.primitive.name != "neg":
            return None
        negated, atom = not negated, eqn.invars[0]
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
