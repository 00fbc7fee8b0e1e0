"""Takes a wrapper away: a decorator, or a call that gives back a function like its argument."""

import ast

from tpuport.source.engine import Context
from tpuport.source.finding import Fix, NotFixable
from tpuport.source.text import Edit, Passage


def without_decorator(decorator: ast.expr, context: Context) -> Fix:
    """The fix that removes the lines of a decorator.

    Raises:
        NotFixable: a comment would go with them.
    """
    return _without_lines(decorator, context)


def unwrapped_call(call: ast.Call, context: Context) -> Fix:
    """The fix that puts a call's first argument in its place, or drops `f = wrapper(f)`.

    Raises:
        NotFixable: there is no argument, or a statement cannot go.
    """
    module = context.module
    if not call.args or isinstance(call.args[0], ast.Starred):
        raise NotFixable("it is not clear what is wrapped")
    statement = module.parents[call]
    match statement:
        case ast.Assign(targets=[target]) if ast.unparse(target) == ast.unparse(call.args[0]):
            block, _ = module.block(statement)
            if len(block) == 1:
                raise NotFixable("the block would be empty")
            return _without_lines(statement, context)
        case _:
            start, end = module.span(call)
            if module.comments(start, end):
                raise NotFixable("a comment would be lost")
            return Fix((Edit(start, end, module.copy_node(call.args[0])),))


def _without_lines(node: ast.expr | ast.stmt, context: Context) -> Fix:
    text, module = context.module.text, context.module
    start, end = module.span(node)
    first, last = text.line_at(start), text.line_at(end)
    line_start, line_end = text.line_start(first), text.line_end(last)
    around = text.text[line_start:start].strip(" \t@") + text.text[end:line_end].strip()
    if around or module.comments(line_start, line_end):
        raise NotFixable("something else stands on its lines")
    nothing = Passage.of("", module.origin(node))
    return Fix((Edit(line_start, line_end + 1, nothing),))
