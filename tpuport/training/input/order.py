"""The order of samples: which of them make the batches of an epoch."""

from typing import Any

import numpy as np

from tpuport.foundation.errors import UsageError
from tpuport.training.input.reading import own_randomness, seed_all


class Order:
    """The samples of each batch of an epoch.

    Args:
        length: length of the dataset.
        batch_size: rows of a batch over all processes; None where items are batches.
        shuffle: a new order in each epoch, the same for the same seed.
        seed: random seed of the order.
        pad: fill the last batch with samples that it has already; else leave it out.
        sampler: gives the order instead: indices, or lists of them with `grouped`.
        grouped: `sampler` gives batches of indices.
    """

    def __init__(
        self,
        length: int,
        batch_size: int | None,
        *,
        shuffle: bool,
        seed: int,
        pad: bool,
        sampler: Any = None,
        grouped: bool = False,
    ) -> None:
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed
        self.pad, self.sampler, self.grouped = pad, sampler, grouped
        self.whole = batch_size is None
        self.num_batches = self._num_batches()
        if self.num_batches == 0:
            raise UsageError(
                f"{length} samples make no batch of {batch_size}. What to do: give a smaller"
                " batch_size, or last='pad'"
            )

    @property
    def short_by(self) -> int:
        """Return how many samples the last batch of an epoch lacks."""
        return 0 if self.batch_size is None or self.grouped else -self.length % self.batch_size

    def _num_batches(self) -> int:
        if self.grouped:
            return len(self.sampler)
        size = self.batch_size or 1
        return -(-self.length // size) if self.pad else self.length // size

    def epoch(self, epoch: int) -> list[tuple[np.ndarray, int | None]]:
        """Return the indices of each batch, and how many of them are not padding."""
        if self.grouped:
            groups = self._asked(epoch)
        else:
            indices, size = np.asarray(self._indices(epoch)), self.batch_size or 1
            groups = [indices[i : i + size] for i in range(0, len(indices), size)]
        size = self.batch_size or 1
        made: list[tuple[np.ndarray, int | None]] = []
        for number, group in enumerate(groups):
            if len(group) > size:
                raise UsageError(
                    f"the batch sampler gives {len(group)} samples, and batch_size is {size}. What"
                    " to do: pass batch_size= the most that it gives"
                )
            if len(group) < size and not self.pad:
                if number + 1 < len(groups):
                    raise UsageError(
                        f"batch {number} of the batch sampler has {len(group)} samples of {size},"
                        " and last='drop' would leave it out, though it is not the last one. What"
                        " to do: last='pad'"
                    )
                continue
            made.append((np.resize(np.asarray(group), size), len(group)))
        if not made:
            raise UsageError(
                f"epoch {epoch} has no batch of {size} samples. What to do: a smaller batch_size,"
                " last='pad', or look at what the sampler gives"
            )
        return made

    def _indices(self, epoch: int) -> Any:
        if self.sampler is not None:
            return self._asked(epoch)
        if self.shuffle:
            return np.random.default_rng((self.seed, epoch)).permutation(self.length)
        return np.arange(self.length)

    def _asked(self, epoch: int) -> list[Any]:
        """Return the order of a sampler in an epoch, which has to be reproducible.

        Raises:
            UsageError: it gives another order when it is asked again.
        """
        asked, again = self._asked_once(epoch), self._asked_once(epoch)
        if len(asked) != len(again) or not all(map(np.array_equal, asked, again)):
            raise UsageError(
                f"the {type(self.sampler).__name__} gives another order each time it is asked, so"
                " processes would read different ones, and a resumed run would lose samples."
                " What to do: draw from torch's, numpy's or Python's global random numbers, which"
                " are seeded for each epoch, or make its generator anew in __iter__, from the"
                " epoch that set_epoch tells"
            )
        return asked

    def _asked_once(self, epoch: int) -> list[Any]:
        both: list[Any] = [self.sampler, getattr(self.sampler, "sampler", None)]
        for one in both:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
            generator = getattr(one, "generator", None)
            if generator is not None and hasattr(generator, "manual_seed"):
                generator.manual_seed(self.seed + epoch)
        with own_randomness():
            seed_all(self.seed, epoch)
            return list(self.sampler)
