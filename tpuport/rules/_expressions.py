"""Expressions that move: into the test of a helper call, or into a lambda."""

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tpuport.rules._effects import refuse_effects
from tpuport.source.inference.kinds import Kind, is_surely_host
from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS, Function
from tpuport.source.syntax.names import COMPREHENSIONS
from tpuport.source.syntax.statements import walk_scope
from tpuport.source.syntax.text import Edit, Passage

OPS = "tpuport.ops"
_SUSPENDING = (ast.Yield, ast.YieldFrom, ast.Await)
_CLOSED = (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Subscript, ast.NamedExpr)
_SYMBOLS: dict[type[ast.cmpop], str] = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
}

_Names = dict[type[ast.boolop], str]
_TRUTHS: _Names = {ast.And: "both", ast.Or: "either"}
_VALUES: _Names = {ast.And: "first_falsy", ast.Or: "first_truthy"}


class Expressions:
    """The copier of one statement's expressions, which remembers the text that it has kept.

    Attributes:
        kept: Offsets of the start and end of everything copied.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.module = context.module
        self.kept: list[tuple[int, int]] = []
        self._moving = False

    def copy(self, node: ast.expr) -> Passage:
        """Return an expression as written.

        Raises:
            NotFixable: it yields, which needs its own parentheses elsewhere.
        """
        if isinstance(node, ast.Yield | ast.YieldFrom):
            raise NotFixable("it yields")
        span = self.module.span(node)
        self.kept.append(span)
        edits = super_edits([node], self.context) if self._moving else []
        made = self.module.copy(*span, edits)
        # The parentheses that a walrus needs are not part of it.
        return self._new("(", node) + made + ")" if isinstance(node, ast.NamedExpr) else made

    @contextmanager
    def moving(self, *nodes: ast.expr) -> Iterator[None]:
        """Copy expressions for a nested function as long as the context lasts.

        Raises:
            NotFixable: an expression would behave differently there.
        """
        for node in nodes:
            refuse_lambda(node)
        before, self._moving = self._moving, True
        try:
            yield
        finally:
            self._moving = before

    def delayed(self, node: ast.expr, *, effects: bool = False) -> Passage:
        """Return a lambda that evaluates an expression.

        Args:
            node: The expression.
            effects: Whether it may write to objects, which is safe only if it still runs exactly
                when it did before.

        Raises:
            NotFixable: the expression would behave differently in a lambda.
        """
        if not effects:
            refuse_effects([node], self.context)
        with self.moving(node):
            return self._new("lambda: ", node) + self.copy(node)

    def truth(self, test: ast.expr) -> Passage:
        """Return an expression that is true when `test` is, and takes the truth of no traced value.

        Parts that are known while tracing still decide in Python which other parts run.

        Raises:
            NotFixable: a part cannot be moved into a lambda, or would run twice.
        """
        return self._lowered(test, _TRUTHS)

    def value(self, node: ast.expr) -> Passage:
        """Return an expression with the value of `node` that takes the truth of no traced value.

        Raises:
            NotFixable: a part cannot be moved into a lambda, or would run twice.
        """
        return self._lowered(node, _VALUES)

    def _lowered(self, node: ast.expr, names: _Names) -> Passage:
        if _is_known(node, self.context):
            return self.copy(node)
        match node:
            case ast.BoolOp(op=operator, values=values):
                return self._chain(operator, values, names)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._new(f"{OPS}.negate(", node) + self.truth(operand) + ")"
            case ast.Compare(ops=[_, _, *_]):
                return self._comparisons(node, names)
            case _:
                return self.copy(node)

    def _chain(self, operator: ast.boolop, values: list[ast.expr], names: _Names) -> Passage:
        """Return `a and b and c` as `both(a, lambda: both(b, lambda: c))`; join known parts."""
        known = 0
        while known < len(values) and _is_known(values[known], self.context):
            known += 1
        # At least one operand is evaluated first, and at least one is left for the lambda.
        count = min(max(known, 1), len(values) - 1)
        if count > 1:
            word = " and " if isinstance(operator, ast.And) else " or "
            first = self._joined(word, values[:count])
        else:
            first = self._lowered(values[0], names)
        rest = values[count:]
        with self.moving(*rest):
            is_last = len(rest) == 1
            second = (
                self._lowered(rest[0], names) if is_last else self._chain(operator, rest, names)
            )
        call = self._new(f"{OPS}.{names[type(operator)]}(", values[0])
        return call + first + ", lambda: " + second + ")"

    def _comparisons(self, node: ast.Compare, names: _Names) -> Passage:
        """Return `a < b < c` as `both(a < b, lambda: b < c)`."""
        parts = [node.left, *node.comparators]
        symbols = [f" {_SYMBOLS[type(operator)]} " for operator in node.ops]
        if len(symbols) == 1:
            return self._joined(symbols[0], parts)
        middle = parts[1]
        if not isinstance(middle, ast.Name | ast.Constant):
            # Both comparisons need the middle part, which Python evaluates only once.
            if any(isinstance(p, COMPREHENSIONS) for p in self.module.ancestors(middle)):
                raise NotFixable("its chained comparison would evaluate a part twice")
            name = self.module.fresh_name(middle, "middle")
            bound = self._new(f"({name} := ", middle) + self.copy(middle) + ")"
            first = self._joined(symbols[0], parts[:1]) + symbols[0] + bound
            middle = ast.copy_location(ast.Name(name, ast.Load()), middle)
        else:
            first = self._joined(symbols[0], parts[:2])
        with self.moving(*parts[2:]):
            rest = ast.Compare(left=middle, ops=node.ops[1:], comparators=parts[2:])
            second = self._comparisons(rest, names)
        return self._new(f"{OPS}.{names[ast.And]}(", parts[0]) + first + ", lambda: " + second + ")"

    def _joined(self, operator: str, operands: list[ast.expr]) -> Passage:
        """Return operands with an operator between them, in parentheses where needed."""
        made = self._new("", operands[0])
        for i, operand in enumerate(operands):
            if isinstance(operand, ast.Name) and operand not in self.module.parents:
                piece = self._new(operand.id, operand)  # a name of our own making
            else:
                piece = self.copy(operand)
            if not isinstance(operand, _CLOSED) and not _binds_tighter(operand, operator):
                piece = self._new("(", operand) + piece + ")"
            made = made + (operator if i else "") + piece
        return made

    def _new(self, text: str, node: ast.expr) -> Passage:
        return Passage.of(text, self.module.origin(node))

    def edit(self, node: ast.expr | ast.stmt, passage: Passage) -> Edit:
        """Return the edit that replaces an expression or a simple statement by a passage.

        Raises:
            NotFixable: a comment inside it would be lost.
        """
        start, end = self.module.span(node)
        comments = [offset for offset, _ in self.module.comments(start, end)]
        if not all(any(a <= offset < b for a, b in self.kept) for offset in comments):
            raise NotFixable("a comment inside it would be lost")
        return Edit(start, end, passage)


def _is_known(node: ast.expr, context: Context) -> bool:
    """Return whether Python decides an operand while tracing, whatever the oracle says of it."""
    return is_surely_host(node) or context.kind(node) is Kind.HOST


def _binds_tighter(operand: ast.expr, operator: str) -> bool:
    """Return whether an operand needs no parentheses next to `and` or `or`, which bind loosest."""
    loose = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)
    return operator.strip() in ("and", "or") and not isinstance(operand, loose)


def function_around(node: ast.AST, context: Context) -> Function:
    """Return the function whose scope a node runs in.

    Raises:
        NotFixable: there is none, or the function reads its own frame, as `locals()` does.
    """
    function = context.module.function(node)
    scope = context.module.scope(node)
    if function is None or isinstance(scope, ast.ClassDef):
        raise NotFixable("it does not run in a function")
    for around in [function, *context.module.ancestors(function)]:
        if isinstance(around, FUNCTIONS) and (reader := context.flow(around).reads_frame):
            raise NotFixable(f"the function calls {reader}(), which would see other variables")
    return function


def refuse_lambda(node: ast.expr) -> None:
    """Raise unless an expression does the same inside a lambda.

    Raises:
        NotFixable: it binds a name, or suspends the function.
    """
    for inner in walk_scope([node]):
        if isinstance(inner, ast.NamedExpr):
            raise NotFixable(f"it binds {inner.target.id} inside an expression that would move")
        if isinstance(inner, _SUSPENDING) or _is_async(inner):
            raise NotFixable("it awaits or yields inside an expression that would move")


def _is_async(node: ast.AST) -> bool:
    return isinstance(node, ast.comprehension) and bool(node.is_async)


def super_edits(nodes: Iterable[ast.AST], context: Context) -> list[Edit]:
    """Return edits that keep `super()` working in code that moves into a nested function.

    Raises:
        NotFixable: Python would not find the arguments of a `super()` there either.
    """
    module = context.module
    edits: list[Edit] = []
    for node in walk_scope(nodes):
        if _is_bare_super(node):
            scope = module.scope(node)
            first = _first_parameter(scope)
            around = module.ancestors(node)
            inside = next(a for a in around if a is scope or isinstance(a, COMPREHENSIONS))
            if first is None or inside is not scope:
                raise NotFixable("it calls super() where Python does not allow that")
            text = f"super(__class__, {first})"
            edits.append(Edit(*module.span(node), Passage.of(text, module.origin(node))))
    return edits


def _is_bare_super(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
            return True
        case _:
            return False


def _first_parameter(scope: ast.AST) -> str | None:
    if not isinstance(scope, FUNCTIONS):
        return None
    positional = [*scope.args.posonlyargs, *scope.args.args]
    return positional[0].arg if positional else None
