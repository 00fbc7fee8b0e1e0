"""The fix that removes a wrapper: a decorator, or a call that returns a function like its input."""

import ast

from tpuport.source.rewrite.finding import Fix, NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.imported import imported_names
from tpuport.source.syntax.module import own_bindings
from tpuport.source.syntax.text import Edit, Passage


def without_wrapper(wrapper: ast.expr, context: Context) -> Fix:
    """Return the fix that removes a wrapper: a decorator, a call that makes one, or a call.

    Args:
        wrapper: The name of the wrapper where it is used.
        context: The file and what is inferred about it.

    Raises:
        NotFixable: it is not clear what is wrapped, or other code is on the same lines.
    """
    if is_decorator(wrapper, context):
        return _without_lines(wrapper, context)
    call = context.module.parents[wrapper]
    assert isinstance(call, ast.Call)
    return (
        _without_lines(call, context) if is_decorator(call, context) else _unwrapped(call, context)
    )


def is_wrapping(wrapper: ast.expr, context: Context) -> bool:
    """Return whether a name is used as a wrapper: called, or a decorator."""
    call = context.module.parents[wrapper]
    return is_decorator(wrapper, context) or (isinstance(call, ast.Call) and call.func is wrapper)


def has_true(call: ast.AST, name: str) -> bool:
    """Return whether a node is a call with `name=True`."""
    return isinstance(call, ast.Call) and any(
        keyword.arg == name
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )


def is_decorator(node: ast.expr, context: Context) -> bool:
    """Return whether an expression is a decorator."""
    return node in getattr(context.module.parents[node], "decorator_list", [])


def _unwrapped(call: ast.Call, context: Context) -> Fix:
    """Return the fix that replaces a call by its first argument, or drops `f = wrapper(f)`."""
    module = context.module
    if not call.args or isinstance(call.args[0], ast.Starred):
        raise NotFixable("it is not clear what is wrapped")
    statement = module.parents[call]
    if isinstance(statement, ast.Assign) and _rebinds(statement, call):
        block, _ = module.block(statement)
        if all(_rebinds(each) for each in block):
            raise NotFixable("the block would be empty")
        if _is_bound_elsewhere(statement, context):
            return _without_lines(statement, context)
    start, end = module.span(call)
    if module.comments(start, end):
        raise NotFixable("a comment would be lost")
    bare = module.copy_node(call.args[0])
    if _stands_alone(call.args[0], bare.text):
        return Fix((Edit(start, end, bare),))
    return Fix((Edit(start, end, Passage.of("(", module.origin(call)) + bare + ")"),))


def _rebinds(statement: ast.AST | None, call: ast.Call | None = None) -> bool:
    """Return whether a statement is `f = wrapper(f)`; with `call`, of that call."""
    match statement:
        case ast.Assign(targets=[target], value=ast.Call(args=[wrapped, *_]) as value):
            is_asked = call is None or value is call
            return is_asked and ast.unparse(target) == ast.unparse(wrapped)
        case _:
            return False


def _is_bound_elsewhere(statement: ast.Assign, context: Context) -> bool:
    """Return whether an assignment's target is also bound elsewhere, and read without effects."""
    (target,) = statement.targets
    if not isinstance(target, ast.Name):
        return not any(isinstance(node, ast.Call | ast.NamedExpr) for node in ast.walk(target))
    module = context.module
    scope = module.scope(statement)
    if isinstance(scope, ast.ClassDef):
        return False
    return any(
        node is not target
        and (target.id in own_bindings(node) or target.id in imported_names([node]))
        and module.scope(node) is scope
        and not _rebinds(module.parents.get(node))
        for node in module.nodes
        if node is not scope
    )


def _stands_alone(node: ast.expr, text: str) -> bool:
    """Return whether an expression means the same anywhere, also on more than one line."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return False
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def _without_lines(node: ast.expr | ast.stmt, context: Context) -> Fix:
    text, module = context.module.text, context.module
    start, end = module.span(node)
    first, last = text.line_at(start), text.line_at(end)
    line_start, line_end = text.line_start(first), text.line_end(last)
    around = text.text[line_start:start].strip(" \t@") + text.text[end:line_end].strip()
    if around or module.comments(line_start, line_end):
        raise NotFixable("something else is on its lines")
    nothing = Passage.of("", module.origin(node))
    if line_end == len(text.text):  # the last line has no line break of its own
        return Fix((Edit(max(line_start - 1, 0), line_end, nothing),))
    return Fix((Edit(line_start, line_end + 1, nothing),))
