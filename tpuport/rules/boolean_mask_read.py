"""TPU210: `x[mask]` read with a traced mask."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._following import RowFix
from tpuport.rules._masks import is_mask, is_ours, is_tensor, masks, severity, takes_one_mask
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_JIT_ERROR = "NonConcreteBooleanIndexError"
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)


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
        found = _counted(node, context)
        if found is not None:
            return _count_fix(node, *found, context)
        rows = RowFix(node, context)
        rows.follow(node)
        rows.mark(node)
        if rows.joined:
            rows.inverted(node)
        return rows.fix()


def _counted(read: ast.Subscript, context: Context) -> tuple[ast.expr, str] | None:
    """Return the expression that counts what a mask selects, and our helper for it."""
    parents = context.module.parents
    outer = parents[read]
    if isinstance(outer, ast.Call) and ast.unparse(outer) == f"len({ast.unparse(read)})":
        return outer, "count_rows"
    if not isinstance(outer, ast.Attribute):
        return None
    match outer.attr, parents[outer]:
        case "numel" | "nelement", ast.Call(args=[], keywords=[]) as call:
            return call, "count_elements"
        case "size", ast.Call(args=[ast.Constant(value=0)], keywords=[]) as call:
            return call, "count_rows"
        case "shape", ast.Subscript(slice=ast.Constant(value=0)) as first:
            return first, "count_rows"
        case _:
            return None


def _count_fix(read: ast.Subscript, count: ast.expr, name: str, context: Context) -> Fix:
    """Return the fix that counts without selecting.

    Raises:
        NotFixable: the code around it may need a Python number.
    """
    if not is_mask(read.slice, context) or not _takes_tensor(count, context):
        raise NotFixable(f"`{ast.unparse(count)}` may be needed as a Python number")
    module = context.module
    origin = module.origin(count)
    tensor, mask = module.copy_node(read.value), module.copy_node(read.slice)
    text = Passage.of(f"{OPS}.{name}(", origin) + tensor + ", " + mask + ")"
    return Fix((Edit(*module.span(count), text),), (OPS,))


def _takes_tensor(count: ast.expr, context: Context) -> bool:
    """Return whether a tensor may replace a number: next to a tensor, or in a test."""
    parents = context.module.parents
    node, parent = count, parents[count]
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, _ARITHMETIC):
        other = parent.left if parent.right is node else parent.right
        return is_tensor(other, context)
    if not isinstance(parent, ast.Compare):
        return False
    # A test of a traced tensor is the business of the rules about branches and checks.
    while isinstance(parent, ast.Compare | ast.BoolOp | ast.UnaryOp):
        node, parent = parent, parents[parent]
    return isinstance(parent, ast.If | ast.Assert | ast.IfExp) and parent.test is node
