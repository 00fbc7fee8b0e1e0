"""Which calls that a function stands for are its last ones, as far as their order tells."""

from dataclasses import dataclass


@dataclass
class LastCalls:
    """The calls of one function.

    Kinds of calls that take turns are functions of their own, each with a last call. Which that
    is, the steps from block to block tell: another as wide as the widest would leave the list.

    Attributes:
        places: the blocks that it may be called for, by fqn, each with its place among them.
        previous: the place of the block that it was called for last.
        direction: 1 if they are called in order, -1 if the other way round, 0 as long as only one
            was called.
        step: the widest step from one to the next.
        calls: how often it was called.
        lasts: how many of these may have been the last of a round.
    """

    places: dict[str, int]
    previous: int
    direction: int = 0
    step: int = 1
    calls: int = 1
    lasts: int = 0

    def is_to_compare(self, fqn: str) -> bool:
        """Note a call.

        Args:
            fqn: the name of the block.

        Returns:
            Whether to see that the block does what the function does. Of rounds that come again
            and again it is the first, the second, the fourth, and so on.
        """
        self.calls += 1
        step = self.places[fqn] - self.previous
        self.previous += step
        self.direction = self.direction or (step > 0) - (step < 0)
        self.step = max(self.step, step * self.direction)
        following = self.previous + (self.direction or 1) * self.step
        is_last = not 0 <= following < len(self.places)
        self.lasts += is_last
        is_due = is_last and self.lasts & (self.lasts - 1) == 0
        # Blocks that are called in no order are each called once.
        return is_due or self.calls == len(self.places)
