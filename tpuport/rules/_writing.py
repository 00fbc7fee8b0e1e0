"""Writes to `self` that happen in a step, and the kind of each."""

import ast
from collections.abc import Iterator

from tpuport.rules._guards import (
    compares_size,
    guards,
    is_growing,
    lazy_guard,
    lazy_return,
    may_compare_sizes,
)
from tpuport.rules._placing import CREATORS
from tpuport.rules._state import (
    ClassState,
    Write,
    attribute_of,
    class_state,
    is_module,
    is_set_up,
    self_name,
)
from tpuport.source.rewrite.matching import Context


def step_writes(node: ast.ClassDef, context: Context) -> Iterator[tuple[Write, str]]:
    """Yield the writes of a module's methods that a step makes, each with its kind.

    The kind is `lazy` where it fills a missing attribute, `growing` where it makes a cache longer,
    else `plain`. Methods that the constructor also calls are set-up, not steps.
    """
    if not is_module(node):
        return
    state = class_state(node, context)
    for write in state.writes:
        if is_set_up(write.method, state) or self_name(write.method) is None:
            continue
        if context.in_step(write.node):
            yield write, _sort(write, state, context)


def _sort(write: Write, state: ClassState, context: Context) -> str:
    if is_growing(write) or any(
        grown(guard, write, state, context) for guard in guards(write.node, context)
    ):
        return "growing"
    is_lazy = lazy_guard(write, context) is not None or lazy_return(write)
    return "lazy" if is_lazy else "plain"


def grown(guard: ast.If, near: Write, state: ClassState, context: Context) -> bool:
    """Return whether a branch that a write is in makes a table longer."""
    return grown_by(guard, self_name(near.method) or "self", state, context) is not None


def grown_by(guard: ast.If, owner: str, state: ClassState, context: Context) -> str | None:
    """Return the tensor in `self` that a branch rebuilds if it is too short, else None."""
    if not may_compare_sizes(guard.test):
        return None
    inside = {inner for statement in guard.body for inner in ast.walk(statement)}
    writes = [write for write in state.writes if write.node in inside]
    for inner in inside:
        if isinstance(inner, ast.Call):
            name = attribute_of(inner.func, owner)
            if name in state.methods:
                writes += state.written_by(name)
    tensors = [write.attribute for write in writes if _is_tensor(write, state, context)]
    if not tensors or not compares_size(guard.test, {w.attribute for w in writes}, owner):
        return None
    return tensors[0]


def _is_tensor(write: Write, state: ClassState, context: Context) -> bool:
    if write.way == "buffer" or write.attribute in state.buffers:
        return True
    if write.value is None:
        return False
    return context.is_traced(write.value) or any(
        isinstance(node, ast.Call)
        and (
            (context.name(node.func) or "") in {f"torch.{name}" for name in (*CREATORS, "cat")}
            or attribute_of(node.func, self_name(write.method) or "self") in state.methods
        )
        for node in ast.walk(write.value)
    )
