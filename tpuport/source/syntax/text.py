"""Source text addressed by offset, and passages whose lines remember where they came from."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Line:
    """One line of a passage.

    Attributes:
        text: The line without its line break.
        origin: The line of the user's file that it comes from.
        fixed: Whether it starts inside a string, where indentation is content.
    """

    text: str
    origin: int
    fixed: bool = False


@dataclass(frozen=True)
class Passage:
    """A piece of text, as lines that remember where they came from. It has at least one line."""

    lines: tuple[Line, ...]

    @classmethod
    def of(cls, text: str, origin: int) -> "Passage":
        """Make a passage of new text, all of it attributed to one line of the user's file."""
        return cls(tuple(Line(line, origin) for line in text.split("\n")))

    @classmethod
    def stack(cls, passages: Iterable["Passage"]) -> "Passage":
        """Stack passages below each other, each starting on a line of its own."""
        return cls(tuple(line for passage in passages for line in passage.lines))

    @property
    def text(self) -> str:
        """Return the text, lines joined by line breaks."""
        return "\n".join(line.text for line in self.lines)

    def __add__(self, other: "Passage | str") -> "Passage":
        last = self.lines[-1]
        if isinstance(other, str):
            other = Passage.of(other, last.origin)
        first = other.lines[0]
        origin = last.origin if last.text.strip() else first.origin
        joint = Line(last.text + first.text, origin, last.fixed)
        return Passage((*self.lines[:-1], joint, *other.lines[1:]))

    def indented(self, by: str) -> "Passage":
        """Return the passage with every line indented that has content and may be indented."""
        return Passage(
            tuple(
                line if line.fixed or not line.text.strip() else replace(line, text=by + line.text)
                for line in self.lines
            )
        )

    def dedented(self, by: str) -> "Passage":
        """Return the passage without `by` at the start of lines, except inside strings."""
        return Passage(
            tuple(
                line if line.fixed else replace(line, text=line.text.removeprefix(by))
                for line in self.lines
            )
        )


@dataclass(frozen=True)
class Edit:
    """Replacement of the text from offset `start` up to `end` by `passage`."""

    start: int
    end: int
    passage: Passage


class SourceText:
    """Text with line breaks `\\n`, addressed by offset in characters.

    Args:
        text: The text.
        origins: For each line the line of the user's file that it comes from; counted from 1 if
            left out.
        original: The lines of the user's file by number; the lines of `text` if left out.
    """

    def __init__(
        self,
        text: str,
        origins: Sequence[int] | None = None,
        original: Mapping[int, str] | None = None,
    ) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.origins = tuple(origins or range(1, len(self.lines) + 1))
        self.original = original or dict(zip(self.origins, self.lines, strict=True))
        if len(self.origins) != len(self.lines):
            raise ValueError(
                f"Expected an origin for each of {len(self.lines)} lines, got {len(self.origins)}."
            )
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        # Lines that start inside a string. Only a parser knows them, so `Module` sets them.
        self.fixed: frozenset[int] = frozenset()

    def line_start(self, line: int) -> int:
        """Return the offset of the first character of a line; lines count from 1."""
        return self._starts[line - 1]

    def line_end(self, line: int) -> int:
        """Return the offset of a line's end, without its line break."""
        return self._starts[line - 1] + len(self.lines[line - 1])

    def line_at(self, offset: int) -> int:
        """Return the line that contains an offset, counted from 1."""
        return bisect.bisect_right(self._starts, offset)

    def offset(self, line: int, byte_column: int) -> int:
        """Return the offset of a position in `ast` form, where columns count UTF-8 bytes."""
        return self.line_start(line) + self.column(line, byte_column)

    def column(self, line: int, byte_column: int) -> int:
        """Return the column in characters of a position in `ast` form."""
        text = self.lines[line - 1]
        if text.isascii():
            return byte_column
        return len(text.encode()[:byte_column].decode(errors="ignore"))

    def indentation(self, line: int) -> str:
        """Return the white space that a line starts with."""
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip())]

    def origin(self, line: int) -> int:
        """Return the line of the user's file that a line comes from."""
        return self.origins[line - 1]

    def shift(self, line: int) -> int | None:
        """Return how many columns further right a line is in the user's file; None if changed."""
        here, there = self.lines[line - 1], self.original.get(self.origin(line), "")
        return len(there) - len(here) if here.lstrip() == there.lstrip() else None

    def copy(self, start: int, end: int, edits: Iterable[Edit] = ()) -> Passage:
        """Copy the text between two offsets, with edits inside it applied.

        Raises:
            ValueError: two edits overlap, or one reaches outside.
        """
        made = self._plain(start, start)
        position = start
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
            if not position <= edit.start <= edit.end <= end:
                raise ValueError(f"The edit at {edit.start} overlaps another or leaves the text.")
            made = made + self._plain(position, edit.start) + edit.passage
            position = edit.end
        return made + self._plain(position, end)

    def _plain(self, start: int, end: int) -> Passage:
        first = self.line_at(start)
        pieces = self.text[start:end].split("\n")
        return Passage(
            tuple(
                Line(piece, self.origin(line), line in self.fixed and (line > first))
                for line, piece in enumerate(pieces, first)
            )
        )
