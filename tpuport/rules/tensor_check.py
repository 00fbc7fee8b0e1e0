"""TPU102: a check of a traced value."""

import ast

from tpuport.rules._checking import CheckFix, passing
from tpuport.rules._expressions import OPS, function_around
from tpuport.rules._reports import is_report
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, Safety, Severity
from tpuport.source.rewrite.matching import Context


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
            return Fix((passing(node, context),), (OPS,))
        assert isinstance(node, ast.If)
        return Fix((CheckFix(node, context).edit(),), (OPS,))
