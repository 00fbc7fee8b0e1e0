"""Text and HTML building blocks of all reports, which escape names and paths."""

import html
import unicodedata
from collections.abc import Iterable


def visible(text: object) -> str:
    """Escape the control, format and surrogate characters of text; tabs become spaces.

    Paths and source lines come from untrusted files: an escape sequence must not reach a terminal,
    nor a bidirectional override reorder a line on a page.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs")
        else char
        for char in text.expandtabs(4)
    )


def plural(num: int, noun: str) -> str:
    """Format a count with its noun: `1 value`, `3 values`, `2 branches`."""
    suffix = "" if num == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{num:,} {noun}{suffix}"


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()

    def __html__(self) -> str:
        """Return itself, as templates ask for by this name."""
        return self


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Make an SVG element; every child and attribute that is not Markup is escaped.

    Args:
        name: The element.
        children: Text or Markup.
        attributes: `class_` is `class`, `stroke_width` is `stroke-width`; None is left out and
            True is an attribute without a value.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(visible(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Join children, escaping those that are not Markup."""
    return Markup(
        "".join(c if isinstance(c, Markup) else html.escape(visible(c)) for c in children)
    )
