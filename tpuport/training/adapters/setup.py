"""What a framework's configuration comes to."""

from dataclasses import dataclass

from tpuport.training.step import TrainStep


@dataclass(frozen=True)
class Setup:
    """A training step, and the numbers of the loop around it.

    Attributes:
        step: for `fit` or a loop of your own.
        steps: updates of the whole run.
        batch_size: rows of one update, of all parts and devices together; None where it is the
            loader's.
        seed: of the run; None where nothing is said.
    """

    step: TrainStep
    steps: int
    batch_size: int | None = None
    seed: int | None = None
