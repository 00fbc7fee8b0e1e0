"""Loops that call a model again and again, and what they call it with."""

import ast
import re
from collections.abc import Iterator

from tpuport.source.engine import Context
from tpuport.source.statements import walk_scope

Loop = ast.For | ast.While
# What code calls the network that it runs in a loop.
_MODEL = re.compile(
    r"(^|_)(model|net|network|unet|transformer|denoiser|policy|dit|encoder|decoder|vae"
    r"|step_fn|train_step|model_fn|diffusion|actor|critic)\d*$"
)
_JOINING = frozenset({"torch.cat", "torch.concat", "torch.concatenate", "torch.hstack"})


def model_calls(node: Loop) -> Iterator[ast.Call]:
    """The calls of models in the body of a loop, those of inner loops left to these."""
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
            return _MODEL.search(name) is not None
        case _:
            return False


def arguments(call: ast.Call) -> list[ast.expr]:
    """Everything that a call is given."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def counters(node: Loop) -> set[str]:
    """The names that a loop counts with."""
    match node:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"))):
            return {name}
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=name), *_]),
            iter=ast.Call(func=ast.Name(id="enumerate")),
        ):
            return {name}
        case _:
            return set()


def is_varying_number(node: ast.expr, counted: set[str]) -> bool:
    """Whether an argument is a Python number that each round of a loop changes."""
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
    """The names that each round of a loop makes longer, as `x = torch.cat([x, y])` does."""
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
    # What a round starts anew does not grow from one to the next.
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
