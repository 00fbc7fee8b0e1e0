"""The forms in which a run's outcome is written, each by one function from outcome to text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from tpuport.lint.records import Outcome


@dataclass(frozen=True)
class Style:
    """How a form for people is written.

    Attributes:
        color: Whether to use the colours of a terminal.
        summary: Whether to end with the porting summary.
    """

    color: bool = False
    summary: bool = True


Writer = Callable[[Outcome, Style], str]

# Name of a form -> its module here, which is loaded when it is asked for, and function.
FORMATS: Mapping[str, tuple[str, str]] = {
    "full": ("text", "full"),
    "concise": ("text", "concise"),
    "json": ("machine", "to_json"),
    "sarif": ("sarif", "to_sarif"),
    "github": ("machine", "to_github"),
    "html": ("page", "to_html"),
    "statistics": ("text", "statistics"),
}


def write(outcome: Outcome, form: str, style: Style) -> str:
    """An outcome in one of `FORMATS`, ending in a line break unless there is nothing to say."""
    module, function = FORMATS[form]
    writer: Writer = getattr(import_module(f"{__name__}.{module}"), function)
    return writer(outcome, style)
