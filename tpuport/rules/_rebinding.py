"""The fix of a write that is lost in a view: write to the base itself, or rebind it."""

import ast

from tpuport.rules._views import (
    LOSING_ON_SLICES,
    MAY_COPY,
    PARTS,
    View,
    is_in_place,
    made_before,
    mutation,
    rebound,
    view_of,
)
from tpuport.source.inference.kinds import Kind
from tpuport.source.rewrite.finding import Fix, NotFixable
from tpuport.source.rewrite.matching import Context, quote
from tpuport.source.syntax.module import own_bindings
from tpuport.source.syntax.statements import walk_scope
from tpuport.source.syntax.text import Edit, Passage

# These always return a view that has the same elements in the same order.
_SAME_ORDER = frozenset({"view", "unflatten", "unsqueeze", "squeeze"})
# In-place methods after which a view has another shape or another storage.
_RESHAPING = frozenset(
    {
        "resize_",
        "resize_as_",
        "set_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
        "as_strided_",
        "data",
    }
)


def rebinding_fix(node: ast.stmt, context: Context) -> Fix:
    """Return the edits that make a write reach its base under torchax, too.

    Raises:
        NotFixable: the view may be a copy, or other code may see the base.
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
    """Return `x[i].fill_(v)` as `x[i] = v`, others as `x[i] = x[i].clone().method_(v)`."""
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
        raise NotFixable("there is a comment inside the call")
    _refuse_whole(target)
    _refuse_expanded(target, node, context)
    written = context.module.copy_node(target)
    if method == "zero_":
        made = written + " = 0"
    elif method == "fill_" and _is_single(arguments, context):
        _refuse_writes(arguments, context)
        made = written + " = " + context.module.copy_node(arguments[0])
    else:
        # On a copy the method raises what it raises on the view, as its result has to fit there.
        _refuse_writes(arguments, context)
        start, end = context.module.span(target)[1], context.module.span(call)[1]
        copied = context.module.copy(start, end, [_cloned(start, context, call)])
        made = written + " = " + context.module.copy_node(target) + copied
    start, end = context.module.span(node)
    return Fix((Edit(start, end, made),))


def _cloned(place: int, context: Context, call: ast.Call) -> Edit:
    return Edit(place, place, Passage.of(".clone()", context.module.origin(call)))


def _refuse_whole(target: ast.Subscript) -> None:
    """Raise if a subscript is the entire tensor, as `x[:]` is.

    Of a leaf that requires a gradient, a method writes to a view and an assignment to the leaf
    itself.
    """
    parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    if all(ast.unparse(part) in (":", "...") for part in parts):
        raise NotFixable("the subscript is the entire tensor")


def _refuse_expanded(target: ast.Subscript, node: ast.stmt, context: Context) -> None:
    """Raise if elements may share memory: a method may fill them, an assignment may not."""
    base = ast.unparse(target.value)
    for _, value in made_before(base, node, context):
        if any(
            isinstance(part, ast.Attribute) and part.attr.startswith(("expand", "broadcast_to"))
            for part in ast.walk(value)
        ):
            raise NotFixable(f"elements of {base} may share memory")


def _refuse_writes(arguments: list[ast.expr], context: Context) -> None:
    """Raise unless arguments only compute.

    A method evaluates them after the subscript, an assignment before it.
    """
    for node in walk_scope(arguments):
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise NotFixable("an argument binds a name or suspends the function")
        if isinstance(node, ast.Call) and not _is_pure(node, context):
            raise NotFixable(f"{quote(ast.unparse(node))} may write to the tensor")


def _is_pure(call: ast.Call, context: Context) -> bool:
    """Return whether a call is one of torch's that only computes."""
    if not isinstance(call.func, ast.Attribute) or is_in_place(call.func.attr):
        return False
    name = context.name(call.func)
    if name is not None:
        return name.startswith("torch.") and not call.keywords
    return context.is_traced(call.func.value)


def _is_single(arguments: list[ast.expr], context: Context) -> bool:
    """Return whether there is one argument, and it is a number or a 0-d tensor."""
    return len(arguments) == 1 and is_number(arguments[0], context)


