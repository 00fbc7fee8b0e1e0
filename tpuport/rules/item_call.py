"""TPU110: the value of a traced tensor read by `.item()` or `.tolist()`."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._receivers import wrapped
from tpuport.rules._rule import Example, Rule
from tpuport.rules._texts import is_message
from tpuport.source.rewrite.finding import Fix, Safety, Severity
from tpuport.source.rewrite.matching import Context

_HELPERS = {"item": "item", "tolist": "to_list"}


class ItemCall(Rule):
    """The value of a traced tensor read by a method.

    ## What it does
    Finds `t.item()` and `t.tolist()` of a tensor that depends on the program's inputs. The fix
    calls `tpuport.ops.item` and `tpuport.ops.to_list`, which do just that in eager PyTorch and
    return traced numbers while a program is traced.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so the call raises
    `ConcretizationTypeError`. (On a view of a tensor `.tolist()` raises `RuntimeError`.)

    ## Fix safety
    The fix is exact in eager PyTorch. A traced number cannot be a size or an index of a Python
    list: those have to be known when the program is traced. There is no fix where a comment inside
    the expression would be lost.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU110"
    MESSAGE = "`{call}` reads a value that does not exist while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                largest = x.detach().abs().max().item()  # for the scale
                first, *_ = x.flatten().tolist()
                return x / (largest + 1.0), largest, first
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                largest = tpuport.ops.item(x.detach().abs().max())  # for the scale
                first, *_ = tpuport.ops.to_list(x.flatten())
                return x / (largest + 1.0), largest, first
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x * (
                    x + 1
                ).sum().item()
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                return x * tpuport.ops.item((
                    x + 1
                ).sum())
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                name = f"{x.sum().item()}"
                return x + len(name)
            """,
            left="inside an f-string",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                total = (
                    x.sum()  # of everything
                    .item()
                )
                return x * total
            """,
            left="a comment inside it would be lost",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, names: dict, steps: int = 4):
            if steps < 1:
                raise ValueError(f"no steps for {x.shape}, which starts with {x[0].tolist()}")
            table = torch.linspace(0, 1, steps)
            scale = table[0].item() + sum(table.tolist())
            for _, value in names.items():
                scale = scale + value.item
            return x * scale
        """,
        """
        import numpy as np
        import torch


        def forward(x: torch.Tensor, config):
            sizes = np.array(x.shape[1:]).tolist()
            return x.reshape(-1, *sizes) * config.scale.item()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]):
                is_read = name in _HELPERS and context.is_traced(value)
                if is_read and not is_message(node, context):
                    context.report(self, node, call=node)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        helper = f"{OPS}.{_HELPERS[node.func.attr]}"
        return Fix(wrapped(node, helper, context), (OPS,))
