"""TPU103: a traced value turned into a Python number."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._rule import Example, Rule
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, Safety, Severity
from tpuport.source.text import Edit, Passage


class TensorToNumber(Rule):
    """A traced tensor turned into a Python number.

    ## What it does
    Finds `float(t)`, `int(t)` and `bool(t)` of a tensor that depends on the program's inputs. The
    fix calls `tpuport.ops.to_float` and its siblings, which give a Python number in eager PyTorch
    and a number that is still part of the program while it is traced.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, and Python insists on a real `float`, so
    the call raises `ConcretizationTypeError`.

    ## Fix safety
    The fix is exact in eager PyTorch. A `float`, `int` or `bool` that the file binds to something
    else is left alone.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU103"
    MESSAGE = "`{call}` makes a Python number of a value that has none while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True
    PINS = True

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                scale = float(x.detach().abs().max())
                count = int((x > 0).sum())
                return x / scale * count, bool(x.sum() > 0)
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                scale = tpuport.ops.to_float(x.detach().abs().max())
                count = tpuport.ops.to_int((x > 0).sum())
                return x / scale * count, tpuport.ops.to_bool(x.sum() > 0)
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                name = f"{float(x.sum()):.2f}"
                return x + len(name)
            """,
            left="inside an f-string",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, ratio: str = "0.5"):
            half = int(x.shape[0] * float(ratio))
            return x[:half] * float(len(x)) + x.float()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        match node:
            case ast.Call(func=ast.Name(id="float" | "int" | "bool" as name), args=[argument]):
                takes_one = not node.keywords and not isinstance(argument, ast.Starred)
                if takes_one and (context.is_traced(node) or context.is_traced(argument)):
                    if not context.module.binds_otherwise(name):
                        context.report(self, node, call=node)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        start, end = context.module.span(node.func)
        name = Passage.of(f"{OPS}.to_{node.func.id}", context.module.origin(node))
        return Fix((Edit(start, end, name),), (OPS,))
