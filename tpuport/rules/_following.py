"""The proof that code works on the rows that a mask selects when their number is unknown.

The rows are followed from the read, through elementwise operations, reshapes and names, to their
end: written through a mask, reduced to a number, or joined with the rows left out. The edits that
this needs are collected on the way. Anything else ends the proof.
"""

import ast
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tpuport.rules._expressions import OPS
from tpuport.rules._masks import bindings, is_leading, is_ours, masks, parts
from tpuport.rules._reports import is_log
from tpuport.source.inference.rowwise import (
    ELEMENTWISE,
    HOST_ATTRIBUTES,
    JOINS,
    LOSS_MODULES,
    LOSSES,
    REDUCTIONS,
    RESHAPES,
)
from tpuport.source.rewrite.finding import Fix, NotFixable
from tpuport.source.rewrite.matching import Context, quote
from tpuport.source.syntax.module import FUNCTIONS, SCOPES
from tpuport.source.syntax.text import Edit, Passage

_ELEMENTWISE_OPERATORS = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.BitAnd,
    ast.BitOr,
    ast.BitXor,
)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ROWWISE = f"{OPS}.rowwise("
_LOSS_OPTIONS = ("beta", "delta", "ignore_index", "input", "label_smoothing", "target")
_CAUGHT = ("Exception", "RuntimeError", "BaseException")


