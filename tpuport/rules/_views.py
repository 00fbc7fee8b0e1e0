"""Views of tensors: those that plain torchax writes through, and reads of their base.

The only rule that imports it, write_through_view, would be too long to read with it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tpuport.rules._effects import is_in_place
from tpuport.rules._origins import counter_of
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Function, own_bindings
from tpuport.source.syntax.statements import walk_scope

# Views whose writes do not reach the base in plain torchax, which follows only `x[...]`.
REORDERING = frozenset({"permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis"})
MAY_COPY = frozenset({"flatten", "ravel", "reshape"})
PARTS = frozenset({"chunk", "split", "tensor_split", "unbind"})
LOSING = frozenset(
    {
        *REORDERING,
        *MAY_COPY,
        *PARTS,
        "view",
        "view_as",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "narrow",
        "select",
        "diagonal",
        "expand",
        "expand_as",
        "unfold",
        "as_strided",
    }
)
LOSING_ATTRIBUTES = frozenset({"T", "mT", "H", "mH"})
# In-place methods that torchax applies to a copy of a slice.
LOSING_ON_SLICES = frozenset(
    {
        "zero_",
        "fill_",
        "masked_fill_",
        "addcmul_",
        "addcdiv_",
        "tril_",
        "triu_",
        "renorm_",
        "fill_diagonal_",
        "lerp_",
        "nan_to_num_",
        "index_add_",
        "index_copy_",
        "index_fill_",
        "frac_",
        "logit_",
        "sgn_",
    }
)
NOT_A_WRITE = frozenset({"requires_grad_", "detach_", "retain_grad_", "share_memory_"})


@dataclass(frozen=True)
class View:
    """A view of a tensor.

    Attributes:
        base: The expression that it is a view of: a name or an attribute.
        losing: The name of a view that plain torchax does not write through; None if there is none.
        steps: The names of the views from the base to the result; `[]` for a subscript.
    """

    base: ast.expr
    losing: str | None
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Mutation:
    """A statement that changes a tensor in place.

    Attributes:
        target: The tensor.
        method: The in-place method, or `+=` or `[]=`.
    """

    target: ast.expr
    method: str


def view_of(node: ast.expr, context: Context) -> View | None:
    """Return the view that an expression is; None if it may be a copy or is no view."""
    match node:
        case ast.Name() | ast.Attribute(value=ast.Name()) if not _is_losing_attribute(node):
            return View(node, None, ())
        case ast.Attribute(value=inner, attr=attribute) if attribute in LOSING_ATTRIBUTES:
            return _extended(view_of(inner, context), attribute)
        case ast.Subscript(value=inner, slice=index) if is_basic(index, context):
            found = view_of(inner, context)
            return found and View(found.base, found.losing, (*found.steps, "[]"))
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in LOSING:
            if (context.name(node.func) or "").startswith("torch."):
                return _extended(view_of(node.args[0], context), method) if node.args else None
            if method == "view" and _is_dtype(node):
                return None
            return _extended(view_of(inner, context), method)
        case _:
            return None


def _is_losing_attribute(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in LOSING_ATTRIBUTES


def _is_dtype(node: ast.Call) -> bool:
    first = node.args[0] if node.args else None
    return isinstance(first, ast.Attribute) and ast.unparse(first).startswith("torch.")


def _extended(view: View | None, step: str) -> View | None:
    if view is None:
        return None
    # Merging dimensions that were reordered gives a copy, in eager PyTorch too.
    strange = REORDERING | LOSING_ATTRIBUTES | {"expand", "expand_as", "unfold", "diagonal", "[]"}
    if step in MAY_COPY and strange.intersection(view.steps):
        return None
    return View(view.base, step, (*view.steps, step))


def is_basic(index: ast.expr, context: Context) -> bool:
    """Return whether an index gives a view: numbers, slices, None and ..., no tensors or lists."""
    match index:
        case ast.Slice() | ast.Constant():
            return True
        case ast.Tuple(elts=parts):
            return all(is_basic(part, context) for part in parts)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return is_basic(operand, context)
        case ast.Name():
            return _is_loop_counter(index, context)
        case _:
            return False


def _is_loop_counter(node: ast.Name, context: Context) -> bool:
    """Return whether a name counts a loop around it, whatever else binds it."""
    counters = (
        counter_of(loop) for loop in context.module.ancestors(node) if isinstance(loop, ast.For)
    )
    return any(counter is not None and counter.id == node.id for counter in counters)


def mutation(node: ast.stmt) -> Mutation | None:
    """Return the tensor that a statement changes in place, if it has the form of one."""
    match node:
        case ast.Expr(value=ast.Call() as call) | ast.Assign(value=ast.Call() as call):
            found, inner = None, call
            while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                if is_in_place(inner.func.attr, but=NOT_A_WRITE):
                    found = Mutation(inner.func.value, inner.func.attr)
                inner = inner.func.value
            return found
        case ast.Assign(targets=[ast.Subscript(value=target)]):
            return Mutation(target, "[]=")
        case ast.AugAssign(target=ast.Subscript(value=target)):
            return Mutation(target, "[]=")
        case ast.AugAssign(target=ast.Name() as target):
            return Mutation(target, "+=")
        case _:
            return None


def made_before(
    name: str, node: ast.stmt, context: Context
) -> Iterator[tuple[ast.Assign, ast.expr]]:
    """Yield the assignments of a name in the blocks around a statement that surely run before it.

    Nothing between them and the statement binds the name again.
    """
    function = context.module.function(node)
    if function is None:
        return
    for assign, value in _assignments(name, node, context):
        if not rebound({name}, assign, node, function):
            yield assign, value


def _assignments(
    name: str, node: ast.stmt, context: Context
) -> Iterator[tuple[ast.Assign, ast.expr]]:
    statement: ast.AST = node
    while isinstance(statement, ast.stmt):
        block, place = context.module.block(statement)
        for earlier in block[:place]:
            match earlier:
                case ast.Assign(targets=[target], value=value) if name in _names(target):
                    yield earlier, value
                case _:
                    pass
        statement = context.module.parents[statement]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return


def _names(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Tuple | ast.List):
        return {name for part in target.elts for name in _names(part)}
    return {target.id} if isinstance(target, ast.Name) else set()


def rebound(names: set[str], first: ast.stmt, last: ast.stmt, function: Function) -> bool:
    """Return whether a name is bound between two statements, in source order."""
    inside = {id(inner) for statement in (first, last) for inner in ast.walk(statement)}
    between = [
        statement
        for statement in function.body
        if statement.lineno <= last.lineno and first.lineno <= (statement.end_lineno or 0)
    ]
    return any(
        names.intersection(own_bindings(node))
        and id(node) not in inside
        and first.lineno <= getattr(node, "lineno", 0) <= last.lineno
        for node in walk_scope(between)
    )


def is_read_after(name: str, node: ast.stmt, context: Context) -> bool:
    """Return whether the value that a name has may be read once a statement has ended."""
    function = context.module.function(node)
    if function is None:
        return False
    flow = context.flow(function)
    return name in flow.after.get(node, ()) or name in flow.captured
