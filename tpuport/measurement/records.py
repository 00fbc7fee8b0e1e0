"""Results of measurements, as the worker sends them and the report keeps them."""

from dataclasses import dataclass, field
from enum import StrEnum


class Quantity(StrEnum):
    """What the number of a result is."""

    RATE = "rate"
    SECONDS = "seconds"
    ERROR = "error"


@dataclass(frozen=True)
class Device:
    """The devices that a worker has.

    Attributes:
        platform: JAX's name of the platform: `tpu`, `gpu` or `cpu`.
        kind: Name of the kind of device.
        count: Number of devices.
        chip: Chip whose figures the results are compared with; "" if there are none.
        small: Whether sizes are small and numbers mean nothing, as on a CPU.
    """

    platform: str
    kind: str
    count: int
    chip: str
    small: bool


@dataclass(frozen=True)
class Result:
    """One number.

    Attributes:
        job: Name of the job that it belongs to.
        name: What was measured.
        kind: Whether it is a rate, a time or an error.
        value: Operations or bytes a second, seconds, or an error relative to the reference.
        unit: `FLOP/s`, `op/s`, `B/s`, `s`; "" for an error.
        expected: What the cost model says; for an error, its limit. None if there is nothing.
        remark: Sizes, and how `expected` follows.
        feeds: Rate of `cost.Calibration` that it decides, "" for none.
    """

    job: str
    name: str
    kind: Quantity
    value: float
    unit: str = ""
    expected: float | None = None
    remark: str = ""
    feeds: str = ""

    @property
    def ratio(self) -> float | None:
        """Return how much of the expected speed was reached: 1 is all, 0.5 is half as fast."""
        if self.expected is None or self.kind is Quantity.ERROR or self.value <= 0:
            return None
        if self.kind is Quantity.RATE:
            return self.value / self.expected
        return self.expected / self.value


@dataclass(frozen=True)
class FailedJob:
    """A job that gave no result, or one that is wrong.

    Attributes:
        job: Name of the job.
        text: What happened.
        fix: What to do about it: a command or a sentence.
    """

    job: str
    text: str
    fix: str


@dataclass(frozen=True)
class Measurements:
    """Everything that a run of the jobs gave.

    Attributes:
        device: The devices; None if the worker could not have any.
        results: Results, in the order in which they came.
        troubles: What failed, hung or was not begun.
        seconds: Seconds by job.
    """

    device: Device | None
    results: tuple[Result, ...] = ()
    troubles: tuple[FailedJob, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