class RowFix:
    """The edits that let rows selected by a mask be of unknown number.

    Args:
        read: The expression that reads the rows.
        context: The file and what is inferred about it.

    Attributes:
        edits: The edits that the proof needs, by offsets.
        joined: The joins that put the rows together with those that their mask leaves out.
    """

    def __init__(self, read: ast.expr, context: Context) -> None:
        self.context, self.module = context, context.module
        self.leading, self.index = True, ""
        if isinstance(read, ast.Subscript):
            self.leading, self.index = is_leading(read, context), ast.unparse(read.slice)
        self.edits: dict[tuple[int, int], Edit] = {}
        self._seen: set[ast.AST] = set()
        self.joined: list[ast.Call] = []

    def fix(self) -> Fix:
        """Return the fix of all edits."""
        return Fix(tuple(self.edits.values()), (OPS,))

    # Edits.

    def around(self, node: ast.expr, before: str, after: str = ")") -> None:
        """Put text before and after an expression."""
        origin = self.module.origin(node)
        start, end = self.module.span(node)
        self.edits[start, start] = Edit(start, start, Passage.of(before, origin))
        self.edits[end, end] = Edit(end, end, Passage.of(after, origin))

    def mark(self, node: ast.Subscript, *, cut: bool = False) -> None:
        """Make `x[mask]` select by position where the program cannot select by value."""
        if not is_ours(node.value):
            self.around(node.value, f"{OPS}.masked(", ", cut=True)" if cut else ")")

    def inverted(self, node: ast.Subscript) -> None:
        """Write the index of `x[~mask]` as `tpuport.ops.inverse(mask)`, which keeps the mask."""
        if isinstance(node.slice, ast.UnaryOp):
            start, end = self.module.span(node.slice)
            operand = self.module.copy_node(node.slice.operand)
            text = Passage.of(f"{OPS}.inverse(", self.module.origin(node)) + operand + ")"
            self.edits[start, end] = Edit(start, end, text)

    def after(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Put statements after a statement."""
        end = self.module.span(statement)[1]
        indent = "\n" + self.module.text.indentation(statement.lineno)
        text = "".join(indent + line for line in lines)
        self.edits[end, end] = Edit(end, end, Passage.of(text, self.module.origin(statement)))

    # Following the rows.

    def follow(self, rows: ast.expr) -> None:
        """Raise unless every user of an expression's value can take rows of unknown number.

        Raises:
            NotFixable: a user of the value may need the number of rows.
        """
        if rows in self._seen:
            return
        self._seen.add(rows)
        parent = self.module.parents[rows]
        if _is_elementwise(parent):
            assert isinstance(parent, ast.expr)
            self.follow(parent)
            return
        match parent:
            case ast.Attribute():
                self._attribute(parent)
            case ast.Subscript(value=value) if value is rows:
                self._subscript(parent)
            case ast.Call() | ast.keyword() | ast.List() | ast.Tuple():
                self._argument(rows, parent)
            case ast.Assign() | ast.AugAssign():
                self._statement(parent)
            case ast.Return():
                raise NotFixable("the function returns as many rows as the mask selects")
            case _ if not isinstance(parent, ast.Expr):
                raise self._unknown(parent)

    def _unknown(self, node: ast.AST) -> NotFixable:
        if isinstance(node, ast.keyword | ast.comprehension | ast.FormattedValue):
            node = self.module.parents[node]
        text = quote(ast.unparse(node))
        return NotFixable(f"`{text}` may depend on how many rows the mask selects")

    def _attribute(self, node: ast.Attribute) -> None:
        call = self.module.parents[node]
        if isinstance(call, ast.Call) and call.func is node:
            self._method(node.attr, call)
        elif node.attr == "shape":
            self._shape(node)
        elif node.attr not in HOST_ATTRIBUTES:
            raise self._unknown(node)

    def _shape(self, node: ast.Attribute) -> None:
        match self.module.parents[node]:
            case ast.Subscript(slice=axis) if self.leading and _is_other_axis(axis):
                pass
            case ast.FormattedValue():
                pass  # it is only printed
            case parent:
                raise self._unknown(parent)

    def _method(self, name: str, call: ast.Call) -> None:
        if _is_special(call, name):
            raise self._unknown(call)
        if name in ELEMENTWISE:
            self.follow(call)
        elif name in REDUCTIONS:
            self._reduction(name, call, call.args)
        elif name in RESHAPES and self.leading and _starts_with_minus_one(call.args):
            self.follow(call)
        elif name == "flatten" and self.leading and not call.args and not call.keywords:
            self.follow(call)
        elif name == "size" and self.leading and call.args and _is_other_axis(call.args[0]):
            pass
        elif name != "dim":
            raise self._unknown(call)

    def _reduction(self, name: str, call: ast.Call, options: Sequence[ast.expr]) -> None:
        """Follow the result of a reduction over another axis than that of the rows: it has rows."""
        dims = [*options, *(k.value for k in call.keywords if k.arg == "dim")]
        known = all(k.arg in ("dim", "dtype", "keepdim") for k in call.keywords)
        # With a dimension `max` and `min` return indices, too.
        if not known or (dims and name in ("max", "min")):
            raise self._unknown(call)
        over_rows = self.leading and dims and ast.unparse(dims[0]) == "0"
        if dims and not over_rows:
            self.follow(call)

    def _subscript(self, node: ast.Subscript) -> None:
        first, *rest = parts(node.slice)
        match first:
            case ast.Constant(value=value) if value is Ellipsis:
                is_row_by_row = all(_is_plain(part) for part in rest)
            case ast.Slice(lower=None, step=None, upper=upper):
                is_row_by_row = (upper is None or not rest) and all(_is_plain(p) for p in rest)
            case _:
                is_row_by_row = False
        if not is_row_by_row or not self.leading or not isinstance(node.ctx, ast.Load):
            raise self._unknown(node)
        self.follow(node)

    def _argument(self, rows: ast.expr, parent: ast.AST) -> None:
        call = parent
        if isinstance(parent, ast.keyword | ast.List | ast.Tuple):
            call = self.module.parents[parent]
        if not isinstance(call, ast.Call) or call.func is rows:
            raise self._unknown(parent)
        name = self._torch_function(call)
        if isinstance(parent, ast.List | ast.Tuple) != (name in JOINS) or _is_special(call, name):
            raise self._unknown(call)
        if name in JOINS:
            self._join(call)
        elif name in ELEMENTWISE:
            self.follow(call)
        elif name in REDUCTIONS:
            self._reduction(name, call, call.args[1:])
        elif name not in LOSSES or not _is_plain_loss(call):
            raise self._unknown(call)
        if not ast.unparse(call.func).startswith(_ROWWISE):
            self.around(call.func, _ROWWISE)

    def _torch_function(self, call: ast.Call) -> str:
        function = call.func
        if isinstance(function, ast.Call) and ast.unparse(function).startswith(_ROWWISE):
            function = function.args[0]
        made = _loss_modules(function, self.context)
        if made is not None:
            return made
        root, _, last = (self.context.name(function) or "").rpartition(".")
        if root not in ("torch", "torch.nn.functional"):
            raise self._unknown(call)
        return last

    def _join(self, call: ast.Call) -> None:
        if not self.leading or len(call.args) > 2:
            raise self._unknown(call)
        dims = [k.value for k in call.keywords if k.arg == "dim"] + call.args[1:]
        if any(not (isinstance(d, ast.Constant) and d.value == 0) for d in dims):
            raise self._unknown(call)
        if self._is_whole(call):
            self.joined.append(call)
        else:
            self.follow(call)

    def _is_whole(self, call: ast.Call) -> bool:
        """Return whether both sides of every mask are joined, so that the size is known."""
        pieces = call.args[0].elts if isinstance(call.args[0], ast.List | ast.Tuple) else []
        sides: Counter[tuple[str, bool]] = Counter()
        for piece in pieces:
            read = self._read_of(piece)
            mask = read.slice if read is not None else None
            if mask is None:
                return False
            match mask:
                case ast.UnaryOp(op=ast.Invert(), operand=operand):
                    sides[ast.unparse(operand), True] += 1
                case ast.Call(args=[operand]) if ast.unparse(mask.func) == f"{OPS}.inverse":
                    sides[ast.unparse(operand), True] += 1
                case _:
                    sides[ast.unparse(mask), False] += 1
        return all(sides[mask, not side] == count for (mask, side), count in sides.items())

    def _read_of(self, node: ast.expr) -> ast.Subscript | None:
        """Return the masked read that an expression has its rows from."""
        match node:
            case ast.Subscript():
                return node
            case ast.BinOp(left=read, right=ast.Constant()) | ast.UnaryOp(operand=read):
                return self._read_of(read)
            case ast.Call(args=[read]) | ast.Call(func=ast.Attribute(value=read)):
                return self._read_of(read)
            case ast.Name(id=name):
                function = self.module.function(node)
                bound = [
                    each.value
                    for each in (() if function is None else ast.walk(function))
                    if isinstance(each, ast.Assign)
                    and any(isinstance(t, ast.Name) and t.id == name for t in each.targets)
                ]
                return self._read_of(bound[0]) if len(bound) == 1 else None
            case _:
                return None

    # Statements and names.

    def _statement(self, node: ast.Assign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            match target:
                case ast.Name() if isinstance(node, ast.Assign):
                    self._name(target, node)
                case ast.Subscript() if is_ours(target.value):
                    pass
                case ast.Subscript() if self._takes_rows(target):
                    guard = _guard_of(node, self.context)
                    self.mark(target, cut=guard is not None)
                    if guard is not None:
                        self.after(guard.statement, guard.lines())
                case _:
                    raise self._unknown(node)

    def _takes_rows(self, target: ast.Subscript) -> bool:
        """Return whether a target's mask selects along the axis of the rows written to it."""
        if len(masks(target, self.context)) != 1:
            return False
        is_same = ast.unparse(target.slice) == self.index
        return is_same or (self.leading and is_leading(target, self.context))

    def _name(self, target: ast.Name, statement: ast.stmt) -> None:
        function = self.module.function(target)
        scope = self.module.scope(target)
        if function is None or scope is not function:
            raise self._unknown(statement)
        flow = self.context.flow(function)
        if target.id in flow.captured or target.id in flow.declared or flow.reads_frame:
            raise NotFixable(f"a nested function may use {target.id}")
        for use in self._uses(target.id, statement, function):
            if isinstance(use.ctx, ast.Load):
                self.follow(use)
            elif isinstance(self.module.parents[use], ast.AugAssign):
                raise self._unknown(self.module.parents[use])

    def _uses(self, name: str, statement: ast.stmt, function: ast.AST) -> Sequence[ast.Name]:
        """Return all uses of a name that may still hold the value that a statement gave it."""
        own = self.module.span(statement)
        first, end = own[1], self._rebound(name, statement)
        loops = [
            parent
            for parent in self.module.ancestors(statement)
            if isinstance(parent, ast.For | ast.AsyncFor | ast.While)
        ]
        if loops:
            first = min(self.module.start(loop) for loop in loops)
            end = None  # the next iteration, or a `break`, may skip the rebinding
        return [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Name)
            and node.id == name
            and (place := self.module.start(node)) >= first
            and (end is None or place < end)
            and not (own[0] <= place < own[1])
        ]

    def _rebound(self, name: str, statement: ast.stmt) -> int | None:
        """Return the offset where a name surely gets another value; None if there is none."""
        node: ast.AST = statement
        for parent in [*self.module.ancestors(statement)]:
            for field in ("body", "orelse", "finalbody"):
                block: list[ast.AST] = getattr(parent, field, [])
                if isinstance(block, list) and node in block and not isinstance(parent, ast.Try):
                    for later in block[block.index(node) + 1 :]:
                        if _assigns(later, name):
                            return self.module.span(later)[1]
            if isinstance(parent, (*SCOPES, *FUNCTIONS)):
                break
            node = parent
        return None


