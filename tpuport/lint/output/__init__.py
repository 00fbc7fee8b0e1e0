"""Output formats of a run's outcome, each written by one function from outcome to text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from tpuport.lint.records import Outcome


@dataclass(frozen=True)
class Style:
    """Style of the formats for people.

    Attributes:
        color: Whether to use the colours of a terminal.
        summary: Whether to end with the porting summary.
    """

    color: bool = False
    summary: bool = True


Writer = Callable[[Outcome, Style], str]

# Name of a format -> its module in this package, loaded on demand, and its function.
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
    """Write an outcome in one of `FORMATS`, ending in a line break unless it is empty."""
    module, function = FORMATS[form]
    writer: Writer = getattr(import_module(f"{__name__}.{module}"), function)
    return writer(outcome, style)
