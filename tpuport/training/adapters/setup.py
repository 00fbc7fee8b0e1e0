"""The result of converting a framework's configuration."""

from dataclasses import dataclass

from tpuport.training.step import TrainStep


@dataclass(frozen=True)
class Setup:
    """A training step, and the numbers of the loop around it.

    Attributes:
        step: the step, for `fit` or a loop of your own.
        steps: updates of the entire run.
        batch_size: rows of one update, over all parts and devices; None where the loader decides
            it.
        seed: random seed of the run; None if the configuration has none.
    """

    step: TrainStep
    steps: int
    batch_size: int | None = None
    seed: int | None = None
