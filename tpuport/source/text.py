"""Source text by offset, and pieces of it whose lines remember where they came from."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Line:
    """One line of a passage.

    Attributes:
        text: The line without its line break.
        origin: The line of the user's file that it stands for.
        fixed: Whether its start lies inside a string, where indentation is content.
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
        """New text, all of it attributed to one line of the user's file."""
        return cls(tuple(Line(line, origin) for line in text.split("\n")))

    @classmethod
    def stack(cls, passages: Iterable["Passage"]) -> "Passage":
        """Passages below each other, each starting on a line of its own."""
        return cls(tuple(line for passage in passages for line in passage.lines))

    @property
    def text(self) -> str:
        """The text, lines joined by line breaks."""
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
        """With more indentation before every line that has content and can take it."""
        return Passage(
            tuple(
                line if line.fixed or not line.text.strip() else replace(line, text=by + line.text)
                for line in self.lines
            )
        )

    def dedented(self, by: str) -> "Passage":
        """Without `by` at the start of each line that has it and does not lie inside a string."""
        return Passage(
            tuple(
                line if line.fixed else replace(line, text=line.text.removeprefix(by))
                for line in self.lines
            )
        )


@dataclass(frozen=True)
class Edit:
    """Put `passage` in the place of the text from offset `start` up to `end`."""

    start: int
    end: int
    passage: Passage


class SourceText:
    """Text with line breaks `\\n`, addressed by offset in characters.

    Args:
        text: The text.
        origins: For each line the line of the user's file that it stands for; counted from 1 if
            left out.
        original: The lines of the user's file by number; these very lines if left out.
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
        # Lines whose start lies inside a string: whoever parses the text fills this in.
        self.fixed: frozenset[int] = frozenset()

    def line_start(self, line: int) -> int:
        """Offset of the first character of a line, counted from 1."""
        return self._starts[line - 1]

    def line_end(self, line: int) -> int:
        """Offset of a line's end, without its line break."""
        return self._starts[line - 1] + len(self.lines[line - 1])

    def line_at(self, offset: int) -> int:
        """The line that an offset lies on, counted from 1."""
        return bisect.bisect_right(self._starts, offset)

    def offset(self, line: int, byte_column: int) -> int:
        """Offset of a position as `ast` gives it: its columns count UTF-8 bytes."""
        return self.line_start(line) + self.column(line, byte_column)

    def column(self, line: int, byte_column: int) -> int:
        """Column in characters of a position as `ast` gives it."""
        text = self.lines[line - 1]
        if text.isascii():
            return byte_column
        return len(text.encode()[:byte_column].decode(errors="ignore"))

    def indentation(self, line: int) -> str:
        """The white space that a line starts with."""
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip())]

    def origin(self, line: int) -> int:
        """The line of the user's file that a line stands for."""
        return self.origins[line - 1]

    def shift(self, line: int) -> int | None:
        """How far right a line stands in the user's file, or None if it reads otherwise there."""
        here, there = self.lines[line - 1], self.original.get(self.origin(line), "")
        return len(there) - len(here) if here.lstrip() == there.lstrip() else None

    def copy(self, start: int, end: int, edits: Iterable[Edit] = ()) -> Passage:
        """The text between two offsets, with the edits that lie inside it made.

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
