"""Whether the text that code makes of a value is looked at, or only shown."""

import ast
import functools
import linecache
from types import CodeType

# Functions and methods that take a text for a name or a key, or ask for what is in it.
_TAKE_NAMES = frozenset(
    "getattr setattr hasattr delattr len hash int float eval exec get pop setdefault add_module"
    " register_buffer register_parameter register_module get_submodule get_parameter get_buffer"
    " index count remove".split()
)
_OF_TEXT = frozenset(
    "startswith endswith split rsplit partition rpartition find rfind index count isdigit isnumeric"
    " encode".split()
)


@functools.lru_cache(maxsize=4096)
def is_looked_at(code: CodeType, offset: int) -> bool:
    """Return whether a text is compared, taken apart, or used as a name or key.

    A text that is printed, logged or raised is only shown, and so is one that nobody knows to be
    looked at: one that a function returns, or an object keeps.

    Args:
        code: the code that makes the text.
        offset: the offset in bytes of its instruction that asks for a part of the text.
    """
    positions = list(code.co_positions())
    line, _, column, _ = positions[offset // 2] if offset // 2 < len(positions) else (None,) * 4
    if line is None or column is None:
        return False
    texts, parents = _texts(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    around = [text for text in texts if _is_in(text, line, column)]
    return bool(around) and _looks(around[-1], parents)


@functools.lru_cache(maxsize=64)
def _texts(file: str, source: str) -> tuple[list[ast.expr], dict[ast.AST, ast.AST]]:
    """Return the expressions of a file that make texts, outer ones first, and all parents."""
    try:
        tree = ast.parse(source, file)
    except SyntaxError:
        return [], {}
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    return [node for node in nodes if isinstance(node, ast.expr) and _makes_text(node)], parents


def _makes_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        func = node.func
        is_method = isinstance(func, ast.Attribute) and func.attr == "format"
        return is_method or getattr(func, "id", "") in ("str", "repr", "format")
    return isinstance(node, ast.JoinedStr)


def _is_in(node: ast.expr, line: int, column: int) -> bool:
    begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return begin <= (line, column) < end


def _looks(node: ast.AST, parents: dict[ast.AST, ast.AST], *, follows: bool = True) -> bool:
    """Return whether what is around an expression looks at its text.

    Args:
        node: the expression.
        parents: the parent of each node of its file.
        follows: whether the uses of a variable that it is assigned to count, too.
    """
    parent = parents.get(node)
    if isinstance(parent, ast.BinOp | ast.IfExp | ast.FormattedValue | ast.JoinedStr | ast.keyword):
        return _looks(parent, parents, follows=follows)
    if isinstance(parent, ast.Compare | ast.Set | ast.Match):
        return True
    if isinstance(parent, ast.Dict):
        return node in parent.keys
    if isinstance(parent, ast.Subscript):
        return node is parent.slice
    if isinstance(parent, ast.Attribute):
        return parent.attr in _OF_TEXT or _looks(parents[parent], parents, follows=follows)
    if isinstance(parent, ast.Call) and node is not parent.func:
        func = parent.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        return name in _TAKE_NAMES
    if not follows or not isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return False
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return any(
        _looks(use, parents, follows=False)
        for use in ast.walk(_scope(parent, parents))
        if isinstance(use, ast.Name) and isinstance(use.ctx, ast.Load) and use.id in names
    )


def _scope(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """Return the function or module around a node."""
    while node in parents and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node = parents[node]
    return node
