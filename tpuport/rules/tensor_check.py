"""TPU102: a check of a traced value."""

import ast

from tpuport.rules._blocks import Layout
from tpuport.rules._effects import refuse_effects
from tpuport.rules._expressions import OPS, Expressions, function_around
from tpuport.rules._lifting import Lift
from tpuport.rules._reports import ends_in_raise, is_log, is_report, leading_logs
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage


class TensorCheck(Rule):
    """An assertion, error or log line that depends on the value of a traced tensor.

    ## What it does
    Finds `assert`, `if ...: raise ...` and `if ...: logger.warning(...)` (also `print` and
    `warnings.warn`) whose condition is a tensor that depends on the program's inputs. The fix hands
    the condition to `tpuport.ops.check` or `tpuport.ops.passes`, with a function that makes the
    error: eager PyTorch raises as before, and a ported program returns the condition so that the
    caller can raise.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so asking for its truth raises
    `ConcretizationTypeError`, although the check has no part in the result.

    ## Fix safety
    The fix is exact in eager PyTorch: messages are made only if the check fails, `python -O` still
    drops assertions, and the same exception comes out. Its traceback has one more frame, of
    `tpuport.ops`, so a warning with a fixed `stacklevel` names another line. There is no fix for a
    bare `raise`, or where the code before the `raise` changes variables that are used elsewhere.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU102"
    MESSAGE = "a check needs the value of `{test}`, which has none while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True
    PINS = True

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                assert x.isfinite().all(), f"bad values: {x}"
                return x + 1
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                assert tpuport.ops.passes(x.isfinite().all(), lambda: f"bad values: {x}")
                return x + 1
            """,
        ),
        Example(
            before="""
            import logging
            import warnings

            import torch

            logger = logging.getLogger(__name__)


            def forward(x: torch.Tensor, strict: bool = True):
                if strict and not (x > -3).all():
                    raise ValueError(f"too small: {x.min()}")
                elif x.sum() < 0:
                    warnings.warn("negative sum")
                if x.mean() > 0:  # worth knowing
                    print("positive")
                    x = x * 2
                return x
            """,
            after="""
            import logging
            import warnings

            import torch
            import tpuport.ops

            logger = logging.getLogger(__name__)


            def forward(x: torch.Tensor, strict: bool = True):
                tpuport.ops.check(
                    tpuport.ops.both(strict, lambda: tpuport.ops.negate((x > -3).all())),
                    lambda: ValueError(f"too small: {x.min()}"),
                )
                tpuport.ops.report(x.sum() < 0, lambda: warnings.warn("negative sum"))
                # worth knowing
                holds = x.mean() > 0
                tpuport.ops.report(holds, lambda: print("positive"))

                def if_true(x):
                    x = x * 2
                    return x

                def if_false(x):
                    return x

                x = tpuport.ops.cond(holds, if_true, if_false, (x,))
                return x
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                if x.abs().max() < 3:
                    y = x.exp()
                else:
                    worst = float(x.abs().max().detach())
                    raise OverflowError(f"{worst} is too large") from None
                return y
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                def fail():
                    worst = tpuport.ops.to_float(x.abs().max().detach())
                    raise OverflowError(f"{worst} is too large") from None

                tpuport.ops.check(tpuport.ops.negate(x.abs().max() < 3), fail)
                y = x.exp()
                return y
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                try:
                    y = 1 // (x.ndim - 2)
                except ZeroDivisionError:
                    if x.sum() > 100:
                        raise
                    y = 1
                return x + y
            """,
            left="raises again",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, y: torch.Tensor | None = None):
            assert x.ndim == 2 and x.shape[1] == 4, "shape"
            if y is not None and y.dtype != x.dtype:
                raise TypeError(f"expected {x.dtype}, got {y.dtype}")
            return x
        """,
    )

    def visit_Assert(self, node: ast.Assert, context: Context) -> None:
        if context.asks_traced(node.test):
            context.report(self, node, test=node.test)

    def visit_If(self, node: ast.If, context: Context) -> None:
        if context.asks_traced(node.test) and is_report(node):
            context.report(self, node, test=node.test)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        # Called for its refusals: a check outside a function, or in one that reads its frame.
        function_around(node, context)
        if isinstance(node, ast.Assert):
            return Fix((_passing(node, context),), (OPS,))
        assert isinstance(node, ast.If)
        return Fix((_CheckFix(node, context).edit(),), (OPS,))


def _passing(node: ast.Assert, context: Context) -> Edit:
    """Return the edit that keeps an `assert` but lets `tpuport.ops.passes` evaluate its test."""
    expressions = Expressions(context)
    made = Passage.of(f"assert {OPS}.passes(", context.module.origin(node))
    made = made + expressions.truth(node.test)
    if node.msg is not None:
        made = made + ", " + expressions.delayed(node.msg, effects=True)
    return expressions.edit(node, made + ")")


class _CheckFix:
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
        # The function runs while the program is traced, for the error that it raises.
        refuse_effects([one for one in statements if not is_log(one)], self.context)
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
