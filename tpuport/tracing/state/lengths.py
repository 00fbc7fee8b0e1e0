"""Sizes and numbers among the arguments of a call that grow from one call to the next.

A decoder is called with a cache that is longer each time, and with the position of the token. One
program serves all those calls: a size is data, next to an array of the largest size, and so is a
number. Each of them is linear in one count.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Steps:
    """A number that grows: `start + step * count`."""

    start: int
    step: int

    def at(self, count: int) -> int:
        """Return the number at a count."""
        return self.start + self.step * count

    def count(self, value: int) -> int | None:
        """Return the count at which it is `value`, None if there is none."""
        count, rest = divmod(value - self.start, self.step)
        return None if rest else count


@dataclass(frozen=True)
class Seen:
    """What can grow in a call: the sizes of its tensors, and its strings and numbers in order."""

    sizes: tuple[tuple[int, ...], ...]
    statics: tuple[Any, ...]


@dataclass(frozen=True)
class Lengths:
    """The sizes and numbers of calls that grow, as functions of one count.

    Attributes:
        first: A call of the series. What does not grow is the same in all.
        sizes: By leaf and dim.
        numbers: By their place among the strings and numbers.
        low: The smallest count.
        high: The largest one.
    """

    first: Seen
    sizes: tuple[tuple[tuple[int, int], Steps], ...]
    numbers: tuple[tuple[int, Steps], ...]
    low: int
    high: int

    def largest(self, leaf: int) -> tuple[int, ...]:
        """Return the sizes that a tensor has at most."""
        sizes = list(self.first.sizes[leaf])
        for (at, dim), steps in self.sizes:
            if at == leaf:
                sizes[dim] = steps.at(self.high)
        return tuple(sizes)

    @property
    def leaves(self) -> set[int]:
        """Return the tensors that grow."""
        return {leaf for (leaf, _), _ in self.sizes}

    def count(self, seen: Seen) -> int | None:
        """Return the count of a call; None if it is none of this series."""
        found = {s.count(seen.sizes[leaf][dim]) for (leaf, dim), s in self.sizes}
        found |= {steps.count(seen.statics[place]) for place, steps in self.numbers}
        count = found.pop() if len(found) == 1 else None
        if count is None or not self.low <= count <= self.high:
            return None
        sizes = [list(known) for known in self.first.sizes]
        statics = list(self.first.statics)
        for (leaf, dim), steps in self.sizes:
            sizes[leaf][dim] = steps.at(count)
        for place, steps in self.numbers:
            statics[place] = steps.at(count)
        return count if Seen(tuple(map(tuple, sizes)), tuple(statics)) == seen else None


def series(first: Seen, last: Seen, *, samples: bool = False) -> Lengths | None:
    """Return the series that two calls of one form belong to; None if not all of them grows.

    What differs by a multiple of what something else differs by is linear in the same count.

    Args:
        first: A call.
        last: Another one.
        samples: Whether the first dim of several may differ, and calls may get shorter. It
            counts samples, and room for many would be computed, too.
    """
    sizes: list[tuple[tuple[int, int], int]] = []
    for leaf, (was, now) in enumerate(zip(first.sizes, last.sizes, strict=True)):
        sizes += [
            ((leaf, d), b - a) for d, (a, b) in enumerate(zip(was, now, strict=True)) if a != b
        ]
    numbers: list[tuple[int, int]] = []
    for place, (old, new) in enumerate(zip(first.statics, last.statics, strict=True)):
        if old != new:
            if type(old) is not int or type(new) is not int:
                return None
            numbers.append((place, new - old))
    if not samples and any(dim == 0 and len(last.sizes[leaf]) > 1 for (leaf, dim), _ in sizes):
        return None
    every = [step for _, step in [*sizes, *numbers]]
    if every and max(every) < 0 and (samples or not sizes):
        return series(last, first, samples=samples)
    if not every or min(every) < 1:
        return None
    unit = math.gcd(*every)
    return Lengths(
        last,
        tuple((at, Steps(last.sizes[at[0]][at[1]], step // unit)) for at, step in sizes),
        tuple((at, Steps(last.statics[at], step // unit)) for at, step in numbers),
        0,
        0,
    )
