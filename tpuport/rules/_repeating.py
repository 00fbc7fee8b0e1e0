"""Loops that call a model repeatedly, and the arguments of these calls."""

import ast
import re
from collections.abc import Iterator

from tpuport.rules._origins import counter_of
from tpuport.source.inference.roles import HOST_FUNCTION
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.statements import walk_scope

Loop = ast.For | ast.While
# Names that code gives to the network it runs in a loop.
_MODEL = re.compile(
    r"(^|_)(model|net|network|unet|transformer|denoiser|policy|dit|encoder|decoder|vae"
    r"|step_fn|train_step|model_fn|diffusion|actor|critic)\d*$"
)
_JOINING = frozenset({"torch.cat", "torch.concat", "torch.concatenate", "torch.hstack"})


def model_calls(node: Loop) -> Iterator[ast.Call]:
    """Yield the calls of models in the body of a loop, without those of inner loops."""
    pending: list[ast.AST] = [*node.body]
    while pending:
        inner = pending.pop(0)
        if isinstance(inner, Loop):
            continue
        if isinstance(inner, ast.Call) and _is_model(inner.func):
            yield inner
        pending.extend(ast.iter_child_nodes(inner))


def _is_model(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _MODEL.search(name) is not None and HOST_FUNCTION.search(name) is None
        case _:
            return False


def arguments(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def counters(node: Loop) -> set[str]:
    """Return the names that a loop counts with."""
    counter = counter_of(node)
    return set() if counter is None else {counter.id}


def is_varying_number(node: ast.expr, counted: set[str]) -> bool:
    """Return whether an argument is a Python number that each iteration changes."""
    match node:
        case ast.Name(id=name):
            return name in counted
        case ast.Call(func=ast.Attribute(attr="item"), args=[]):
            return True
        case ast.Call(func=ast.Name(id="int" | "float"), args=[inner]):
            return not isinstance(inner, ast.Constant)
        case ast.BinOp(left=left, right=right):
            sides = (left, right)
            return any(is_varying_number(side, counted) for side in sides) and all(
                isinstance(side, ast.Constant) or is_varying_number(side, counted) for side in sides
            )
        case _:
            return False


def growing(node: Loop, context: Context) -> set[str]:
    """Return the names that each iteration makes longer, as `x = torch.cat([x, y])` does."""
    found: set[str] = set()
    for inner in walk_scope(node.body):
        match inner:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=func, args=[ast.List(elts=parts) | ast.Tuple(elts=parts), *_]),
            ) if context.name(func) in _JOINING:
                if any(isinstance(part, ast.Name) and part.id == name for part in parts):
                    found.add(name)
            case _:
                pass
    # A tensor that each iteration builds anew does not grow from one to the next.
    return {name for name in found if not _starts_anew(name, node)}


def _starts_anew(name: str, node: Loop) -> bool:
    return any(
        isinstance(target, ast.Name) and target.id == name
        for inner in walk_scope(node.body)
        if isinstance(inner, ast.Assign)
        for targets in inner.targets
        for target in ast.walk(targets)
        if not any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(inner.value))
    )
