"""The base class of causes, and the records that they take and return."""

from dataclasses import dataclass
from typing import ClassVar

from tpuport.foundation.user_frames import CodePlace


@dataclass(frozen=True)
class Raised:
    """An exception as causes see it.

    It holds names and text only, so that neither torch nor jax is imported to examine one.

    Attributes:
        names: Its class and the bases of that, each as `jax.errors.JaxRuntimeError`.
        message: Its text.
        place: The user's line that it comes from, if the traceback has one.
        ported: Whether it left a model that `tpuport.convert` ported.
        inside: The library, tpuport or torchax, of which a line failed that raises nothing on
            purpose.
        raised_at: That line, as `package/file.py:line`.
        module: The class of the user's module whose `forward` was running, if one was.
    """

    names: tuple[str, ...]
    message: str
    place: CodePlace | None = None
    ported: bool = False
    inside: str | None = None
    raised_at: str | None = None
    module: str | None = None

    def is_a(self, *wanted: str) -> bool:
        """Return whether it is of a class, given by package and name: `jax.UnexpectedTracerError`.

        The modules between the two have changed from release to release.
        """
        return any(
            f"{name.partition('.')[0]}.{name.rpartition('.')[2]}" in wanted for name in self.names
        )

    def says(self, *parts: str) -> bool:
        """Return whether its text contains one of these."""
        return any(part in self.message for part in parts)


@dataclass(frozen=True)
class Explanation:
    """A cause's explanation of an exception.

    Attributes:
        problem: What happened, in one sentence without a full stop.
        remedies: What to do, the best first, each in the imperative.
        value: The value that it is about: dtype, shape, where it comes from.
        details: Further facts from the exception's text, one per line.
    """

    problem: str
    remedies: tuple[str, ...]
    value: str | None = None
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """A real exception, and the explanation that the cause must give.

    Attributes:
        name: Its class, such as `jax.errors.JaxRuntimeError`.
        message: Its text, without uninformative parts.
        where: The code that raises it, or where it was reported.
        shows: The explanation's problem, to the letter.
        inside: The library of which a line failed, if that tells the cause.
    """

    name: str
    message: str
    where: str
    shows: str
    inside: str | None = None

    def raised(self) -> Raised:
        """Return it as causes see it."""
        return Raised((self.name, "builtins.Exception"), self.message, inside=self.inside)


class Cause:
    """Base class of causes of exceptions.

    The docstring of a subclass is its section in the documentation: one line on what happens, then
    the reason, for people who know PyTorch and not JAX. `RULES` are the rules of `tpuport lint`
    that find such lines, the most common first; the diagnosis names one if it finds the user's
    line. `RECORDED` are real exceptions with this cause. `LAST` says that all others are asked
    before.
    """

    RULES: ClassVar[tuple[str, ...]] = ()
    RECORDED: ClassVar[tuple[Recorded, ...]] = ()
    LAST: ClassVar[bool] = False

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain an exception; return None if it has another cause."""
        raise NotImplementedError
