"""TPU410: an in-place write that is lost, because it goes through a view."""

import ast

from tpuport.rules._placing import made_on_device
from tpuport.rules._rebinding import rebinding_fix
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.rules._views import (
    LOSING_ON_SLICES,
    PARTS,
    Mutation,
    View,
    is_read_after,
    made_before,
    mutation,
    rebound,
    view_of,
)
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, Safety, Severity


class WriteThroughView(Rule):
    """An in-place write to a view, whose base is read later.

    ## What it does
    Finds in-place methods, `+=` and item assignments on the result of `view`, `reshape`, `flatten`,
    `unsqueeze`, `transpose`, `chunk` and the other views that are no subscripts, where the tensor
    that they are views of is read later (or the other way round); and `zero_`, `fill_`,
    `masked_fill_` and a few more on a subscript such as `x[:, 0]`. The fix assigns to the
    subscript, or rebinds the base to the written view.

    ## Why is this bad?
    torchax writes through subscripts only, and through these not with every method. Other views are
    copies there: the write never reaches the base, and nobody is told.

    ## Fix safety
    The fix is exact in eager PyTorch; where the original raises, the exception may read otherwise.
    There is none where the view may be a copy (`reshape`), is one of several parts, or where other
    names may stand for the base.

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
                y[..., 1:] = y[..., 1:].masked_fill(x[..., 1:] > 0, -1.0)
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
            part = y[1:]
            part.add_(1).clamp_(-1, 1)
            y = y.view(-1)
            y += 1
            y[0] = 2
            flat = x.clone().reshape(-1)
            flat.zero_()
            swapped = x.transpose(0, 1).reshape(-1)
            swapped.zero_()
            return y, flat, swapped, x
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


def lost_write(node: ast.stmt, change: Mutation, context: Context) -> tuple[ast.expr, str] | None:
    """The base that a write does not reach, and the view between them."""
    view = view_of(change.target, context)
    if view is None:
        return None
    if view.losing is not None or (view.steps and change.method in LOSING_ON_SLICES):
        step = f"`{view.losing}`" if view.losing else f"`{change.method}` on a subscript"
        return (view.base, step) if _is_seen(view, node, context) else None
    if not isinstance(view.base, ast.Name) or view.steps:
        return None
    return _lost_by_name(view.base.id, node, change, context) or _unseen_by_view(
        view.base, node, context
    )


def _is_seen(view: View, node: ast.stmt, context: Context) -> bool:
    """Whether anybody reads the base of a view written by an expression of its own."""
    if not _is_traced(view.base, context):
        return False
    base = view.base
    return isinstance(base, ast.Attribute) or (
        isinstance(base, ast.Name) and is_read_after(base.id, node, context)
    )


def _is_traced(base: ast.expr, context: Context) -> bool:
    return context.is_traced(base) or made_on_device(base, context)


def _lost_by_name(
    name: str, node: ast.stmt, change: Mutation, context: Context
) -> tuple[ast.expr, str] | None:
    """The base of a view that a name stands for, if it is read after the write."""
    function = context.module.function(node)
    for assign, value in made_before(name, node, context):
        view = view_of(value, context)
        if view is None or not view.steps or not isinstance(view.base, ast.Name):
            continue
        loses = view.losing is not None or change.method in LOSING_ON_SLICES
        is_part = isinstance(assign.targets[0], ast.Name) or view.losing in PARTS
        base = view.base.id
        if not loses or not is_part or base == name or function is None:
            continue
        if rebound({base}, assign, node, function) or not _is_traced(view.base, context):
            continue
        if is_read_after(base, node, context) and not is_settled(node, base, name, context):
            return view.base, f"`{view.losing or change.method}`"
    return None


def _unseen_by_view(
    base: ast.Name, node: ast.stmt, context: Context
) -> tuple[ast.expr, str] | None:
    """A view made before, which is read after its base is written."""
    function = context.module.function(node)
    block, place = context.module.block(node)
    for earlier in block[:place]:
        match earlier:
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value) if name != base.id:
                view = view_of(value, context)
                if view is None or view.losing is None or function is None:
                    continue
                if not isinstance(view.base, ast.Name) or view.base.id != base.id:
                    continue
                if rebound({base.id, name}, earlier, node, function):
                    continue
                if _is_traced(view.base, context) and is_read_after(name, node, context):
                    return target, f"`{view.losing}`"
            case _:
                pass
    return None


def is_settled(node: ast.stmt, base: str, name: str, context: Context) -> bool:
    """Whether the statement after a write rebinds the base to the written view."""
    block, place = context.module.block(node)
    following = block[place + 1] if place + 1 < len(block) else None
    match following:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=owner))),
        ):
            return target == base and owner == name
        case _:
            return False
