"""TPU410: an in-place write that is lost, because it goes through a view."""

import ast

from tpuport.rules._effects import is_in_place
from tpuport.rules._masks import parts
from tpuport.rules._placing import made_on_device
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.rules._views import (
    LOSING_ON_SLICES,
    MAY_COPY,
    NOT_A_WRITE,
    PARTS,
    Mutation,
    View,
    is_read_after,
    made_before,
    mutation,
    rebound,
    view_of,
)
from tpuport.source.inference.kinds import Kind
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
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
_REDUCING = frozenset({"mean", "sum", "max", "min", "amax", "amin", "prod", "std", "var", "norm"})
_KEEPING = frozenset({"detach", "abs", "clone", "float", "exp", "log", "sqrt", "item"})


class WriteThroughView(Rule):
    """An in-place write to a view, whose base is read later.

    ## What it does
    Finds in-place methods, `+=` and item assignments on the result of `view`, `reshape`, `flatten`,
    `unsqueeze`, `transpose`, `chunk` and the other views that are not subscripts, where the tensor
    that they are views of is read later (or the other way round); and `zero_`, `fill_`,
    `masked_fill_` and a few more on a subscript such as `x[:, 0]`. The fix assigns to the
    subscript, or rebinds the base to the written view.

    ## Why is this bad?
    torchax writes through subscripts only, and through these not with every method. Other views are
    copies there: the write never reaches the base, and no error is raised.

    ## Fix safety
    The fix is exact in eager PyTorch; where the original raises, the exception may read otherwise.
    There is none where the view may be a copy (`reshape`), is one of several parts, or where other
    names may refer to the base.

    ## References
    https://docs.pytorch.org/docs/stable/tensor_view.html
    """

    CODE = "TPU410"
    MESSAGE = "`{write}` is lost: torchax does not write through {step} to `{base}`"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x * 2
                rows = y.unsqueeze(0)
                rows += 1  # all of them
                return y
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                y = x * 2
                rows = y.unsqueeze(0)
                rows += 1  # all of them
                y = rows.view(y.shape)
                return y
            """,
            jit_error=None,
            harm="differs",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x + 1
                y[..., :2].zero_()
                y[..., 0].fill_(x.mean().detach() * 2)
                y[..., 1:].masked_fill_(x[..., 1:] > 0, -1.0)
                return y
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                y = x + 1
                y[..., :2] = 0
                y[..., 0] = x.mean().detach() * 2
                y[..., 1:] = y[..., 1:].clone().masked_fill_(x[..., 1:] > 0, -1.0)
                return y
            """,
            jit_error=None,
            harm="differs",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x.clone()
                y.view(-1)[0] = 7.0
                flat = y.flatten()
                y[1] = 3.0
                return y, flat
            """,
            jit_error=None,
            harm="differs",
            left="the view has no name",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, rows: list):
            y = x * 2
            y[:, 0] += 1
            y[1:].mul_(3)
            y[0, 1] = 5.0
            y += 1
            y[1:].add_(1).clamp_(-1, 1)
            y = y.view(-1)
            y += 1
            y[0] = 2
            swapped = x.t().reshape(-1)
            swapped.zero_()
            return y, swapped, x
        """,
        """
        import torch


        def forward(x: torch.Tensor):
            y = x * 2
            heads = y.view(2, -1)
            heads.mul_(2)
            y = heads + 1
            table = torch.zeros(4)
            table.view(-1)[0] = 1.0
            return y, table
        """,
    )

    def visit_Expr(self, node: ast.stmt, context: Context) -> None:
        change = mutation(node)
        if change is None or not runs_in_step(node, context):
            return
        lost = _lost_write(node, change, context)
        if lost is not None:
            base, step = lost
            context.report(self, node, write=node, step=step, base=base)

    visit_Assign = visit_AugAssign = visit_Expr

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.stmt)
        return _rebinding_fix(node, context)


# Writes that do not reach a tensor that is read later.


