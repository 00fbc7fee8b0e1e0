"""Fixes that put a test before a statement or an expression."""

import ast

from tpuport.source.rewrite.finding import Fix, NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

# Parents under which a conditional expression needs no parentheses.
_FREE_PARENTS = (
    ast.keyword,
    ast.Call,
    ast.Assign,
    ast.AnnAssign,
    ast.Return,
    ast.arguments,
    ast.Dict,
    ast.List,
    ast.Tuple,
    ast.Set,
)


def guarded_statement(
    statement: ast.stmt, test: str, context: Context, *, imports: tuple[str, ...] = ()
) -> Fix:
    """Return the fix that makes a statement run only if a test is true.

    Args:
        statement: The statement.
        test: The source of the test.
        context: The file.
        imports: Modules that the test needs.

    Raises:
        NotFixable: the statement shares its line with other code.
    """
    module = context.module
    start, end = module.span(statement)
    line = module.text.line_start(module.text.line_at(start))
    rest = module.text.text[end : module.text.line_end(module.text.line_at(end))].strip()
    indentation = module.text.text[line:start]
    if indentation.strip() or (rest and not rest.startswith("#")):
        raise NotFixable("it shares its line with other code")
    moved = module.copy(line, end).indented(module.indent)
    head = Passage.of(f"{indentation}if {test}:", module.origin(statement))
    return Fix((Edit(line, end, Passage.stack([head, moved])),), imports)


def chosen(node: ast.expr, test: str, otherwise: str, context: Context) -> Edit:
    """Return the edit that makes an expression `expression if test else otherwise`."""
    module, origin = context.module, context.module.origin(node)
    start, end = module.span(node)
    made = module.copy(start, end) + f" if {test} else {otherwise}"
    if not isinstance(module.parents[node], _FREE_PARENTS):
        made = Passage.of("(", origin) + made + ")"
    return Edit(start, end, made)
