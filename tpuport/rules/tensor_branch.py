"""TPU101: a Python branch on a traced value."""

import ast

from tpuport.rules._branching import BranchFix
from tpuport.rules._expressions import OPS, Expressions, function_around
from tpuport.rules._reports import is_report
from tpuport.rules._rule import Rule
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.text import Passage


class TensorBranch(Rule):
    """A branch that Python decides by the value of a traced tensor.

    ## What it does
    Finds `if`, `elif`, `x if t else y`, `and`, `or`, `not` and chained comparisons whose outcome
    takes the truth of a tensor that depends on the program's inputs. The fix moves both sides into
    nested functions and hands them to `tpuport.ops.cond`, which calls one of them in eager PyTorch
    and becomes `lax.cond` in a program.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so `bool(tensor)` raises
    `ConcretizationTypeError`.

    ## Fix safety
    The fix is exact in eager PyTorch: order of evaluation, short circuits, exceptions and bindings
    stay. One thing differs: reading a variable that was never bound raises `NameError`, no longer
    its subclass `UnboundLocalError`. There is no fix where a side writes to an object that others
    see, where a name is bound on one side only and read later, or where control leaves the branch
    by `break`, `yield` or a `return` on some paths only.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU101"
    MESSAGE = "Python branches on `{test}`, which has no value while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    PINS = True

    def visit_If(self, node: ast.If, context: Context) -> None:
        if context.asks_traced(node.test) and not is_report(node):
            context.report(self, node, test=node.test)

    def visit_IfExp(self, node: ast.IfExp, context: Context) -> None:
        if context.asks_traced(node.test):
            context.report(self, node, test=node.test)

    def visit_BoolOp(self, node: ast.BoolOp, context: Context) -> None:
        if not _is_asked(node, context) and _asks_within(node, context):
            context.report(self, node, test=node)

    def visit_UnaryOp(self, node: ast.UnaryOp, context: Context) -> None:
        if not _is_asked(node, context) and _asks_within(node, context):
            context.report(self, node, test=node.operand)

    def visit_Compare(self, node: ast.Compare, context: Context) -> None:
        if not _is_asked(node, context) and _asks_within(node, context):
            context.report(self, node, test=node)

    def visit_comprehension(self, node: ast.comprehension, context: Context) -> None:
        for test in node.ifs:
            if context.asks_traced(test):
                context.report(self, test, test=test)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if isinstance(node, ast.If):
            return Fix((BranchFix(node, context).edit(),), (OPS,))
        assert isinstance(node, ast.expr)
        parent = context.module.parents[node]
        if isinstance(parent, ast.comprehension) and node in parent.ifs:
            raise NotFixable("how many elements a comprehension keeps would depend on data")
        function_around(node, context)
        expressions = Expressions(context)
        if isinstance(node, ast.IfExp):
            start = Passage.of(f"{OPS}.cond(", context.module.origin(node))
            test = expressions.truth(node.test)
            sides = [expressions.delayed(side) for side in (node.body, node.orelse)]
            made = start + test + ", " + sides[0] + ", " + sides[1] + ")"
        else:
            made = expressions.truth(node)
        return Fix((expressions.edit(node, made),), (OPS,))


def _asks_within(node: ast.expr, context: Context) -> bool:
    """Whether computing an expression takes the truth of a traced value."""
    match node:
        case ast.BoolOp(values=[*first, last]):
            # The last operand is the result: nobody asks for its truth here.
            return any(context.asks_traced(v) for v in first) or _asks_within(last, context)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return context.asks_traced(operand)
        case ast.Compare(ops=[_, _, *_]):
            return context.is_traced(node)
        case _:
            return False


def _is_asked(node: ast.expr, context: Context) -> bool:
    """Whether an expression is part of a test, whose owner is the one to report."""
    parent = context.module.parents[node]
    match parent:
        case (
            ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test)
        ):
            return test is node
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.comprehension(ifs=tests):
            return node in tests
        case _:
            return False
