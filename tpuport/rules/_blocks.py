"""Blocks of statements taken out of an `if` or a loop, with their comments and layout."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from tpuport.rules._expressions import Expressions, super_edits
from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context, head
from tpuport.source.syntax.module import is_elif
from tpuport.source.syntax.text import Edit, Passage

MAX_WIDTH = 100


@dataclass(frozen=True)
class StatementBlock:
    """Statements and their text.

    Attributes:
        statements: The statements.
        passage: The lines of the statements, with comments; None if there is nothing to copy.
        indent: The indentation of the outermost level in the passage.
    """

    statements: tuple[ast.stmt, ...]
    passage: Passage | None
    indent: str

    def at(self, indent: str) -> Passage | None:
        """Return the text moved to another indentation.

        Raises:
            NotFixable: one indentation is no prefix of the other.
        """
        if self.passage is None:
            return None
        if indent.startswith(self.indent):
            return self.passage.indented(indent[len(self.indent) :])
        if self.indent.startswith(indent):
            return self.passage.dedented(self.indent[len(indent) :])
        raise NotFixable("it mixes tabs and spaces")


class Layout:
    """The text of an `if` or a loop and of what follows it, cut into blocks.

    Args:
        node: The statement.
        context: The file and what is inferred about it.

    Attributes:
        dropped: Statements to leave out of the blocks.
        replaced: Statements of the body, with the text to put there.
    """

    def __init__(self, node: ast.If | ast.While | ast.For, context: Context) -> None:
        self.node, self.context, self.module = node, context, context.module
        self.text = context.module.text
        self.indent = self.text.indentation(node.lineno)
        self.unit = context.module.indent
        self.origin = context.module.origin(node)
        self.colon = self.module.token_after(self.module.span(head(node))[1], ":")
        self.last_line = node.end_lineno or node.lineno
        self.dropped: set[ast.stmt] = set()
        self.replaced: dict[ast.stmt, str] = {}
        self.kept: list[tuple[int, int]] = []

    @property
    def inner(self) -> str:
        """Return the indentation of a nested function's body."""
        return self.indent + self.unit

    def body(self, *, nested: bool = True) -> StatementBlock:
        """Return the block that runs if the test is true.

        Args:
            nested: Whether the block moves into a nested function. There a bare `super()` needs
                its arguments written out.
        """
        body, orelse = self.node.body, self.node.orelse
        end = self._else_line() - 1 if orelse else body[-1].end_lineno or body[-1].lineno
        return self._block(body, self.colon, end, nested)

    def orelse(self, *, nested: bool = True) -> StatementBlock:
        """Return the block after `else:`, empty if there is none; an `elif` becomes an `if`."""
        orelse = self.node.orelse
        if not orelse:
            return StatementBlock((), None, self.inner)
        end = orelse[-1].end_lineno or orelse[-1].lineno
        if self._has_elif():
            start = self.text.line_start(orelse[0].lineno)
            keyword = self.module.start(orelse[0])
            new = Passage.of("if", self.module.origin(orelse[0]))
            edits = [Edit(keyword, keyword + len("elif"), new), *self._edits(orelse, nested)]
            passage = self._copy(start, self.text.line_end(end), edits)
            return StatementBlock(tuple(orelse), passage, self.indent)
        offset = self.module.token_after(self.text.line_start(self._else_line()), "else")
        return self._block(orelse, self.module.token_after(offset, ":"), end, nested)

    def rest(self) -> StatementBlock:
        """Return the statements after this one in its block, and make them part of the edit."""
        block, index = self.module.block(self.node)
        following = block[index + 1 :]
        if not following:
            return StatementBlock((), None, self.inner)
        start = self.text.line_start(self.last_line + 1)
        self.last_line = following[-1].end_lineno or following[-1].lineno
        end = self.text.line_end(self.last_line)
        passage = self._copy(start, end, self._edits(following, nested=True))
        return StatementBlock(tuple(following), _without_blank_ends(passage), self.indent)

    def _block(
        self, statements: list[ast.stmt], colon: int, end_line: int, nested: bool
    ) -> StatementBlock:
        colon_line = self.text.line_at(colon)
        first = statements[0]
        end = self.text.line_end(end_line)
        edits = self._edits(statements, nested)
        if first.lineno == colon_line:
            indent = self.inner
            passage = Passage.of(indent, self.origin) + self._copy(
                self.module.start(first), end, edits
            )
        else:
            indent = self.text.indentation(first.lineno)
            passage = self._copy(self.text.line_start(colon_line + 1), end, edits)
        staying = tuple(statement for statement in statements if statement not in self.dropped)
        return StatementBlock(staying, _without_blank_ends(passage), indent)

    def _copy(self, start: int, end: int, edits: Sequence[Edit]) -> Passage:
        self.kept.append((start, end))
        return self.module.copy(start, end, edits)

    def _edits(self, statements: Sequence[ast.stmt], nested: bool) -> list[Edit]:
        removed: list[Edit] = []
        for i, statement in enumerate(statements):
            if statement in self.dropped:
                start, end = self.module.span(statement)
                # Of `pass; x = 1` the semicolon has to go, too.
                if i + 1 < len(statements) and statements[i + 1].lineno == statement.end_lineno:
                    end = self.module.start(statements[i + 1])
                removed.append(Edit(start, end, Passage.of("", self.module.origin(statement))))
        for statement, text in self.replaced.items():
            made = Passage.of(text, self.module.origin(statement))
            removed.append(Edit(*self.module.span(statement), made))
        return [*removed, *(super_edits(statements, self.context) if nested else [])]

    def _has_elif(self) -> bool:
        (first, *more) = self.node.orelse
        return isinstance(first, ast.If) and not more and is_elif(first, self.module)

    def _else_line(self) -> int:
        if self._has_elif():
            return self.node.orelse[0].lineno
        start = self.module.span(self.node.body[-1])[1]
        return self.text.line_at(self.module.token_after(start, "else"))

    def edit(
        self, lines: Sequence[Passage], expressions: Expressions, *, gap: bool = False
    ) -> Edit:
        """Return the edit that replaces the statement, and what `rest` took, by lines.

        Comments outside all copied text are kept above those lines.

        Args:
            lines: Passages with their indentation.
            expressions: The copier of the test and other expressions, which knows the text it kept.
            gap: Whether to put an empty line before, unless the block starts here.
        """
        begin, end = self.text.line_start(self.node.lineno), self.text.line_end(self.last_line)
        kept = [*self.kept, *expressions.kept]
        comments = [
            self.line(text)
            for offset, text in self.module.comments(begin, end)
            if not any(a <= offset < b for a, b in kept)
        ]
        made = Passage.stack([*(self._gap() if gap else []), *comments, *lines])
        # Nothing can be defined before an `elif`, so it becomes the block of an `else`.
        if isinstance(self.node, ast.If) and is_elif(self.node, self.module):
            made = Passage.stack([self.line("else:"), made.indented(self.unit)])
        return Edit(begin, end, made)

    def line(self, text: str, indent: str | None = None) -> Passage:
        """Return a new line at the statement's indentation, or at the one given."""
        return Passage.of((self.indent if indent is None else indent) + text, self.origin)

    def call(self, before: str, function: str, arguments: Sequence[Passage | str]) -> Passage:
        """Return a call on one line, or with one argument a line where that would be too long."""
        made = self.line(f"{before}{function}(")
        for index, argument in enumerate(arguments):
            made = made + (", " if index else "") + argument
        made = made + ")"
        if max(len(line.text) for line in made.lines) <= MAX_WIDTH:
            return made
        each = [self.line("", self.inner) + argument + "," for argument in arguments]
        return Passage.stack([self.line(f"{before}{function}("), *each, self.line(")")])

    def function(self, name: str, parameters: Sequence[str], *parts: Passage | None) -> Passage:
        """Return a nested function of passages at the inner indentation, then an empty line."""
        body = [part for part in parts if part is not None]
        if not any(map(_has_code, body)):
            body.append(self.line("pass", self.inner))
        head = self.line(f"def {name}({', '.join(parameters)}):")
        return Passage.stack([head, *body, self.blank()])

    def blank(self) -> Passage:
        """Return an empty line."""
        return Passage.of("", self.origin)

    def _gap(self) -> list[Passage]:
        """Return an empty line, unless the statement starts its block or already follows one."""
        _, index = self.module.block(self.node)
        before = self.text.lines[self.node.lineno - 2] if self.node.lineno > 1 else ""
        if index == 0 or not before.strip() or before.lstrip().startswith("#"):
            return []
        return [self.blank()]


def _without_blank_ends(passage: Passage) -> Passage | None:
    """Return a passage without leading and trailing empty lines; None if nothing is left."""
    lines = list(passage.lines)
    while lines and not lines[-1].text.strip():
        lines.pop()
    while lines and not lines[0].text.strip():
        lines.pop(0)
    return Passage(tuple(lines)) if lines else None


def _has_code(passage: Passage) -> bool:
    """Return whether a passage has more than comments, which are no body of a function."""
    texts = (line.text.strip() for line in passage.lines)
    return any(text and not text.startswith("#") for text in texts)
