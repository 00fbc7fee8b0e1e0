"""Comments that ask to ignore findings: `# tpuport: ignore[TPU101]`, `# tpuport: ignore-file`."""

import difflib
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from tpuport.lint.records import Ignore

_DIRECTIVE = re.compile(r"#\s*tpuport:\s*([\w-]+)\s*(?:\[([^\]]*)\])?", re.IGNORECASE)
_NAMES = ("ignore", "ignore-file")
_BREAKS = {tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}


@dataclass(frozen=True)
class Directive:
    """A comment that asks to ignore findings, and the lines that it applies to.

    Attributes:
        ignore: The record of the comment for reports.
        first: The first line of the statement, or of its head, that contains the comment.
        last: The last line of that statement or head.
    """

    ignore: Ignore
    first: int
    last: int

    def covers(self, code: str, line: int, end_line: int) -> bool:
        """Return whether the comment asks to ignore a finding of this code in these lines."""
        ignore = self.ignore
        if ignore.unknown or (ignore.codes and code not in ignore.codes):
            return False
        if ignore.whole_file or ignore.line == line:
            return True
        within = self.first <= line <= self.last
        return within and (ignore.line == self.last or line <= ignore.line <= end_line)


def find_directives(text: str) -> list[Directive]:
    """Find the comments that ask to ignore findings, in the order of the text."""
    if "tpuport" not in text.lower():
        return []
    lines = text.split("\n")
    found: list[Directive] = []
    for first, last, comments in _statements(text):
        for token in comments:
            for match in _DIRECTIVE.finditer(token.string):
                ignore = _ignore(match, token, lines[token.start[0] - 1])
                if ignore is not None:
                    found.append(Directive(ignore, first, last))
    return found


def _ignore(match: re.Match[str], token: tokenize.TokenInfo, source: str) -> Ignore | None:
    name = match[1].lower()
    # Only a near miss counts as a misspelt directive; other words are prose about tpuport.
    if name not in _NAMES and not difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.75):
        return None
    codes = [code.strip().upper() for code in (match[2] or "").split(",")]
    return Ignore(
        line=token.start[0],
        column=token.start[1] + match.start(),
        text=match[0].strip(),
        codes=tuple(code for code in codes if code),
        whole_file=name == "ignore-file",
        source=source,
        unknown="" if name in _NAMES else match[1],
    )


def _statements(text: str) -> Iterator[tuple[int, int, list[tokenize.TokenInfo]]]:
    """Yield the first and last line of each logical line with comments, and those comments."""
    first: int | None = None
    comments: list[tokenize.TokenInfo] = []
    for token in _tokens(text):
        if token.type == tokenize.COMMENT:
            comments.append(token)
        elif token.type not in _BREAKS and first is None:
            first = token.start[0]
        # A comment on a line of its own applies to that line only.
        if token.type == tokenize.NEWLINE or (token.type == tokenize.NL and first is None):
            if comments:
                yield first or token.start[0], token.start[0], comments
            first, comments = None, []


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    try:
        yield from tokenize.generate_tokens(io.StringIO(text).readline)
    except (tokenize.TokenError, SyntaxError):
        # At the end of a file this tokenizer is stricter than the parser: keep the tokens so far.
        return
