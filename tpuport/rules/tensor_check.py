"""TPU102: a check of a traced value."""

import ast

from tpuport.rules._checking import CheckFix, passing
from tpuport.rules._expressions import OPS, function_around
from tpuport.rules._reports import is_report
from tpuport.rules._rule import Rule
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, Safety, Severity


class TensorCheck(Rule):
    """An assertion, error or log line that depends on the value of a traced tensor.

    ## What it does
    Finds `assert`, `if ...: raise ...` and `if ...: logger.warning(...)` (also `print` and
    `warnings.warn`) whose condition is a tensor that depends on the program's inputs. The fix hands
    the condition to `tpuport.ops.check` or `tpuport.ops.passes`, with a function that makes the
    error: eager PyTorch raises as before, and a ported program gives the condition back so that the
    caller can raise.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so asking for its truth raises
    `ConcretizationTypeError`, although the check has no part in the result.

    ## Fix safety
    The fix is exact in eager PyTorch: messages are made only if the check fails, `python -O` still
    drops assertions, and the same exception comes out. Its traceback has a frame of `tpuport.ops`
    more, so a warning with a fixed `stacklevel` names another line. There is no fix for a bare
    `raise`, or where the code before the `raise` changes variables that are used elsewhere.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU102"
    MESSAGE = "a check needs the value of `{test}`, which has none while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    PINS = True

    def visit_Assert(self, node: ast.Assert, context: Context) -> None:
        if context.asks_traced(node.test):
            context.report(self, node, test=node.test)

    def visit_If(self, node: ast.If, context: Context) -> None:
        if context.asks_traced(node.test) and is_report(node):
            context.report(self, node, test=node.test)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        function_around(node, context)
        if isinstance(node, ast.Assert):
            return Fix((passing(node, context),), (OPS,))
        assert isinstance(node, ast.If)
        return Fix((CheckFix(node, context).edit(),), (OPS,))
