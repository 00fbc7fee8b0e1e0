"""TPU311: a traced tensor turned into text."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._texts import Verdict, formatted, shown_tensor
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context, quote


class TensorPrint(Rule):
    """A traced tensor that is printed, logged or formatted.

    ## What it does
    Finds tensors that depend on the program's inputs where text is made of them: arguments of
    `print` and of loggers (a note), and numbers formatted by `f"{t:.2f}"`, `"{:.2f}".format(t)` or
    `"%.2f" % t` (an error). Messages of `raise` and `assert` are left out: other rules decide
    whether these are made.

    ## Why is this bad?
    While a program is traced the tensor has no value yet. Plain text shows a tracer, once, and
    nothing when the program runs; a format for numbers raises `TypeError` or
    `ConcretizationTypeError`.

    ## Fix safety
    There is no automatic fix. Return the value and print it outside the step, or use
    `jax.debug.print`.

    ## References
    https://docs.jax.dev/en/latest/debugging/print_breakpoint.html
    """

    CODE = "TPU311"
    MESSAGE = "`{text}` makes text of `{tensor}`, which has no value while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.NOTE

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                print("mean", x.mean())
                return x + 1
            """,
            jit_error=None,
            harm="prints",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                print(f"mean {x.mean():.2f}")
                return x + 1
            """,
            jit_error="TypeError",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                name = "%s %.2f" % (x.shape, x.mean())
                return x + len(name)
            """,
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                name = "{} {:.2f}".format(len(x), x.mean())
                return x + len(name)
            """,
            jit_error="TypeError",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import logging

        import torch

        logger = logging.getLogger(__name__)


        def forward(x: torch.Tensor, steps: int = 4):
            logger.info("%d rows of %s", len(x), x.dtype)
            print(f"{x.shape[0]:>4} {x.ndim:d} {steps / 3:.2f}", x.shape, x.device)
            name = "%.2f" % (steps / 3) + "{:.1f}".format(x.shape[0] / 2)
            if x.ndim > 3:
                raise ValueError(f"got {x:.2f}")
            return x[0] % 3, name
        """,
    )

    def visit_JoinedStr(self, node: ast.JoinedStr, context: Context) -> None:
        self._report(node, context)

    def visit_BinOp(self, node: ast.BinOp, context: Context) -> None:
        if isinstance(node.op, ast.Mod):
            self._report(node, context)

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        self._report(node, context)
        tensor = shown_tensor(node, context)
        if tensor is not None:
            text = quote(ast.unparse(node.func)) + "(...)"
            context.report(self, node, text=text, tensor=ast.unparse(tensor))

    def _report(self, node: ast.expr, context: Context) -> None:
        """Report a number formatted into text, where that stops the trace."""
        found: Verdict = formatted(node, context)
        if found is not None:
            tensor, text = found
            parts = {"text": text, "tensor": quote(ast.unparse(tensor))}
            context.report(self, node, severity=Severity.ERROR, **parts)