def _lost_write(node: ast.stmt, change: Mutation, context: Context) -> tuple[ast.expr, str] | None:
    """Return the base that a write does not reach, and the view between; None if it is reached."""
    view = view_of(change.target, context)
    if view is None:
        return None
    if view.losing is not None or (view.steps and change.method in LOSING_ON_SLICES):
        step = f"`{view.losing}`" if view.losing else f"`{change.method}` on a subscript"
        return (view.base, step) if _is_seen(view, node, context) else None
    if not isinstance(view.base, ast.Name) or view.steps:
        return None
    return _lost_by_name(view.base.id, node, change, context) or _unseen_by_view(
        view.base, node, context
    )


def _is_seen(view: View, node: ast.stmt, context: Context) -> bool:
    """Return whether the base of a view without a name is traced and read after the write."""
    if not _is_traced(view.base, context):
        return False
    base = view.base
    return isinstance(base, ast.Attribute) or (
        isinstance(base, ast.Name) and is_read_after(base.id, node, context)
    )


def _is_traced(base: ast.expr, context: Context) -> bool:
    return context.is_traced(base) or made_on_device(base, context)


def _lost_by_name(
    name: str, node: ast.stmt, change: Mutation, context: Context
) -> tuple[ast.expr, str] | None:
    """Return the base of a view that a name holds, if it is read after the write."""
    function = context.module.function(node)
    for assign, value in made_before(name, node, context):
        view = view_of(value, context)
        if view is None or not view.steps or not isinstance(view.base, ast.Name):
            continue
        loses = view.losing is not None or change.method in LOSING_ON_SLICES
        is_part = isinstance(assign.targets[0], ast.Name) or view.losing in PARTS
        base = view.base.id
        if not loses or not is_part or base == name or function is None:
            continue
        if rebound({base}, assign, node, function) or not _is_traced(view.base, context):
            continue
        if is_read_after(base, node, context) and not _is_settled(node, base, name, context):
            return view.base, f"`{view.losing or change.method}`"
    return None


def _unseen_by_view(
    base: ast.Name, node: ast.stmt, context: Context
) -> tuple[ast.expr, str] | None:
    """Return a view that was made before its base is written and is read afterwards."""
    function = context.module.function(node)
    block, place = context.module.block(node)
    for earlier in block[:place]:
        match earlier:
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value) if name != base.id:
                view = view_of(value, context)
                if view is None or view.losing is None or function is None:
                    continue
                if not isinstance(view.base, ast.Name) or view.base.id != base.id:
                    continue
                if rebound({base.id, name}, earlier, node, function):
                    continue
                if _is_traced(view.base, context) and is_read_after(name, node, context):
                    return target, f"`{view.losing}`"
            case _:
                pass
    return None


def _is_settled(node: ast.stmt, base: str, name: str, context: Context) -> bool:
    """Return whether the statement after a write rebinds the base to the written view."""
    block, place = context.module.block(node)
    following = block[place + 1] if place + 1 < len(block) else None
    match following:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=owner))),
        ):
            return target == base and owner == name
        case _:
            return False


# The fix: write to the base itself, or rebind it to the view.


def _rebinding_fix(node: ast.stmt, context: Context) -> Fix:
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
    if all(ast.unparse(part) in (":", "...") for part in parts(target.slice)):
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
    if not isinstance(call.func, ast.Attribute) or is_in_place(call.func.attr, but=NOT_A_WRITE):
        return False
    name = context.name(call.func)
    if name is not None:
        return name.startswith("torch.") and not call.keywords
    return context.is_traced(call.func.value)


def _is_single(arguments: list[ast.expr], context: Context) -> bool:
    """Return whether there is one argument, and it is a number or a 0-d tensor."""
    return len(arguments) == 1 and _is_scalar(arguments[0], context)


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


def _is_scalar(node: ast.expr, context: Context) -> bool:
    """Return whether a value surely is a number or a 0-d tensor."""
    match node:
        case ast.UnaryOp(operand=operand):
            return _is_scalar(operand, context)
        case ast.BinOp(left=left, right=right):
            return _is_scalar(left, context) and _is_scalar(right, context)
        case ast.Call(func=ast.Attribute(value=owner, attr=method), args=[], keywords=[]):
            if context.name(node.func) is not None or not context.is_traced(owner):
                return False
            return method in _REDUCING or (method in _KEEPING and _is_scalar(owner, context))
        case ast.Constant(value=bool() | int() | float()):
            return True
        case _:
            return context.kind(node) is Kind.HOST
