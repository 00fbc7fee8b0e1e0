"""The proof that code works on the rows that a mask selects when their number is unknown.

The rows are followed from the read, through elementwise operations, reshapes and names, to their
end: written through a mask, reduced to a number, or joined with the rows left out. The edits that
this needs are collected on the way. Anything else ends the proof.
"""

import ast
from collections import Counter
from collections.abc import Sequence

from tpuport.rules._expressions import OPS
from tpuport.rules._masks import is_leading, is_ours, masks, parts
from tpuport.rules._repairs import guard_of
from tpuport.rules._row_calls import (
    is_other_axis,
    is_plain_loss,
    loss_modules,
    starts_with_minus_one,
)
from tpuport.source.inference.rowwise import (
    ELEMENTWISE,
    HOST_ATTRIBUTES,
    JOINS,
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
            case ast.Subscript(slice=axis) if self.leading and is_other_axis(axis):
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
        elif name in RESHAPES and self.leading and starts_with_minus_one(call.args):
            self.follow(call)
        elif name == "flatten" and self.leading and not call.args and not call.keywords:
            self.follow(call)
        elif name == "size" and self.leading and call.args and is_other_axis(call.args[0]):
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
        elif name not in LOSSES or not is_plain_loss(call):
            raise self._unknown(call)
        if not ast.unparse(call.func).startswith(_ROWWISE):
            self.around(call.func, _ROWWISE)

    def _torch_function(self, call: ast.Call) -> str:
        function = call.func
        if isinstance(function, ast.Call) and ast.unparse(function).startswith(_ROWWISE):
            function = function.args[0]
        made = loss_modules(function, self.context)
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
                    guard = guard_of(node, self.context)
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
