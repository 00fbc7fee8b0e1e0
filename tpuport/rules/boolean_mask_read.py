"""TPU210: `x[mask]` read with a traced mask."""

import ast

from tpuport.rules._counts import count_fix, counted
from tpuport.rules._following import RowFix
from tpuport.rules._masks import is_ours, masks, severity, takes_one_mask
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_JIT_ERROR = "NonConcreteBooleanIndexError"


class BooleanMaskRead(Rule):
    """A tensor read through a traced boolean mask.

    ## What it does
    Finds `x[mask]` where the mask is a boolean tensor that depends on the program's inputs. Where
    the rows are reduced, computed row by row and written back through a mask, or joined with the
    rows that the mask leaves out, the fix reads `tpuport.ops.masked(x)[mask]`, which is `x[mask]`
    in eager PyTorch. A program keeps all rows, together with the mask.

    ## Why is this bad?
    The number of elements that a mask selects is not known while the program is traced, and an
    array of a program has a static shape: the read raises `NonConcreteBooleanIndexError`.

    ## Fix safety
    The fix is exact in eager PyTorch. A program adds in another order, and rows whose number does
    not fit, for which eager PyTorch raises an error, give NaN. Values that are not selected never
    take part, whatever they are. There is no fix where the number of rows has to be a Python
    number, or where rows reach code that may not treat each of them by itself.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.NonConcreteBooleanIndexError
    """

    CODE = "TPU210"
    MESSAGE = "`{read}` has as many elements as the mask selects, unknown while tracing"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, y: torch.Tensor):
                m = x > 0
                x = x.clone()
                x[m] = x[m] * 2 + y[m]
                return x, y[~m].mean()
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, y: torch.Tensor):
                m = x > 0
                x = x.clone()
                tpuport.ops.masked(x)[m] = tpuport.ops.masked(x)[m] * 2 + tpuport.ops.masked(y)[m]
                return x, tpuport.ops.masked(y)[~m].mean()
            """,
            inputs="(torch.randn(3, 4), torch.randn(3, 4))",
            jit_error=_JIT_ERROR,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, keep: torch.Tensor):
                keep = keep.bool()
                rest = x[~keep] * 0
                return torch.cat([x[keep], rest], dim=0)
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, keep: torch.Tensor):
                keep = keep.bool()
                rest = tpuport.ops.masked(x)[tpuport.ops.inverse(keep)] * 0
                return tpuport.ops.rowwise(torch.cat)([tpuport.ops.masked(x)[keep], rest], dim=0)
            """,
            inputs="(torch.randn(3, 4), torch.rand(3) > 0.5)",
            jit_error=_JIT_ERROR,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, labels: torch.Tensor):
                return x[labels != 0]
            """,
            inputs="(torch.randn(3, 4), torch.arange(3))",
            jit_error=_JIT_ERROR,
            left="returns as many rows as the mask selects",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return torch.zeros(x[x > 0].shape[0])
            """,
            jit_error=_JIT_ERROR,
            left="may be needed as a Python number",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, ids: torch.Tensor, names: dict, blocks: list, flag: bool):
            order = ids.argsort()
            first = x[order][ids.long()] + x[..., None, 0] + x[:, 1:]
            kept = torch.where(x > 0, x, 0).masked_fill(ids[:, None] == 0, 0)
            return first, kept, blocks[flag], names["mask"], [b for b in blocks if b is not None]
        """,
        """
        import numpy as np
        import torch


        def forward(x: torch.Tensor, mask, steps: int = 4):
            table = torch.arange(steps)
            even = table[table % 2 == 0]
            sizes = torch.tensor([1, 2, 3])[torch.tensor([True, False, True])]
            return x + even.sum() + sizes.sum(), mask["a"], x[[True, False, True]]


        def boxes(image: np.ndarray, mask: np.ndarray):
            return image[mask > 0], image[mask][np.isfinite(image[mask])]
        """,
    )

    def visit_Subscript(self, node: ast.Subscript, context: Context) -> None:
        if isinstance(node.ctx, ast.Load) and masks(node, context) and not is_ours(node.value):
            context.report(self, node, severity=severity(node, context), read=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Subscript)
        if not takes_one_mask(node, context):
            raise NotFixable("other parts of the index may be tensors, too")
        found = counted(node, context)
        if found is not None:
            return count_fix(node, *found, context)
        rows = RowFix(node, context)
        rows.follow(node)
        rows.mark(node)
        if rows.joined:
            rows.inverted(node)
        return rows.fix()