def _assigns(statement: ast.AST, name: str) -> bool:
    match statement:
        case ast.Assign(targets=targets):
            return any(isinstance(t, ast.Name) and t.id == name for t in targets)
        case _:
            return False


def _is_elementwise(node: ast.AST) -> bool:
    """Return whether an operator works on each row by itself."""
    match node:
        case ast.BinOp(op=operator):
            return isinstance(operator, _ELEMENTWISE_OPERATORS)
        case ast.UnaryOp(op=operator):
            return not isinstance(operator, ast.Not)
        case ast.Compare(ops=[operator]):
            return isinstance(operator, _COMPARISONS)
        case _:
            return False


def _is_special(call: ast.Call, name: str) -> bool:
    """Return whether a call's keywords make it do something other than its name says."""
    options = {keyword.arg for keyword in call.keywords}
    in_place = bool(options & {"out", "inplace", None})
    is_where = name == "where" and len(call.args) + isinstance(call.func, ast.Attribute) < 3
    return in_place or is_where


def _is_plain(part: ast.expr) -> bool:
    """Return whether a part of an index is a number, a slice between numbers, or None."""
    return all(
        isinstance(node, ast.Slice | ast.Constant | ast.UnaryOp | ast.USub)
        for node in ast.walk(part)
    )


# Calls that accept rows of unknown number: losses, reshapes, sizes of other axes.


