"""Reverse-mode gradients of `lax.while_loop`, whose number of rounds is known at its end only.

If its derivative is asked for, the loop keeps the values before some of its rounds in a fixed
number of slots: those before every round, and whenever the slots are full, every other of them,
from then on at twice the distance. The backward pass goes from slot to slot, runs the rounds
between two again, and keeps their values in other slots in the same way.

Up to `_SLOTS ** 2` rounds run once more than without a gradient. The idea of a fixed number of
checkpoints is that of treeverse (Griewank, 1992, https://doi.org/10.1080/10556789208805505).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from tpuport.foundation.errors import PortError
from tpuport.tracing.core import int64
from tpuport.tracing.core.paths import DIFFERENTIABLE_WHILE

_SLOTS = 32
_Values = list[jax.Array]


def while_with_gradient(
    test: ClosedJaxpr, body: ClosedJaxpr, start: Sequence[jax.Array], refusal: PortError
) -> _Values:
    """Run `while test(*values): values = body(*values)`, with derivatives of first order.

    Args:
        test: The condition; it may hold tracers.
        body: A round; it may hold tracers.
        start: The values before the loop.
        refusal: What a second derivative raises.
    """
    sizes = (len(test.consts), len(body.consts))
    loop = _Differentiable(test, body, sizes, refusal)
    return loop(*test.consts, *body.consts, *start)


class _Differentiable:
    """A loop as a function of the arrays that its condition and body hold, and of its start."""

    def __init__(
        self, test: ClosedJaxpr, body: ClosedJaxpr, sizes: tuple[int, int], refusal: PortError
    ) -> None:
        self.refusal, self.held = refusal, sum(sizes)
        tested, ran = _open(test), _open(body)

        def holds(held: _Values, values: _Values) -> jax.Array:
            return tested(*held[: sizes[0]], *values)[0]

        def step(held: _Values, values: _Values) -> _Values:
            return ran(*held[sizes[0] :], *values)

        self.holds, self.step = holds, step

        def run(*arrays: jax.Array) -> _Values:
            return self._run(*arrays)

        run.__name__ = DIFFERENTIABLE_WHILE
        call = jax.custom_jvp(run)
        call.defjvp(self._derivative, symbolic_zeros=True)
        self._call = call

    def __call__(self, *arrays: jax.Array) -> _Values:
        """Run the loop."""
        return self._call(*arrays)

    def _run(self, *arrays: jax.Array) -> _Values:
        held, values = list(arrays[: self.held]), list(arrays[self.held :])
        with int64.scope():
            return lax.while_loop(
                lambda now: self.holds(held, now), lambda now: self.step(held, now), values
            )

    def _derivative(self, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
        """Return the values after the loop and their tangents."""
        primals = [_first_order(x, self.refusal) for x in primals]
        moving = [
            i
            for i, (x, tangent) in enumerate(zip(primals, tangents, strict=True))
            if _has_gradient(x) and not isinstance(tangent, SymbolicZero)
        ]
        out, saved = self._saving(primals)
        given = [tangents[i] for i in moving]
        made = linear_call(self._pushed(moving), self._pulled(moving), (primals, saved), given)
        rest = iter(made)
        return out, [next(rest) if _has_gradient(x) else _no_tangent(x) for x in out]

    def _saving(self, primals: _Values) -> tuple[_Values, Any]:
        """Run the loop and keep the values before some rounds."""
        held, values = primals[: self.held], primals[self.held :]
        with int64.scope():
            slots, distance = _empty(values), jnp.int32(1)

            def goes_on(carried: Any) -> jax.Array:
                return self.holds(held, carried[0])

            def step(carried: Any) -> Any:
                now, count, slots, distance = carried
                slots = _kept(slots, now, count, distance)
                now, count = self.step(held, now), count + jnp.int32(1)
                slots, distance = lax.cond(
                    count == distance * jnp.int32(_SLOTS), _thinned, _same, slots, distance
                )
                return now, count, slots, distance

            start = (values, jnp.int32(0), slots, distance)
            final, count, slots, distance = lax.while_loop(goes_on, step, start)
        return final, (count, slots, distance)

    def _pushed(self, moving: list[int]) -> Callable[..., _Values]:
        """Return the function from tangents to the tangents of the result."""

        def push(residuals: Any, tangents: _Values) -> _Values:
            primals, _ = residuals

            def run(moved: _Values) -> _Values:
                arrays = _replaced(primals, moving, moved)
                return [x for x in self._run(*arrays) if _has_gradient(x)]

            return jax.jvp(run, ([primals[i] for i in moving],), (tangents,))[1]

        return push

    def _pulled(self, moving: list[int]) -> Callable[..., _Values]:
        """Return the function from cotangents of the result to the cotangents."""
        held_moving = [i for i in moving if i < self.held]
        starts = [i - self.held for i in moving if i >= self.held]

        def pull(residuals: Any, cotangents: _Values) -> _Values:
            primals, (count, slots, distance) = residuals
            held = primals[: self.held]
            carried = [i for i, x in enumerate(primals[self.held :]) if _has_gradient(x)]

            def back(values: _Values, cotangent: _Values, sums: _Values) -> Any:
                def run(moved_held: _Values, moved: _Values) -> _Values:
                    all_held = _replaced(held, held_moving, moved_held)
                    after = self.step(all_held, _replaced(values, carried, moved))
                    return [after[i] for i in carried]

                given = [held[i] for i in held_moving], [values[i] for i in carried]
                to_held, before = jax.vjp(run, *given)[1](cotangent)
                return before, [a + b for a, b in zip(sums, to_held, strict=True)]

            sums = [jnp.zeros_like(held[i]) for i in held_moving]
            with int64.scope():
                sweep = _BackwardPass(lambda now: self.step(held, now), back)
                before, sums = sweep.run((slots, distance), count, (cotangents, sums))
            return [*sums, *(before[carried.index(i)] for i in starts)]

        return pull


class _BackwardPass:
    """The backward pass over the rounds of a loop, from the last to the first."""

    def __init__(self, step: Callable[[_Values], _Values], back: Callable[..., Any]) -> None:
        self.step, self.back = step, back

    def run(self, saved: tuple[_Values, jax.Array], count: jax.Array, carried: Any) -> Any:
        """Run all rounds backward."""
        slots, distance = saved

        def segment(number: jax.Array, carried: Any) -> Any:
            first = number * distance
            rounds = jnp.minimum(distance, count - first)
            return self._segment([x[number] for x in slots], rounds, carried)

        pieces = (count + distance - jnp.int32(1)) // distance
        return _backward(pieces, segment, carried)

    def _segment(self, values: _Values, rounds: jax.Array, carried: Any) -> Any:
        """Run some rounds, which begin with `values`, backward."""
        distance = jnp.maximum((rounds + jnp.int32(_SLOTS - 1)) // jnp.int32(_SLOTS), jnp.int32(1))

        def keep(number: jax.Array, state: Any) -> Any:
            now, slots = state
            return self.step(now), _kept(slots, now, number, distance)

        _, slots = lax.fori_loop(jnp.int32(0), rounds, keep, (values, _empty(values)))

        def one(number: jax.Array, carried: Any) -> Any:
            begin = [x[number // distance] for x in slots]
            again = number % distance
            now = lax.fori_loop(jnp.int32(0), again, lambda _, now: self.step(now), begin)
            return self.back(now, *carried)

        return _backward(rounds, one, carried)


def _backward(count: jax.Array, step: Callable[..., Any], carried: Any) -> Any:
    """Run `step(number, carried)` for the numbers below `count`, the largest first."""
    last = count - jnp.int32(1)
    return lax.fori_loop(jnp.int32(0), count, lambda i, now: tuple(step(last - i, now)), carried)


def _open(closed: ClosedJaxpr) -> Callable[..., _Values]:
    """Return a function of the arrays that a program holds and of its arguments."""
    jaxpr = closed.jaxpr
    merged = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return jaxpr_as_fun(ClosedJaxpr(merged, []))


def _has_gradient(value: jax.Array) -> bool:
    """Return whether derivatives pass through a value: wide ones are Python numbers."""
    return jnp.issubdtype(value.dtype, jnp.inexact) and not int64.is_wide(value)


def _no_tangent(value: jax.Array) -> Any:
    """Return the tangent of a value through which no derivative passes."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros(value.shape, jax.dtypes.float0)
    with int64.scope():
        return jnp.zeros_like(value)


