"""TPU211: a write through a traced mask, in a form that torchax cannot trace."""

import ast

from tpuport.rules._following import RowFix
from tpuport.rules._masks import is_ours, is_view, masks, parts, takes_one_mask
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_JIT_ERROR = "NonConcreteBooleanIndexError"


class BooleanMaskWrite(Rule):
    """A write through a boolean mask that also reads, slices, or goes to a view.

    ## What it does
    Finds `x[mask] += y`, `x[mask, 0] = y`, `x[:, mask] = y` and `x[0][mask] = y` where the mask is
    a boolean tensor that depends on the program's inputs. The fix writes to
    `tpuport.ops.masked(x)[...]`, which is `x[...]` in eager PyTorch and selects by position in a
    program. The plain `x[mask] = y`, for a number or for rows, needs no fix.

    ## Why is this bad?
    torchax turns `x[mask] = y` into a selection of static shape, but only where the mask is all of
    the index and `x` is no view. Every other form selects elements whose number is not known while
    the program is traced, and raises `NonConcreteBooleanIndexError`.

    ## Fix safety
    The fix is exact in eager PyTorch. In a program, rows whose number differs from that of the
    selected places, for which eager PyTorch raises an error, give NaN. There is no fix where the
    index holds other tensors.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.NonConcreteBooleanIndexError
    """

    CODE = "TPU211"
    MESSAGE = "`{write}` {what}, which a mask unknown while tracing does not allow"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, step: torch.Tensor):
                x = x.clone()
                x[x > 0] -= step.sum()
                return x
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, step: torch.Tensor):
                x = x.clone()
                tpuport.ops.masked(x)[x > 0] -= step.sum()
                return x
            """,
            inputs="(torch.randn(3, 4), torch.randn(2))",
            jit_error=_JIT_ERROR,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, pad: torch.Tensor):
                pad = pad.bool()
                x = x.clone()
                x[pad, 1:] = 0
                x[..., pad] = 1
                for i in range(x.shape[0]):
                    x[i][pad] = -1
                return x
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, pad: torch.Tensor):
                pad = pad.bool()
                x = x.clone()
                tpuport.ops.masked(x)[pad, 1:] = 0
                tpuport.ops.masked(x)[..., pad] = 1
                for i in range(x.shape[0]):
                    tpuport.ops.masked(x[i])[pad] = -1
                return x
            """,
            inputs="(torch.randn(3, 3), torch.rand(3) > 0.5)",
            jit_error=_JIT_ERROR,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, ids: torch.Tensor):
                x = x.clone()
                x[x[:, 0] > 0, ids[:1]] = 0
                return x
            """,
            inputs="(torch.randn(3, 4), torch.arange(3))",
            jit_error=_JIT_ERROR,
            left="other parts of the index may be tensors",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor):
            mask = mask.bool()
            x[mask] = 0
            x[~mask & (x > 1)] = y.sum()
            x[(mask,)] = y[:2]
            x.masked_fill_(mask, 0).masked_scatter_(mask, y)
            x[:, 1:] += y[:, 1:]
            x[y.argmax(-1)] += 1
            return x


        def lists(x: torch.Tensor, counts: dict, name: str):
            parts = list(x.chunk(2))
            parts[0][parts[0] > 0] = 0
            first = x[0].clone().masked_fill_(x[1] > 0, 0)
            counts[name == "mask"] += 1
            return parts, first
        """,
    )

    def visit_Subscript(self, node: ast.Subscript, context: Context) -> None:
        if not isinstance(node.ctx, ast.Store) or is_ours(node.value) or not masks(node, context):
            return
        what = problem(node, context)
        if what is not None:
            context.report(self, node, write=node, what=what)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Subscript)
        if not takes_one_mask(node, context):
            raise NotFixable("other parts of the index may be tensors, too")
        rows = RowFix(node, context)
        rows.mark(node)
        return rows.fix()


def problem(node: ast.Subscript, context: Context) -> str | None:
    """Return the part of a masked write that torchax cannot trace, in words, or None."""
    parent = context.module.parents[node]
    if isinstance(parent, ast.AugAssign):
        return "reads what it writes"
    if isinstance(node.slice, ast.List) or len(parts(node.slice)) > 1:
        return "slices what it writes"
    return "writes to a view" if is_view(node.value, context) else None