def _loss_modules(function: ast.expr, context: Context) -> str | None:
    """Return the torch function that a loss module computes, if an expression surely is one."""
    match function:
        case ast.Call(func=made, args=[]):
            root, _, last = (context.name(made) or "").rpartition(".")
            is_loss = root in ("torch.nn", "torch.nn.modules.loss") and _is_plain_loss(function)
            return LOSS_MODULES.get(last) if is_loss else None
        case ast.Name():
            return _one_of([value for _, value in bindings(function, context)], context)
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return _one_of(_given_to_self(name, function, context), context)
        case _:
            return None


def _one_of(values: Sequence[ast.AST | None], context: Context) -> str | None:
    """Return the function of all modules in a list, if it is the same for each."""
    found = {
        _loss_modules(value, context) if isinstance(value, ast.Call) else None for value in values
    }
    return found.pop() if len(found) == 1 else None


def _given_to_self(name: str, near: ast.expr, context: Context) -> list[ast.AST | None]:
    """Return the values that the class around an expression assigns to an attribute."""
    around = (p for p in context.module.ancestors(near) if isinstance(p, ast.ClassDef))
    owner = next(around, None)
    found: list[ast.AST | None] = []
    for node in ast.walk(owner) if owner is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if node.attr == name:
                parent = context.module.parents[node]
                found.append(parent.value if isinstance(parent, ast.Assign) else None)
    return found


def _is_plain_loss(call: ast.Call) -> bool:
    """Return whether a loss sums or averages over all rows."""
    for keyword in call.keywords:
        if keyword.arg == "reduction":
            if ast.unparse(keyword.value) not in ("'mean'", "'sum'"):
                return False
        elif keyword.arg not in _LOSS_OPTIONS:
            return False
    return len(call.args) <= 2


def _starts_with_minus_one(args: Sequence[ast.expr]) -> bool:
    """Return whether the first size of a reshape is -1, which keeps the rows in front."""
    first = args[0] if args else None
    if isinstance(first, ast.Tuple | ast.List):
        first = first.elts[0] if first.elts else None
    return first is not None and ast.unparse(first) == "-1"


def _is_other_axis(axis: ast.expr) -> bool:
    """Return whether a number names another axis than the first, that of the rows.

    The last axis could be the first, too: then the helper refuses the size when it runs.
    """
    match axis:
        case ast.Constant(value=int(number)):
            return number > 0
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
        case _:
            return False


