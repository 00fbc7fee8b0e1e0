"""What a file of this folder declares, and what it is shown of an exception."""

from dataclasses import dataclass
from typing import ClassVar

from tpuport.diagnosis.frames import Place


@dataclass(frozen=True)
class Raised:
    """An exception as causes see it.

    By names and text only: neither torch nor jax is imported to look at one.

    Attributes:
        names: Its class and the bases of that, each as `jax.errors.JaxRuntimeError`.
        message: Its text.
        place: The user's line that it comes from, if the traceback has one.
        ported: Whether it left a model that `tpuport.convert` ported.
    """

    names: tuple[str, ...]
    message: str
    place: Place | None = None
    ported: bool = False

    def is_a(self, *wanted: str) -> bool:
        """Whether it is of a class, each given by package and name: `jax.UnexpectedTracerError`.

        What is between the two has changed from release to release.
        """
        return any(
            f"{name.partition('.')[0]}.{name.rpartition('.')[2]}" in wanted for name in self.names
        )

    def says(self, *parts: str) -> bool:
        """Whether its text has one of these in it."""
        return any(part in self.message for part in parts)


@dataclass(frozen=True)
class Explanation:
    """What a cause says about an exception.

    Attributes:
        problem: What happened, in one sentence without a full stop.
        remedies: What to do, the best first, each in the imperative.
        value: The value that it is about: dtype, shape, where it comes from.
        details: What else the exception's text holds, a line each.
    """

    problem: str
    remedies: tuple[str, ...]
    value: str | None = None
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """A real exception, and what the cause says about it.

    Attributes:
        name: Its class, such as `jax.errors.JaxRuntimeError`.
        message: Its text, shortened where it says nothing more.
        where: How it came about, or where it was reported.
        shows: The explanation's problem, to the letter.
    """

    name: str
    message: str
    where: str
    shows: str


class Cause:
    """Why an exception is raised.

    The docstring is the page in the documentation: a line of what happens, then why, for people
    who know PyTorch and not JAX. `RULES` are the rules of `tpuport lint` that find such lines, the
    most common first; one of them is named in the diagnosis if it finds the user's line.
    `RECORDED` are exceptions that the cause stands for.
    """

    RULES: ClassVar[tuple[str, ...]] = ()
    RECORDED: ClassVar[tuple[Recorded, ...]] = ()

    def explain(self, raised: Raised) -> Explanation | None:
        """What to say about an exception; None if it has another cause."""
        raise NotImplementedError
