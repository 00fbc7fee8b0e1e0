"""Writes to `self` that are state, and whether a later call reads them."""

import ast

from tpuport.rules._state import ClassState, Write
from tpuport.source.rewrite.matching import Context


def is_state(write: Write, state: ClassState, context: Context) -> bool:
    """Return whether a write leaves more than a constant that is the same in every call."""
    if write.way == "augment" and isinstance(write.value, ast.Constant):
        return True
    if write.way in ("in_place", "element") and write.attribute in state.buffers:
        return True
    if write.value is not None and _is_moved(write.value, write.attribute):
        return False
    return write.value is not None and context.is_traced(write.value)


def _is_moved(value: ast.expr, attribute: str) -> bool:
    """Return whether a value is the attribute itself on another device: the same state."""
    match value:
        case ast.IfExp(body=body):
            return _is_moved(body, attribute)
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr="to" | "cuda")):
            return name == attribute
        case _:
            return False


def is_carried(write: Write, state: ClassState, context: Context) -> bool:
    """Return whether a later call reads what a write leaves behind."""
    if write.way in ("augment", "in_place", "element", "append"):
        return not _starts_anew(write, state, context)
    later = state.reached_from(write.method.name)
    for read in state.reads.get(write.attribute, ()):
        reader = context.module.outermost_function(read)
        assert isinstance(reader, ast.FunctionDef | ast.AsyncFunctionDef)
        if reader is write.method:
            # A read that the write does not surely precede may see what the call before left.
            if read.lineno <= write.node.lineno or not _is_followed(write.node, read, context):
                return True
        elif reader.name not in later and context.in_step(read):
            return True
    return False


def _starts_anew(write: Write, state: ClassState, context: Context) -> bool:
    """Return whether a step binds the attribute to a first value before it changes it."""
    return any(
        other.attribute == write.attribute
        and other.way == "bind"
        and other.value is not None
        and not context.is_traced(other.value)
        and (context.in_step(other.node) or other.method.name.startswith("init_"))
        for other in state.writes
        if other.method.name != "__init__"
    )


def _is_followed(node: ast.stmt, read: ast.AST, context: Context) -> bool:
    """Return whether a read can only come after a statement of the same call."""
    block, _ = context.module.block(node)
    return any(ancestor in block for ancestor in context.module.ancestors(read))