def _rebinding(node: ast.stmt, name: str, assign: ast.Assign, view: View, context: Context) -> Fix:
    """Return the fix that adds `base = view.view(base.shape)` after the write."""
    if len(view.steps) > 1 or not isinstance(view.base, ast.Name):
        raise NotFixable("the view is made in several steps")
    if view.losing in MAY_COPY:
        raise NotFixable(f"the result of {view.losing} may be a copy in eager PyTorch")
    if view.losing in PARTS or view.losing not in _SAME_ORDER:
        raise NotFixable(f"the base cannot be recovered from the result of {view.losing}")
    base = view.base.id
    made = _only_assignment(base, assign, node, context)
    _refuse_other_shapes(node)
    _refuse_loops({base, name}, assign, node, context)
    _refuse_other_withs(made, node, context)
    module = context.module
    line = node.end_lineno or node.lineno
    end = module.text.line_end(line)
    rest = module.text.text[module.span(node)[1] : end].strip()
    if rest and not rest.startswith("#"):
        raise NotFixable("another statement is on its line")
    if module.text.text[module.text.line_start(node.lineno) : module.start(node)].strip():
        raise NotFixable("another statement is on its line")
    indent = module.text.indentation(node.lineno)
    added = f"\n{indent}{base} = {name}.view({base}.shape)"
    return Fix((Edit(end, end, Passage.of(added, module.origin(node))),))


def _refuse_other_shapes(node: ast.stmt) -> None:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr in _RESHAPING:
            raise NotFixable(f"{inner.attr} changes what the view shows")


def _refuse_loops(names: set[str], assign: ast.Assign, node: ast.stmt, context: Context) -> None:
    """Raise if a loop around a write binds the view or its base again."""
    outer = set(context.module.ancestors(assign))
    own = set(ast.walk(node))
    for parent in context.module.ancestors(node):
        if isinstance(parent, ast.For | ast.AsyncFor | ast.While) and parent not in outer:
            inside = (inner for inner in ast.walk(parent) if inner not in own)
            if any(names.intersection(own_bindings(inner)) for inner in inside):
                raise NotFixable("a loop around it binds the view or its base again")


def _refuse_other_withs(made: ast.Assign, node: ast.stmt, context: Context) -> None:
    """Raise if a base is rebound in a `with` that it is not made in, such as `no_grad`."""
    outer = set(context.module.ancestors(made))
    for parent in context.module.ancestors(node):
        if isinstance(parent, ast.With | ast.AsyncWith) and parent not in outer:
            raise NotFixable("the base would be rebound inside a `with`")


def _only_assignment(base: str, assign: ast.Assign, node: ast.stmt, context: Context) -> ast.Assign:
    """Return the assignment of a view's base that no other name refers to."""
    function = context.module.function(node)
    assert function is not None
    flow = context.flow(function)
    binders = flow.binders.get(base, [])
    made = context.module.parents.get(binders[0]) if binders else None
    if base in flow.captured or not (
        isinstance(made, ast.Assign) and len(made.targets) == 1 and _is_fresh(made.value)
    ):
        raise NotFixable(f"other names may refer to {base}")
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
        raise NotFixable(f"other names may refer to {base}")
    return made


def _is_fresh(value: ast.expr) -> bool:
    """Return whether an expression makes a tensor that no other name refers to."""
    match value:
        case ast.BinOp():
            return True
        case ast.Call(func=ast.Attribute(attr="clone"), args=[], keywords=[]):
            return True
        case _:
            return False


_REDUCING = frozenset({"mean", "sum", "max", "min", "amax", "amin", "prod", "std", "var", "norm"})
_KEEPING = frozenset({"detach", "abs", "clone", "float", "exp", "log", "sqrt", "item"})


def is_number(node: ast.expr, context: Context) -> bool:
    """Return whether a value surely is a number or a 0-d tensor."""
    match node:
        case ast.UnaryOp(operand=operand):
            return is_number(operand, context)
        case ast.BinOp(left=left, right=right):
            return is_number(left, context) and is_number(right, context)
        case ast.Call(func=ast.Attribute(value=owner, attr=method), args=[], keywords=[]):
            if context.name(node.func) is not None or not context.is_traced(owner):
                return False
            return method in _REDUCING or (method in _KEEPING and is_number(owner, context))
        case ast.Constant(value=bool() | int() | float()):
            return True
        case _:
            return context.kind(node) is Kind.HOST