# A `try` whose handler repairs a masked write that got the wrong number of rows. A program cannot
# raise for a number that is known only when it runs. The same write does what the handler would do
# if it drops the rows that are too many. Where the handler gives a name another constant, the
# program chooses the constant by the number of rows.


@dataclass(frozen=True)
class _Guard:
    """The `try` around a masked write, and the names that tell whether the write succeeded.

    Attributes:
        statement: The `try`.
        target: The subscript that is written to.
        flags: For each name the constant that the handler assigns.
    """

    statement: ast.Try
    target: ast.Subscript
    flags: dict[str, str]

    def lines(self) -> list[str]:
        """Return statements to run after the `try`."""
        tensor, mask = ast.unparse(self.target.value), ast.unparse(self.target.slice)
        return [
            f"{name} = {OPS}.mismatched({tensor}, {mask}, {name}, {value})"
            for name, value in self.flags.items()
        ]


def _guard_of(write: ast.Assign | ast.AugAssign, context: Context) -> _Guard | None:
    """Return the `try` that a masked write is in, if it could catch a wrong number of rows.

    Raises:
        NotFixable: the handlers are not understood.
    """
    around = _try_around(write, context)
    if around is None or not around.handlers:
        return None
    refusal = NotFixable("an except clause may handle a number of rows that does not fit")
    if not isinstance(write, ast.Assign) or around.body[0] is not write:
        raise refusal
    if len(around.handlers) != 1 or around.orelse or around.finalbody:
        raise refusal
    function = context.module.function(write)
    target = write.targets[0]
    if function is None or not isinstance(target, ast.Subscript):
        raise refusal
    handler = around.handlers[0]
    if handler.type is not None and ast.unparse(handler.type) not in _CAUGHT:
        raise refusal
    before = _constants(around.body[1:])
    after = _Repair(write, target).flags(handler.body)
    live = context.flow(function).after.get(around, frozenset())
    if before is None or after is None:
        raise refusal
    if any(name in live for name in after[1]) or set(before) != set(after[0]):
        raise refusal
    return _Guard(around, target, {n: v for n, v in after[0].items() if v != before[n]})


def _try_around(node: ast.stmt, context: Context) -> ast.Try | None:
    inner: ast.AST = node
    for parent in context.module.ancestors(node):
        if isinstance(parent, ast.Try) and inner in parent.body:
            return parent
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return None
        inner = parent
    return None


def _constants(statements: Sequence[ast.stmt]) -> dict[str, str] | None:
    """Return the constants that statements give to names, if they do nothing else."""
    found: dict[str, str] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                found[name] = ast.unparse(value)
            case _:
                return None
    return found


class _Repair:
    """Reader of a handler that writes again, with as many rows as the mask selects."""

    def __init__(self, write: ast.Assign, target: ast.Subscript) -> None:
        self.write, self.target = write, target
        self.values: dict[str, ast.expr] = {}

    def flags(self, statements: Sequence[ast.stmt]) -> tuple[dict[str, str], set[str]] | None:
        """Return the constants that the handler assigns, and the other names that it binds."""
        found: dict[str, str] = {}
        repaired = 0
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                    found[name] = ast.unparse(value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.values[name] = self._resolved(value)
                case ast.Assign(targets=[ast.Subscript() as target], value=value):
                    repaired += self._is_same(target, value)
                case _ if not is_log(statement):
                    return None
        return (found, set(self.values)) if repaired == 1 else None

    def _is_same(self, target: ast.Subscript, value: ast.expr) -> bool:
        if ast.unparse(_plain(target)) != ast.unparse(_plain(self.target)):
            return False
        cut = f"[:{ast.unparse(self.target.slice)}.sum()]"
        return ast.unparse(_plain(self._resolved(value))).replace(cut, "") == ast.unparse(
            _plain(self.write.value)
        )

    def _resolved(self, value: ast.expr) -> ast.expr:
        """Return a value with the names that the handler has bound replaced by their values."""
        return _Substitute(self.values).visit(copy.deepcopy(value))


class _Substitute(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.values.get(node.id, node))


class _Unmask(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        ours = ast.unparse(node.func) == f"{OPS}.masked"
        return node.args[0] if ours else node


def _plain(node: ast.expr) -> ast.expr:
    """Return an expression as it was before rewriting."""
    return _Unmask().visit(copy.deepcopy(node))
