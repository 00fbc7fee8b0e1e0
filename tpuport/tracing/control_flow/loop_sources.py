"""What a rewritten loop goes over, round by round: a range, items of a series, or a test."""

from collections.abc import Callable
from typing import Any

import jax

from tpuport.tracing.control_flow.loop_items import ItemsWatch, Series
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.dynamic_shapes.extents import along

# Of fewer rounds, each is compiled by itself unless it makes a tensor longer: it is faster.
_MANY_ROUNDS = 32


class RangeSource:
    """`for number in numbers: operands = body(number, *operands)`.

    If it `stops`, the body returns before the operands whether the loop ends after this round, and
    if it `tells`, whether that happened comes after the loop's own results.
    """

    def __init__(
        self, numbers: range, body: Callable[..., Any], *, stops: bool, tells: bool
    ) -> None:
        self.numbers, self.body, self.stops, self.tells = numbers, body, stops, tells
        self.functions, self.key = [body], numbers

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
        made = tuple(self.body(number, *operands))
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

    def check(self) -> None:
        """Raise if the rounds do what a scan cannot."""


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


class WhileSource:
    """`while test(*operands): operands = body(*operands)`, where Python knows what `test` says."""

    stops = tells = is_long = False

    def __init__(self, test: Callable[..., Any], body: Callable[..., Any]) -> None:
        self.test, self.body = test, body
        self.functions, self.key = [test, body], None

    def is_over(self, number: int, operands: Any) -> Any:
        """Return whether the loop has ended before a round."""
        del number
        again = self.test(*operands)
        return again if is_traced_value(again) else not again

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

    def check(self) -> None:
        """Raise if the rounds do what a scan cannot."""


LoopSource = RangeSource | WhileSource


def is_traced_value(value: Any) -> bool:
    """Return whether a value is a tensor or number of the trace."""
    return isinstance(value, (TracedTensor, *sym_numbers.SYMBOLIC))
