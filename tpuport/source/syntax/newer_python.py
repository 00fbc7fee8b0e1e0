"""Syntax of newer Pythons, read by an older one: parameters of types, and quotes in f-strings."""

import ast
import io
import itertools
import re
import sys
import tokenize

_PREFIX = re.compile(r"(?i)(?<![\w.])(?P<prefix>f|rf|fr|r|b|u|br|rb)?(?P<quote>'''|\"\"\"|'|\")")


def parse_newer(source: str, file: str) -> tuple[ast.Module, bool]:
    """Parse source that may have the syntax of Python 3.12.

    An older Python gets text of the same length: without parameters of types, and with other quotes
    and escapes in the fields of f-strings. All positions are those of the source; the values of
    strings in such fields are not.

    Returns:
        The tree, and whether it is that of other text.

    Raises:
        SyntaxError: It is no Python, or syntax that this does not know.
    """
    try:
        return ast.parse(source, filename=file), False
    except SyntaxError:
        if sys.version_info >= (3, 12):
            raise
        try:
            return ast.parse(_without_types(_older_strings(source)), filename=file), True
        except (SyntaxError, tokenize.TokenError, _NotOlder):
            pass
        raise


class _NotOlder(Exception):
    """Syntax that no older Python has in the same number of characters."""


def _older_strings(source: str) -> str:
    """Return source whose f-strings have fields without their own quotes and without escapes."""
    text = list(source)
    place = 0
    while place < len(source):
        if source[place] == "#":
            place = _end_of_line(source, place)
        elif match := _PREFIX.match(source, place):
            place = _string(text, match, outer=())
        else:
            place += 1
    return "".join(text)


def _end_of_line(source: str, place: int) -> int:
    end = source.find("\n", place)
    return len(source) if end < 0 else end


def _string(text: list[str], match: "re.Match[str]", outer: tuple[str, ...]) -> int:
    """Change a string inside of others, whose quotes are `outer`; return where it ends."""
    source, quote = match.string, match["quote"]
    free = quote
    if outer:
        taken = {each[0] for each in outer}
        free = quote if quote[0] not in taken else quote.translate(_OTHER)
        if free[0] in taken:
            return _zeros(text, match)
        text[match.start("quote") : match.end()] = free
    prefix = (match["prefix"] or "").lower()
    place = match.end()
    while not source.startswith(quote, place):
        if place >= len(source) or (len(quote) == 1 and source[place] == "\n"):
            raise _NotOlder
        if source[place] == "\\":
            if outer:
                text[place : place + 2] = "//"
            place += 2
        elif "f" in prefix and source.startswith(("{{", "}}"), place):
            place += 2
        elif "f" in prefix and source[place] == "{":
            place = _field(text, source, place + 1, (*outer, free))
        else:
            if free != quote and source[place] == free[0]:
                text[place] = "/"
            place += 1
    text[place : place + len(quote)] = free
    return place + len(quote)


def _zeros(text: list[str], match: "re.Match[str]") -> int:
    """Write zeros for a string for which no quote is left; return where it ends."""
    source, place = match.string, match.end()
    while not source.startswith(match["quote"], place):
        if place >= len(source) or source[place] in "{\n":
            raise _NotOlder
        place += 2 if source[place] == "\\" else 1
    end = place + len(match["quote"])
    text[match.start() : end] = "0" * (end - match.start())
    return end


_OTHER = {ord("'"): '"', ord('"'): "'"}


def _field(text: list[str], source: str, place: int, outer: tuple[str, ...]) -> int:
    """Change the strings in a field of an f-string; return the place behind its bracket."""
    depth = 1
    while depth:
        if place >= len(source) or source[place] in "#\\":
            raise _NotOlder
        if source[place] == "\n" and len(outer[0]) == 1:
            raise _NotOlder
        match = _PREFIX.match(source, place)
        # A quote of the string around ends a format such as `{x:>3}` only with its field.
        if match:
            place = _string(text, match, outer)
            continue
        depth += (source[place] in "{[(") - (source[place] in "}])")
        place += 1
    return place


def _without_types(source: str) -> str:
    """Return source without parameters of types; `type X = Y` becomes an assignment."""
    lines = [list(line) for line in source.splitlines(keepends=True)]
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL)
    ]
    starts = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    before = tokenize.NEWLINE
    for number, (token, name) in enumerate(itertools.pairwise(tokens)):
        after = tokens[number + 2] if number + 2 < len(tokens) else name
        is_alias = token.string == "type" and (before in starts or tokens[number - 1].string == ";")
        if name.type == tokenize.NAME and (is_alias or token.string in ("def", "class")):
            end = _blank_types(lines, tokens, number + 2) if after.string == "[" else None
            if is_alias and (end is not None or after.string == "="):
                row, column = token.start
                gap = name.start[1] - column
                lines[row - 1][column : name.end[1]] = name.string + " " * gap
        before = token.type
    return "".join(map("".join, lines))


def _blank_types(lines: list[list[str]], tokens: list[tokenize.TokenInfo], first: int) -> int:
    """Replace `[T: int]` by spaces; return the number of the token that closes it."""
    depth = 0
    for number in range(first, len(tokens)):
        depth += (tokens[number].string in ("[", "(", "{")) - (
            tokens[number].string in ("]", ")", "}")
        )
        if depth == 0:
            (row, start), (last, end) = tokens[first].start, tokens[number].end
            if row != last:
                raise _NotOlder
            lines[row - 1][start:end] = " " * (end - start)
            return number
    raise _NotOlder
