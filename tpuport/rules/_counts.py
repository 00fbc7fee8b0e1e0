"""`x[mask].numel()` and its kin, which need only the number of the rows."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._masks import is_mask, is_tensor
from tpuport.source.rewrite.finding import Fix, NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)


def counted(read: ast.Subscript, context: Context) -> tuple[ast.expr, str] | None:
    """Return the expression that counts what a mask selects, and our helper for it."""
    parents = context.module.parents
    outer = parents[read]
    if isinstance(outer, ast.Call) and ast.unparse(outer) == f"len({ast.unparse(read)})":
        return outer, "count_rows"
    if not isinstance(outer, ast.Attribute):
        return None
    match outer.attr, parents[outer]:
        case "numel" | "nelement", ast.Call(args=[], keywords=[]) as call:
            return call, "count_elements"
        case "size", ast.Call(args=[ast.Constant(value=0)], keywords=[]) as call:
            return call, "count_rows"
        case "shape", ast.Subscript(slice=ast.Constant(value=0)) as first:
            return first, "count_rows"
        case _:
            return None


def count_fix(read: ast.Subscript, count: ast.expr, name: str, context: Context) -> Fix:
    """Return the fix that counts without selecting.

    Raises:
        NotFixable: the code around it may need a Python number.
    """
    if not is_mask(read.slice, context) or not _takes_tensor(count, context):
        raise NotFixable(f"`{ast.unparse(count)}` may be needed as a Python number")
    module = context.module
    origin = module.origin(count)
    tensor, mask = module.copy_node(read.value), module.copy_node(read.slice)
    text = Passage.of(f"{OPS}.{name}(", origin) + tensor + ", " + mask + ")"
    return Fix((Edit(*module.span(count), text),), (OPS,))


def _takes_tensor(count: ast.expr, context: Context) -> bool:
    """Return whether a tensor may replace a number: next to a tensor, or in a test."""
    parents = context.module.parents
    node, parent = count, parents[count]
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, _ARITHMETIC):
        other = parent.left if parent.right is node else parent.right
        return is_tensor(other, context)
    if not isinstance(parent, ast.Compare):
        return False
    # A test of a traced tensor is the business of the rules about branches and checks.
    while isinstance(parent, ast.Compare | ast.BoolOp | ast.UnaryOp):
        node, parent = parent, parents[parent]
    return isinstance(parent, ast.If | ast.Assert | ast.IfExp) and parent.test is node
