"""A prediction of which reuse of a traced block is the last, to retrace that one as a check."""

from dataclasses import dataclass


@dataclass
class LastCalls:
    """The calls of one function.

    Kinds of calls that alternate are separate functions, each with a last call. The steps from
    block to block predict it: one more step of the widest size would leave the list.

    Attributes:
        places: The index of each block that may reuse the function, by fqn.
        previous: The index of the block of the last call.
        direction: 1 if blocks are called in order, -1 if in reverse, 0 as long as only one was
            called.
        step: The widest step from one block to the next.
        calls: How many calls there were.
        lasts: How many of these may have been the last of a round.
    """

    places: dict[str, int]
    previous: int
    direction: int = 0
    step: int = 1
    calls: int = 1
    lasts: int = 0

    def is_to_compare(self, fqn: str) -> bool:
        """Record a call, and decide whether to check it.

        Args:
            fqn: The name of the block.

        Returns:
            Whether to check that the block computes what the function does. Of repeated rounds it
            is the first, the second, the fourth, and so on.
        """
        self.calls += 1
        step = self.places[fqn] - self.previous
        self.previous += step
        self.direction = self.direction or (step > 0) - (step < 0)
        self.step = max(self.step, step * self.direction)
        following = self.previous + (self.direction or 1) * self.step
        is_last = not 0 <= following < len(self.places)
        self.lasts += is_last
        # Due at powers of two, so that many rounds cost few checks.
        is_due = is_last and self.lasts & (self.lasts - 1) == 0
        # Blocks that are called in no order are each called once.
        return is_due or self.calls == len(self.places)
