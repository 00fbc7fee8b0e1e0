"""The fix of a write that is lost in a view: write to the base itself, or rebind it."""

import ast

from tpuport.rules._views import (
    LOSING_ON_SLICES,
    MAY_COPY,
    PARTS,
    View,
    made_before,
    mutation,
    rebound,
    view_of,
)
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, NotFixable
from tpuport.source.statements import walk_scope
from tpuport.source.text import Edit, Passage

# Always views, whose result has the same elements in the same order.
_SAME_ORDER = frozenset({"view", "unflatten", "unsqueeze", "squeeze"})


def rebinding_fix(node: ast.stmt, context: Context) -> Fix:
    """The edits that make a write reach its base under torchax, too.

    Raises:
        NotFixable: the view may be a copy, or somebody else may see the base.
    """
    change = mutation(node)
    assert change is not None
    view = view_of(change.target, context)
    assert view is not None
    if view.losing is None and view.steps:
        return _assignment(node, context)
    if view.steps:
        return _refuse(view)
    assert isinstance(view.base, ast.Name)
    for assign, value in made_before(view.base.id, node, context):
        made = view_of(value, context)
        if made is not None and made.losing is not None:
            return _rebinding(node, view.base.id, assign, made, context)
    raise NotFixable("it writes to the base of a view that is read later")


def _refuse(view: View) -> Fix:
    if MAY_COPY.intersection(view.steps):
        raise NotFixable(f"the result of {view.losing} may be a copy in eager PyTorch")
    raise NotFixable("the view has no name, so that its base cannot be rebound to it")


def _assignment(node: ast.stmt, context: Context) -> Fix:
    """`x[i].fill_(v)` as `x[i] = v`."""
    match node:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Subscript() as target, attr=method),
                args=arguments,
                keywords=[],
            ) as call
        ) if method in LOSING_ON_SLICES:
            pass
        case _:
            raise NotFixable("more than one method is called on the subscript")
    if context.module.comments(*context.module.span(node)):
        raise NotFixable("a comment stands inside the call")
    written = context.module.copy_node(target)
    if method == "zero_":
        made = written + " = 0"
    elif method == "fill_" and len(arguments) == 1:
        made = written + " = " + context.module.copy_node(arguments[0])
    else:
        # The same call, out of place: from the end of the subscript on only the name changes.
        name_end = context.module.text.text.index(method, context.module.span(target)[1])
        rest = context.module.copy(name_end + len(method), context.module.span(call)[1])
        made = written + " = " + context.module.copy_node(target) + f".{method[:-1]}" + rest
    start, end = context.module.span(node)
    return Fix((Edit(start, end, made),))


def _rebinding(node: ast.stmt, name: str, assign: ast.Assign, view: View, context: Context) -> Fix:
    """`base = view.view(base.shape)` behind the write."""
    if len(view.steps) > 1 or not isinstance(view.base, ast.Name):
        raise NotFixable("the view is made in several steps")
    if view.losing in MAY_COPY:
        raise NotFixable(f"the result of {view.losing} may be a copy in eager PyTorch")
    if view.losing in PARTS or view.losing not in _SAME_ORDER:
        raise NotFixable(f"the base cannot be had back from the result of {view.losing}")
    base = view.base.id
    _refuse_aliases(base, assign, node, context)
    module = context.module
    line = node.end_lineno or node.lineno
    end = module.text.line_end(line)
    rest = module.text.text[module.span(node)[1] : end].strip()
    if rest and not rest.startswith("#"):
        raise NotFixable("another statement stands on its line")
    if module.text.text[module.text.line_start(node.lineno) : module.start(node)].strip():
        raise NotFixable("another statement stands on its line")
    indent = module.text.indentation(node.lineno)
    added = f"\n{indent}{base} = {name}.view({base}.shape)"
    return Fix((Edit(end, end, Passage.of(added, module.origin(node))),))


def _refuse_aliases(base: str, assign: ast.Assign, node: ast.stmt, context: Context) -> None:
    """Make sure that nobody but one name stands for a view's base."""
    function = context.module.function(node)
    assert function is not None
    flow = context.flow(function)
    binders = flow.binders.get(base, [])
    made = context.module.parents.get(binders[0]) if binders else None
    if base in flow.captured or not (isinstance(made, ast.Assign) and _is_fresh(made.value)):
        raise NotFixable(f"other names may stand for {base}")
    if rebound({base}, made, assign, function) or made.lineno >= assign.lineno:
        raise NotFixable(f"{base} is bound more than once")
    reads = [
        read
        for read in walk_scope(function.body)
        if isinstance(read, ast.Name)
        and read.id == base
        and isinstance(read.ctx, ast.Load)
        and read.lineno <= node.lineno
        and read not in set(ast.walk(assign.value))
    ]
    if reads:
        raise NotFixable(f"other names may stand for {base}")


def _is_fresh(value: ast.expr) -> bool:
    """Whether an expression makes a tensor that nobody else has."""
    match value:
        case ast.BinOp():
            return True
        case ast.Call(func=ast.Attribute(attr="clone"), args=[], keywords=[]):
            return True
        case _:
            return False
