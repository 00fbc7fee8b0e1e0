"""The fixes of checks: assertions and branches that raise or log."""

import ast

from tpuport.rules._blocks import Layout
from tpuport.rules._expressions import OPS, Expressions
from tpuport.rules._lifting import Lift
from tpuport.rules._reports import ends_in_raise, is_log, leading_logs
from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage


def passing(node: ast.Assert, context: Context) -> Edit:
    """Return the edit that keeps an `assert` but lets `tpuport.ops.passes` evaluate its test."""
    expressions = Expressions(context)
    made = Passage.of(f"assert {OPS}.passes(", context.module.origin(node))
    made = made + expressions.truth(node.test)
    if node.msg is not None:
        made = made + ", " + expressions.delayed(node.msg, effects=True)
    return expressions.edit(node, made + ")")


class CheckFix:
    """The rewriting of one `if` that raises or logs into a call of `tpuport.ops.check` or `report`.

    Args:
        node: The statement.
        context: The file and what is inferred about it.
    """

    def __init__(self, node: ast.If, context: Context) -> None:
        self.node, self.context = node, context
        self.layout = Layout(node, context)
        self.expressions = Expressions(context)

    def edit(self) -> Edit:
        """Return the edit that replaces the statement.

        Raises:
            NotFixable: the rewritten code might behave differently.
        """
        node = self.node
        if ends_in_raise(node.body):
            lines = self._check(node.body, negated=False)
            if node.orelse:
                lines.append(
                    self._unwrapped(self.layout.orelse(nested=False).at(self.layout.indent))
                )
        elif ends_in_raise(node.orelse):
            lines = self._check(node.orelse, negated=True)
            lines.append(self._unwrapped(self.layout.body(nested=False).at(self.layout.indent)))
        elif leading_logs(node.body) == len(node.body) and not node.orelse:
            lines = self._check(node.body, negated=False)
        else:
            lines = self._logs_first()
        return self.layout.edit(lines, self.expressions)

    def _unwrapped(self, passage: Passage | None) -> Passage:
        return passage if passage is not None else self.layout.line("pass")

    def _check(self, statements: list[ast.stmt], *, negated: bool) -> list[Passage]:
        """Return the call of `tpuport.ops.check` or `report`, after the function that it needs."""
        test = self.expressions.truth(self.node.test)
        if negated:
            test = self.layout.line(f"{OPS}.negate(", "") + test + ")"
        verb = f"{OPS}.{_verb(statements[-1])}"
        (first, *more) = statements
        expression = None if more else _reported(first)
        if expression is not None:
            action = self.expressions.delayed(expression, effects=True)
            return [self.layout.call("", verb, [test, action])]
        name, function = self._function(statements, in_body=not negated)
        return [function, self.layout.call("", verb, [test, name])]

    def _function(self, statements: list[ast.stmt], *, in_body: bool) -> tuple[str, Passage]:
        """Return the name and text of a nested function of statements that a lambda cannot hold."""
        last = statements[-1]
        if isinstance(last, ast.Raise) and last.exc is None:
            raise NotFixable("it raises again the exception being handled")
        lift = Lift(self.node, [statements], self.context, ends=True, effects=True)
        if lift.operands:
            raise NotFixable(f"it changes {lift.operands[0]} before it raises")
        name = self.context.module.fresh_name(
            self.node, "fail" if _verb(last) == "check" else "log"
        )
        block = self.layout.body() if in_body else self.layout.orelse()
        return name, self.layout.function(name, [], block.at(self.layout.inner))

    def _logs_first(self) -> list[Passage]:
        """Return the lines that log first and then branch, for an `if` that does both."""
        node, layout = self.node, self.layout
        logs = node.body[: leading_logs(node.body)]
        holds = self.context.module.fresh_name(node, "holds")
        lines = [layout.line(f"{holds} = ") + self.expressions.truth(node.test)]
        for log in logs:
            assert isinstance(log, ast.Expr)
            action = self.expressions.delayed(log.value, effects=True)
            lines.append(layout.call("", f"{OPS}.report", [holds, action]))
        layout.dropped.update(logs)
        body = layout.body(nested=False)
        if not body.statements:
            orelse = layout.orelse(nested=False).at(layout.inner)
            return [*lines, layout.line(f"if {OPS}.negate({holds}):"), self._unwrapped(orelse)]
        lines += [layout.line(f"if {holds}:"), self._unwrapped(body.at(layout.inner))]
        if node.orelse:
            orelse = layout.orelse(nested=False).at(layout.inner)
            lines += [layout.line("else:"), self._unwrapped(orelse)]
        return lines


def _verb(statement: ast.stmt) -> str:
    return "check" if isinstance(statement, ast.Raise) else "report"


def _reported(statement: ast.stmt) -> ast.expr | None:
    """Return the expression that a lambda can hold in place of a statement that raises or logs."""
    match statement:
        case ast.Raise(exc=ast.expr() as error, cause=None):
            return error
        case ast.Expr(value=value) if is_log(statement):
            return value
        case _:
            return None
