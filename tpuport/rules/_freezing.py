"""The parameters that an optimizer is built over, and those that the code around it freezes."""

import ast
from collections.abc import Iterator

from tpuport.source.rewrite.matching import Context


def all_parameters(node: ast.expr) -> ast.Call | None:
    """Return the call of `parameters()` if an expression gives all parameters of a model."""
    match node:
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner]):
            return all_parameters(inner)
        case ast.Call(func=ast.Attribute(attr="parameters"), args=[], keywords=[]):
            return node
        case _:
            return None


def frozen(node: ast.Call, context: Context) -> Iterator[tuple[str, ast.AST]]:
    """Yield what the code around a call freezes, as source text, and the node that does it."""
    around = context.module.outermost_function(node)
    parent = context.module.parents.get(around)
    for inner in ast.walk(parent if isinstance(parent, ast.ClassDef) else around):
        match inner:
            case ast.Call(
                func=ast.Attribute(value=owner, attr="requires_grad_"),
                args=[ast.Constant(value=False)],
            ):
                yield _owner(owner, inner, context), inner
            case ast.Assign(
                targets=[ast.Attribute(value=owner, attr="requires_grad")],
                value=ast.Constant(value=False),
            ):
                yield _owner(owner, inner, context), inner
            case _:
                pass


def _owner(node: ast.expr, place: ast.AST, context: Context) -> str:
    """Return the model that a frozen thing belongs to; for a loop's parameter, the loop's model."""
    text = ast.unparse(node)
    for parent in context.module.ancestors(place):
        match parent:
            case ast.For(
                target=target, iter=ast.Call(func=ast.Attribute(value=model, attr=method))
            ):
                names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
                if text in names and method in ("parameters", "named_parameters"):
                    return ast.unparse(model)
            case _:
                pass
    return text
