"""Puts a test before a statement."""

import ast

from tpuport.source.engine import Context
from tpuport.source.finding import Fix, NotFixable
from tpuport.source.text import Edit, Passage


def guarded_statement(
    statement: ast.stmt, test: str, context: Context, *, imports: tuple[str, ...] = ()
) -> Fix:
    """The fix that makes a statement run only if a test holds.

    Args:
        statement: The statement.
        test: The source of the test.
        context: The file.
        imports: Modules that the test needs.

    Raises:
        NotFixable: something else stands on the same line.
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
