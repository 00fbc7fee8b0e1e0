"""Blocks moved into nested functions: the names that go in and out, and when that is exact."""

import ast
from collections.abc import Iterable, Sequence
from functools import cached_property

from tpuport.rules._effects import changed_names, refuse_effects
from tpuport.rules._expressions import function_around
from tpuport.source.inference.liveness import NOTHING, NameFlow, NameSet, surely_bound
from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context, head
from tpuport.source.syntax.module import SCOPES, own_bindings
from tpuport.source.syntax.statements import exits_loop, walk_scope

Statements = Sequence[ast.stmt]


class Lift:
    """The names that blocks take and return when each becomes a function.

    Args:
        node: The `if` or loop that the blocks come from.
        blocks: The statements of each function.
        context: The file and what is inferred about it.
        ends: Whether the function around them returns right after, so that no name is read.
        after: The names read after the blocks; by default those live after `node`.
        effects: Whether the blocks still run exactly when they did, which makes effects safe.
        given: Names that are parameters of the functions anyway.
        merges: Whether what reads the functions merges changes of the operands.
        unbound: Whether operands may be unbound before `node`, which the caller sees to.

    Attributes:
        outputs: Names that a block assigns and that are read later.
        operands: Names whose earlier value a block needs, which become its parameters.
        written: Names of objects from before that a block changes, with `merges`.

    Raises:
        NotFixable: a block would behave differently in a function.
    """

    def __init__(
        self,
        node: ast.If | ast.While | ast.For,
        blocks: Sequence[Statements],
        context: Context,
        *,
        ends: bool = False,
        after: NameSet | None = None,
        effects: bool = False,
        given: NameSet = NOTHING,
        merges: bool = False,
        unbound: bool = False,
    ) -> None:
        self.node, self.blocks, self.context, self.ends = node, blocks, context, ends
        self.flow: NameFlow = context.flow(function_around(node, context))
        if node not in self.flow.before:
            raise NotFixable("it is never reached")
        self.bound_before = self.flow.before[node] | surely_bound(head(node))
        self.assigned = _ordered(self.flow, blocks)
        live = self.flow.after[node] if after is None else after
        self.outputs = [] if ends else [name for name in self.assigned if name in live]
        self._check_names()
        self.operands = self._operands(given, unbound=unbound)
        changed = [name for b in blocks for name in changed_names(b)] if merges else []
        known = [name for name in dict.fromkeys(changed) if name in self.bound_before]
        self.operands += [name for name in known if name not in self.operands]
        self.written = [name for name in known if name not in (*self.assigned, *self.flow.declared)]
        for block in [] if effects else blocks:
            merged = set(changed_names(block)) & set(self.operands) if merges else ()
            refuse_effects(block, context, entering=self.operands, merged=merged)

    def operands_argument(self) -> list[str]:
        """Return the operands as a last argument; an empty list if there are none."""
        return [as_tuple(self.operands)] if self.operands else []

    def _operands(self, given: NameSet, *, unbound: bool) -> list[str]:
        needed: set[str] = set()
        for block in self.blocks:
            bound, _ = self.flow.names(block)
            # A closure finds names that are only read. A name that some block assigns is local in
            # its function, and a side that does not assign an output returns its earlier value.
            entering = self.flow.live_into(block, frozenset(self.outputs))
            needed |= entering & (set(bound) | set(self.outputs))
        operands = [name for name in self.assigned if name in needed and name not in given]
        for name in operands:
            if name not in self.bound_before and not unbound:
                raise NotFixable(f"{name} may be unbound: it has no value on every path")
        return operands

    def _check_names(self) -> None:
        assigned = set(self.assigned)
        for name in self.assigned:
            if name in self.flow.declared:
                raise NotFixable(f"it assigns {name}, which is global or nonlocal")
        if lost := assigned & self.flow.on_error[self.node]:
            raise NotFixable(f"it assigns {min(lost)}, which is read if it raises")
        for name in sorted(assigned & self.flow.captured):
            if not self._captured_inside_only(name):
                raise NotFixable(f"it assigns {name}, which a nested function or generator uses")
        for name in self.outputs:
            if any(_defines(node, name) for block in self.blocks for node in walk_scope(block)):
                raise NotFixable(f"it defines the function, class or module {name} for later")

    def _captured_inside_only(self, name: str) -> bool:
        """Return whether closures over a name stay in its block and see the same values."""
        # A closure sees what later iterations assign to its names, which a local of a new function
        # would hide.
        if isinstance(self.node, ast.While | ast.For) or in_loop(self.node, self.context):
            return False
        inside = self._inside
        closures = [node for node in self.flow.closures if node not in inside]
        if any(name in self.flow.names(closure)[1] for closure in closures):
            return False
        return self.ends or all(node in inside for node in self.flow.binders[name])

    @cached_property
    def _inside(self) -> set[ast.AST]:
        return {node for block in self.blocks for node in walk_scope(block)}


def in_loop(node: ast.AST, context: Context) -> bool:
    """Return whether a statement is in a loop of its function."""
    for parent in context.module.ancestors(node):
        if isinstance(parent, SCOPES):
            return False
        if isinstance(parent, ast.For | ast.AsyncFor | ast.While):
            return True
    return False


def as_tuple(names: Sequence[str]) -> str:
    """Return the source of a tuple of names."""
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _ordered(flow: NameFlow, blocks: Iterable[Statements]) -> list[str]:
    found: dict[str, None] = {}
    for block in blocks:
        found |= flow.names(block)[0]
    return list(found)


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((a.asname or a.name).partition(".")[0] == name for a in node.names)
    return isinstance(node, SCOPES) and name in own_bindings(node)


def is_range(node: ast.expr) -> bool:
    """Return whether an expression is a call of Python's `range`, reversed or not."""
    match node:
        case ast.Call(func=ast.Name(id="reversed"), args=[inner], keywords=[]):
            return isinstance(inner, ast.Call) and is_range(inner)
        case ast.Call(func=ast.Name(id="range")):
            return True
        case _:
            return False


def end_of(node: ast.AST, *, over_items: bool = False) -> ast.If | None:
    """Return the last statement of a loop over a range, or items, if it is `if test: break`."""
    match node:
        case ast.For(body=[_, *_, ast.If(body=[ast.Break()], orelse=[]) as last], iter=iterated):
            return last if over_items or is_range(iterated) else None
        case _:
            return None


def refuse_loop_exits(statements: Iterable[ast.stmt], context: Context) -> None:
    """Raise if statements `break` or `continue` a loop around them.

    Raises:
        NotFixable: a statement does.
    """
    found = exits_loop(statements)
    if found is not None:
        word = "break" if isinstance(found, ast.Break) else "continue"
        line = context.module.origin(found)
        # `convert` makes the loop around it a function, which it then leaves by `return`.
        reason = f"the {word} on line {line} cannot leave a nested function"
        raise NotFixable(reason, pins=not context.is_live)
