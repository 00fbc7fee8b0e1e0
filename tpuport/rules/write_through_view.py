"""TPU410: an in-place write that is lost, because it goes through a view."""

import ast

from tpuport.rules._lost_writes import lost_write
from tpuport.rules._rebinding import rebinding_fix
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.rules._views import mutation
from tpuport.source.rewrite.finding import Fix, Safety, Severity
from tpuport.source.rewrite.matching import Context


class WriteThroughView(Rule):
    """An in-place write to a view, whose base is read later.

    ## What it does
    Finds in-place methods, `+=` and item assignments on the result of `view`, `reshape`, `flatten`,
    `unsqueeze`, `transpose`, `chunk` and the other views that are not subscripts, where the tensor
    that they are views of is read later (or the other way round); and `zero_`, `fill_`,
    `masked_fill_` and a few more on a subscript such as `x[:, 0]`. The fix assigns to the
    subscript, or rebinds the base to the written view.

    ## Why is this bad?
    torchax writes through subscripts only, and through these not with every method. Other views are
    copies there: the write never reaches the base, and no error is raised.

    ## Fix safety
    The fix is exact in eager PyTorch; where the original raises, the exception may read otherwise.
    There is none where the view may be a copy (`reshape`), is one of several parts, or where other
    names may refer to the base.

    ## References
    https://docs.pytorch.org/docs/stable/tensor_view.html
    """

    CODE = "TPU410"
    MESSAGE = "`{write}` is lost: torchax does not write through {step} to `{base}`"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x * 2
                rows = y.unsqueeze(0)
                rows += 1  # all of them
                return y
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                y = x * 2
                rows = y.unsqueeze(0)
                rows += 1  # all of them
                y = rows.view(y.shape)
                return y
            """,
            jit_error=None,
            harm="differs",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x + 1
                y[..., :2].zero_()
                y[..., 0].fill_(x.mean().detach() * 2)
                y[..., 1:].masked_fill_(x[..., 1:] > 0, -1.0)
                return y
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                y = x + 1
                y[..., :2] = 0
                y[..., 0] = x.mean().detach() * 2
                y[..., 1:] = y[..., 1:].clone().masked_fill_(x[..., 1:] > 0, -1.0)
                return y
            """,
            jit_error=None,
            harm="differs",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x.clone()
                y.view(-1)[0] = 7.0
                flat = y.flatten()
                y[1] = 3.0
                return y, flat
            """,
            jit_error=None,
            harm="differs",
            left="the view has no name",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, rows: list):
            y = x * 2
            y[:, 0] += 1
            y[1:].mul_(3)
            y[0, 1] = 5.0
            y += 1
            y[1:].add_(1).clamp_(-1, 1)
            y = y.view(-1)
            y += 1
            y[0] = 2
            swapped = x.t().reshape(-1)
            swapped.zero_()
            return y, swapped, x
        """,
        """
        import torch


        def forward(x: torch.Tensor):
            y = x * 2
            heads = y.view(2, -1)
            heads.mul_(2)
            y = heads + 1
            table = torch.zeros(4)
            table.view(-1)[0] = 1.0
            return y, table
        """,
    )

    def visit_Expr(self, node: ast.stmt, context: Context) -> None:
        change = mutation(node)
        if change is None or not runs_in_step(node, context):
            return
        lost = lost_write(node, change, context)
        if lost is not None:
            base, step = lost
            context.report(self, node, write=node, step=step, base=base)

    visit_Assign = visit_AugAssign = visit_Expr

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.stmt)
        return rebinding_fix(node, context)
