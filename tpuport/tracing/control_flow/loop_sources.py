"""What loops go over: ranges, rows of tensors, the rounds of a `while`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.foundation.plain_loops import run_round
from tpuport.tracing.control_flow.loop_items import ItemsWatch, Series
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.dynamic_shapes.extents import along, node_of

# Of fewer rounds, each is compiled by itself unless it makes a tensor longer: it is faster.
_MANY_ROUNDS = 32
# A buffer has a row for each round that there may be.
_MOST_ROUNDS = 1 << 16


def is_traced(value: Any) -> bool:
    """Return whether a value is a tensor or number of the trace."""
    return isinstance(value, (TracedTensor, *sym_numbers.SYMBOLIC))


class _CountedByPython:
    """What a loop does whose rounds Python counts."""

    @property
    def begins_ended(self) -> jax.Array:
        """Return whether there is no round."""
        return jnp.bool_(False)

    def index(self, number: jax.Array, rounds: int) -> NumberNode:
        """Return the number of a round, counted from those that are alike."""
        return NumberNode(number, int, 0, rounds - 1)

    def ends(self, number: jax.Array, is_last: jax.Array) -> jax.Array:
        """Return whether the loop ends after a round."""
        del number
        return is_last

    def ran(self, rounds: NumberNode) -> NumberNode:
        """Return how many rounds there were, of which the loop has counted so many."""
        return rounds

    def check(self) -> None:
        """Raise if the rounds do what a scan cannot."""


class RangeSource(_CountedByPython):
    """`for number in numbers: operands = body(number, *operands)`.

    If it `stops`, the body returns before the operands whether the loop ends after this round, and
    if it `tells`, whether that happened comes after the loop's own results.
    """

    def __init__(
        self, numbers: range, body: Callable[..., Any], *, stops: bool, tells: bool = False
    ) -> None:
        self.numbers, self.body, self.stops, self.tells = numbers, body, stops, tells
        self.functions, self.key = [body], numbers

    @property
    def may_end(self) -> bool:
        """Return whether a traced value may end the loop before its last round."""
        return self.stops

    @property
    def is_long(self) -> bool:
        """Return whether it has so many rounds that it is one program in any case."""
        return len(self.numbers) >= _MANY_ROUNDS

    def is_over(self, number: int, operands: Any) -> Any:
        """Return whether the loop has ended before a round."""
        del operands
        return number >= len(self.numbers)

    def round(self, number: int, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run a round; return whether the loop ends after it, and the operands."""
        return self.run(self.numbers[number], operands)

    def run(self, number: Any, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run the round with this number, which may be traced."""
        made = run_round(self.body, number, operands)
        return (made[0], made[1:]) if self.stops else (False, made)

    def first(self, number: int) -> Any:
        """Return what a round before those that are alike gets."""
        return self.numbers[number]

    def arrays(self, peel: int) -> list[jax.Array]:
        """Return what the scan goes over besides the numbers of the rounds that are alike."""
        del peel
        return []

    def item(self, peel: int, index: NumberNode, arrays: list[jax.Array]) -> Any:
        """Return what a round gets, which is counted from those that are alike."""
        del arrays
        start = self.numbers.start + peel * self.numbers.step
        return sym_numbers.from_node(along(index, start, self.numbers.step))


class CountedSource(RangeSource):
    """`for number in range(*given)`, of which numbers depend on data.

    Rounds past the last one are left out by a `lax.cond`, so there may be none.

    Args:
        given: What `range` is called with.
        body: The body.
        stops: Whether it returns whether the loop ends after it.
    """

    def __init__(self, given: tuple[Any, ...], body: Callable[..., Any], *, stops: bool) -> None:
        start, stop = (0, given[0]) if len(given) == 1 else given[:2]
        step = given[2] if len(given) == 3 else 1
        if is_traced(step) or not step or is_traced(start):
            raise port_error(
                "a loop over a range whose start or step depends on data",
                code="TPU104",
                remedy="let the range start at a number that Python knows, and count up by one",
            )
        self.count = _count(int(start), node_of(stop), step)
        if self.count.high > _MOST_ROUNDS:
            raise port_error(
                "a loop over a range whose end depends on data, with no upper bound",
                code="TPU104",
                remedy="bound the number of rounds, as by min(rounds, 100)",
            )
        numbers = range(start, start + step * int(self.count.high), step)
        super().__init__(numbers, body, stops=stops)
        self.key = ("counted", numbers, self.count.low)

    @property
    def is_long(self) -> bool:
        """Return that it is one program in any case: it cannot be run round by round."""
        return True

    @property
    def may_end(self) -> bool:
        """Return that a traced value may end the loop before its last round."""
        return True

    def index(self, number: jax.Array, rounds: int) -> NumberNode:
        """Return the number of a round, which is known to be below the number of rounds."""
        rest = NumberNode(self.count.value - 1 - number, int, 0, rounds - 1)
        assert self.count.expr is not None
        assert rest.expr is not None
        below = self.count.expr.plus(Linear(-1)).plus(rest.expr, -1)
        return NumberNode(number, int, 0, rounds - 1, below)

    def round(self, number: int, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run a round as the program does, which does not know its number."""
        index = self.index(jnp.int32(number), len(self.numbers))
        return self.run(self.item(0, index, []), operands)

    @property
    def begins_ended(self) -> jax.Array:
        """Return whether there is no round."""
        return self.count.value <= 0

    def ends(self, number: jax.Array, is_last: jax.Array) -> jax.Array:
        """Return whether the loop ends after a round."""
        return is_last | (number + 1 >= self.count.value)

    def ran(self, rounds: NumberNode) -> NumberNode:
        """Return how many rounds there were."""
        return rounds if self.stops else self.count


def _count(start: int, stop: NumberNode, step: int) -> NumberNode:
    """Return how many numbers a range has."""
    if (start, step) == (0, 1) and stop.low >= 0:
        return stop
    if step == 1:
        rest = stop.sub(node_of(start))  # type: ignore[attr-defined]
        return rest if rest.low >= 0 else rest.sym_max(node_of(0))
    ends = [
        max(0, math.ceil((end - start) / step)) if math.isfinite(end) else math.inf
        for end in (stop.low, stop.high)
    ]
    value = jnp.maximum(-((start - stop.value) // step), 0)
    return NumberNode(value, int, min(ends), max(ends))


class ItemsSource(RangeSource):
    """`for item in series: operands = body(item, *operands)`."""

    def __init__(
        self, items: Any, series: Series, body: Callable[..., Any], *, stops: bool, tells: bool
    ) -> None:
        super().__init__(range(series.count), body, stops=stops, tells=tells)
        self.items = items
        self.series, self.key, self.watch = series, series.key, ItemsWatch(series)
        self._made: list[Any] | None = None

    def round(self, number: int, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run a round; return whether the loop ends after it, and the operands."""
        if self._made is None:
            self._made = list(self.items)
        return self.run(self._made[number], operands)

    def first(self, number: int) -> Any:
        """Return what a round before those that are alike gets."""
        return self.series.first(number)

    def arrays(self, peel: int) -> list[jax.Array]:
        """Return what the scan goes over besides the numbers of the rounds that are alike."""
        return self.series.arrays(slice(peel, len(self.numbers)))

    def item(self, peel: int, index: NumberNode, arrays: list[jax.Array]) -> Any:
        """Return what a round gets, which is counted from those that are alike."""
        return self.series.item(peel, index, iter(arrays), self.watch.refuse)

    def check(self) -> None:
        """Raise if the rounds do what a scan cannot."""
        self.watch.check()


class WhileSource(_CountedByPython):
    """`while test(*operands): operands = body(*operands)`, where Python knows what `test` says."""

    stops = tells = is_long = may_end = False

    def __init__(self, test: Callable[..., Any], body: Callable[..., Any]) -> None:
        self.test, self.body = test, body
        self.functions, self.key = [test, body], None

    def is_over(self, number: int, operands: Any) -> Any:
        """Return whether the loop has ended before a round."""
        del number
        again = self.test(*operands)
        return again if is_traced(again) else not again

    def round(self, number: int, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run a round; return that the loop does not end after it, and the operands."""
        return self.run(number, operands)

    def run(self, number: Any, operands: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run a round."""
        del number
        return False, tuple(self.body(*operands))

    def first(self, number: int) -> Any:
        """Return nothing: the body takes no item."""
        del number

    def arrays(self, peel: int) -> list[jax.Array]:
        """Return nothing: the scan goes over numbers only."""
        del peel
        return []

    def item(self, peel: int, index: NumberNode, arrays: list[jax.Array]) -> Any:
        """Return nothing: the body takes no item."""
        del peel, index, arrays


Source = RangeSource | WhileSource