def _first_order(value: jax.Array, refusal: PortError) -> jax.Array:
    """Return a value that raises where a derivative of it is asked for."""
    if not _has_gradient(value):
        return value

    @jax.custom_jvp
    def same(value: jax.Array) -> jax.Array:
        return value

    @same.defjvp
    def same_jvp(primals: Any, tangents: Any) -> Any:
        raise refusal

    return same(value)


def _replaced(values: Sequence[jax.Array], places: list[int], others: _Values) -> _Values:
    made = list(values)
    for place, other in zip(places, others, strict=True):
        made[place] = other
    return made


def _empty(values: _Values) -> _Values:
    return [jnp.zeros((_SLOTS, *x.shape), x.dtype) for x in values]


def _kept(slots: _Values, values: _Values, number: jax.Array, distance: jax.Array) -> _Values:
    """Put the values before a round into its slot, if it has one."""
    place = jnp.where(number % distance == 0, number // distance, jnp.int32(_SLOTS))
    return [x.at[place].set(v, mode="drop") for x, v in zip(slots, values, strict=True)]


def _thinned(slots: _Values, distance: jax.Array) -> tuple[_Values, jax.Array]:
    """Keep every other slot, so that half of them are free."""
    half = [jnp.concatenate([x[::2], jnp.zeros_like(x[::2])]) for x in slots]
    return half, distance * jnp.int32(2)


def _same(slots: _Values, distance: jax.Array) -> tuple[_Values, jax.Array]:
    return slots, distance
