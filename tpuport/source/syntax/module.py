"""A parsed file: its text, its syntax tree, and lookups that rules need in both."""

import ast
import bisect
import io
import itertools
import keyword
import tokenize
from collections.abc import Iterable, Iterator
from functools import cached_property

from tpuport.source.syntax.imported import imported_names
from tpuport.source.syntax.newer_python import parse_newer
from tpuport.source.syntax.text import Edit, Passage, SourceText

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
DEFAULT_INDENT = "    "
_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_BINDERS = (
    ast.Name,
    ast.arg,
    *FUNCTIONS,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
    ast.MatchMapping,
    ast.Global,
    ast.Nonlocal,
)
_BOUND_BY = (*(kind for kind in _BINDERS if kind is not ast.Name), ast.Import, ast.ImportFrom)

_Index = tuple[dict[ast.AST, ast.AST], list[ast.AST], dict[ast.AST, tuple[int, int]]]


class Module:
    """Source text and its syntax tree, which belong together and never change.

    Args:
        source: Text with line breaks `\\n`.
        file: The file name that findings carry.
        text: The same text with the origin of each line, if an earlier pass has edited it.
        newer: Whether syntax of a newer Python than this one may be read. Then no fix is possible:
            nodes are those of other text, which has the same positions.

    Raises:
        SyntaxError: the text is not Python.
    """

    def __init__(
        self,
        source: str,
        *,
        file: str = "<string>",
        text: SourceText | None = None,
        newer: bool = False,
    ) -> None:
        self.file = file
        self.is_newer = False
        if newer:
            self.tree, self.is_newer = parse_newer(source, file)
        else:
            self.tree = ast.parse(source, filename=file)
        self.text = text or SourceText(source)
        self._used: dict[ast.AST, set[str]] = {}
        self._taken: dict[ast.AST, set[str]] = {}
        self._handed: dict[frozenset[str], set[str]] = {}

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return the parent of every node, without operators and expression contexts."""
        return self._index[0]

    @property
    def nodes(self) -> list[ast.AST]:
        """Return all nodes in the order of the text, without operators and contexts."""
        return self._index[1]

    @cached_property
    def by_class(self) -> dict[type[ast.AST], list[ast.AST]]:
        """Return the nodes of each class in the order of the text."""
        found: dict[type[ast.AST], list[ast.AST]] = {}
        for node in self.nodes:
            found.setdefault(type(node), []).append(node)
        return found

    def inside(self, function: Function) -> list[ast.AST]:
        """Return a function's node and every node below it."""
        start, end = self._index[2][function]
        return self.nodes[start:end]

    @cached_property
    def _index(self) -> _Index:
        # One walk for all lookups: over a large repository, walks take most of the time.
        parents: dict[ast.AST, ast.AST] = {}
        nodes: list[ast.AST] = []
        ranges: dict[ast.AST, tuple[int, int]] = {}
        pending: list[ast.AST | tuple[ast.AST, int]] = [self.tree]
        while pending:
            node = pending.pop()
            if isinstance(node, tuple):
                ranges[node[0]] = (node[1], len(nodes))
                continue
            if isinstance(node, FUNCTIONS):
                pending.append((node, len(nodes)))
            nodes.append(node)
            children: list[ast.AST] = []
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, ast.AST):
                    if not isinstance(value, _MARKS):
                        parents[value] = node
                        children.append(value)
                elif isinstance(value, list):
                    for child in value:  # pyright: ignore[reportUnknownVariableType]
                        if isinstance(child, ast.AST) and not isinstance(child, _MARKS):
                            parents[child] = node
                            children.append(child)
            children.reverse()
            pending += children
        return parents, nodes, ranges

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Return the class definitions of the file, outer ones first."""
        return [
            node for node in self.by_class.get(ast.ClassDef, []) if isinstance(node, ast.ClassDef)
        ]

    def assigned(self, function: Function, name: str) -> list[ast.expr]:
        """Return the expressions that statements of a function assign to a name."""
        return [
            node.value
            for node in self.inside(function)
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        ]

    @cached_property
    def functions(self) -> list[Function]:
        """Return the function definitions of the file, outer ones first."""
        nodes = [n for kind in FUNCTIONS for n in self.by_class.get(kind, [])]
        return [node for node in nodes if isinstance(node, FUNCTIONS)]

    @cached_property
    def is_script(self) -> bool:
        """Return whether the file is a script, with an `if __name__ == "__main__"`."""
        return any(
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Compare)
            and isinstance(node.test.left, ast.Name)
            and node.test.left.id == "__name__"
            for node in self.tree.body
        )

    def handed_to(self, names: frozenset[str]) -> set[str]:
        """Return the names that the file passes to functions whose last name is in `names`."""
        if names not in self._handed:
            self._handed[names] = set(self._handed_to(names))
        return self._handed[names]

    def _handed_to(self, names: frozenset[str]) -> Iterator[str]:
        for node in self.by_class.get(ast.Call, []):
            if isinstance(node, ast.Call) and node.args:
                function = node.func
                last = function.attr if isinstance(function, ast.Attribute) else None
                last = function.id if isinstance(function, ast.Name) else last
                if last in names:
                    yield from (a.id for a in node.args if isinstance(a, ast.Name))

    # Places.

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of a node's start and end, without parentheses around it."""
        end_line: int = getattr(node, "end_lineno")  # noqa: B009 (nodes without a place have none)
        end_column: int = getattr(node, "end_col_offset")  # noqa: B009
        return self.start(node), self.text.offset(end_line, end_column)

    def start(self, node: ast.AST) -> int:
        """Return the offset of a node's start."""
        line: int = getattr(node, "lineno")  # noqa: B009
        column: int = getattr(node, "col_offset")  # noqa: B009
        return self.text.offset(line, column)

    def source(self, node: ast.AST) -> str:
        """Return a node's text as written."""
        start, end = self.span(node)
        return self.text.text[start:end]

    def origin(self, node: ast.AST) -> int:
        """Return the line of the user's file on which a node starts."""
        line: int = getattr(node, "lineno")  # noqa: B009
        return self.text.origin(line)

    def place(self, node: ast.AST) -> tuple[int, int | None]:
        """Return a node's line and byte column in the user's file; no column in rewritten lines."""
        line: int = getattr(node, "lineno")  # noqa: B009
        column: int = getattr(node, "col_offset")  # noqa: B009
        shift = self.text.shift(line)
        return self.text.origin(line), None if shift is None else column + shift

    # Surroundings.

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, from its parent to the module."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, lambda, class or module that a node runs in."""
        for parent in self.ancestors(node):
            if isinstance(parent, SCOPES):
                return parent
        return self.tree

    def function(self, node: ast.AST) -> Function | None:
        """Return the innermost `def` around a node, looking through lambdas and classes."""
        return next((p for p in self.ancestors(node) if isinstance(p, FUNCTIONS)), None)

    def outermost_function(self, node: ast.AST) -> ast.AST:
        """Return the outermost `def` around a node, or the module."""
        found: ast.AST = self.tree
        around: ast.AST | None = node
        while around is not None:
            if isinstance(around, FUNCTIONS):
                found = around
            around = self.parents.get(around)
        return found

    def block(self, statement: ast.stmt) -> tuple[list[ast.stmt], int]:
        """Return the list of statements that contains a statement, and its index there."""
        parent = self.parents[statement]
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(parent, field, None)
            if isinstance(statements, list) and statement in statements:
                return statements, statements.index(statement)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ValueError("Expected a statement of this module.")

    @cached_property
    def imports(self) -> dict[str, str]:
        """Return the full name of each imported name."""
        nodes = [*self.by_class.get(ast.Import, []), *self.by_class.get(ast.ImportFrom, [])]
        return imported_names(nodes)

    # Layout.

    @cached_property
    def tokens(self) -> list[tuple[tokenize.TokenInfo, int]]:
        """Return the file's tokens, each with the offset of its start."""
        read = io.StringIO(self.text.text).readline
        return [
            (token, self.text.line_start(token.start[0]) + token.start[1])
            for token in tokenize.generate_tokens(read)
            if token.start[0] <= len(self.text.lines)
        ]

    @cached_property
    def _comments(self) -> list[tuple[int, str]]:
        is_comment = tokenize.COMMENT
        return [(start, token.string) for token, start in self.tokens if token.type == is_comment]

    def comments(self, start: int, end: int) -> list[tuple[int, str]]:
        """Return offset and text of the comments that start between two offsets."""
        return [(offset, text) for offset, text in self._comments if start <= offset < end]

    def token_after(self, offset: int, string: str) -> int:
        """Return the offset of the next name or operator token with this text from `offset` on."""
        kinds = (tokenize.NAME, tokenize.OP)
        first = bisect.bisect_left(self.tokens, offset, key=lambda pair: pair[1])
        return next(
            start
            for token, start in itertools.islice(self.tokens, first, None)
            if token.type in kinds and token.string == string
        )

    @cached_property
    def indent(self) -> str:
        """Return one level of indentation, as the file writes it."""
        for node in self.nodes:
            body = getattr(node, "body", None)
            if isinstance(node, ast.stmt) and isinstance(body, list) and body:
                inner = self.text.indentation(body[0].lineno)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
                outer = self.text.indentation(node.lineno)
                if inner.startswith(outer) and inner != outer:
                    return inner[len(outer) :]
        return DEFAULT_INDENT

    @cached_property
    def string_lines(self) -> frozenset[int]:
        """Return the lines that start inside a string, where indentation is content."""
        found: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
            ):
                found.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
        return frozenset(found)

    def copy(self, start: int, end: int, edits: Iterable[Edit] = ()) -> Passage:
        """Copy the text between two offsets with edits applied, its lines ready to be indented."""
        self.text.fixed = self.string_lines
        return self.text.copy(start, end, edits)

    def copy_node(self, node: ast.AST) -> Passage:
        """Copy a node's text."""
        return self.copy(*self.span(node))

    # Names.

    def fresh_name(self, near: ast.AST, base: str) -> str:
        """Reserve and return a name that the outermost function around a node does not use yet."""
        function = self.outermost_function(near)
        if function not in self._used:
            self._used[function] = identifiers(function)
        taken = self._taken.setdefault(function, set(self._used[function]))
        number, name = 1, base
        while name in taken or keyword.iskeyword(name):
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        return name

    def forget_names(self) -> None:
        """Release the names reserved so far, once it is known which fixes are made."""
        self._taken.clear()

    def binds_otherwise(self, name: str) -> bool:
        """Return whether the file binds a name other than by `import name` or `import name.x`."""
        return name in self._bound

    @cached_property
    def _bound(self) -> set[str]:
        found = {
            node.id
            for node in self.by_class.get(ast.Name, ())
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }
        for node in (n for kind in _BOUND_BY for n in self.by_class.get(kind, ())):
            found.update(own_bindings(node))
            if isinstance(node, ast.Import):
                found.update(alias.asname for alias in node.names if alias.asname)
            elif isinstance(node, ast.ImportFrom):
                found.update(alias.asname or alias.name for alias in node.names)
        return found


def own_bindings(node: ast.AST) -> tuple[str, ...]:
    """Return the names that a node itself binds or deletes, without those of imports."""
    if not isinstance(node, _BINDERS):
        return ()
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            return (name,)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            return (name,)
        case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return (name,)
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return tuple(names)
        case _:
            return ()


def identifiers(tree: ast.AST) -> set[str]:
    """Return every name that code in a tree reads, binds or declares, without attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        found.update(own_bindings(node))
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def is_in_f_string(node: ast.AST, module: Module) -> bool:
    """Return whether a node is inside an f-string, where Python 3.11 has no exact positions."""
    return any(isinstance(parent, ast.JoinedStr) for parent in module.ancestors(node))


def is_elif(node: ast.If, module: Module) -> bool:
    """Return whether an `if` is written `elif`."""
    return module.text.text.startswith("elif", module.start(node))
