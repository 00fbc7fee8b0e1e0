"""In-place writes that do not reach a tensor that is read later."""

import ast

from tpuport.rules._placing import made_on_device
from tpuport.rules._views import (
    LOSING_ON_SLICES,
    PARTS,
    Mutation,
    View,
    is_read_after,
    made_before,
    rebound,
    view_of,
)
from tpuport.source.rewrite.matching import Context


def lost_write(node: ast.stmt, change: Mutation, context: Context) -> tuple[ast.expr, str] | None:
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
        if is_read_after(base, node, context) and not is_settled(node, base, name, context):
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


def is_settled(node: ast.stmt, base: str, name: str, context: Context) -> bool:
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
