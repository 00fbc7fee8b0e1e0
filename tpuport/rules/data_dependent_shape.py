"""TPU212: a shape that depends on traced values."""

import ast

from tpuport.rules._dynamic import why_dynamic
from tpuport.rules._expressions import OPS
from tpuport.rules._following import RowFix
from tpuport.rules._masks import severity
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage


class DataDependentShape(Rule):
    """A tensor whose shape depends on traced values.

    ## What it does
    Finds `nonzero`, `argwhere`, `torch.where(condition)`, `masked_select`, `unique`,
    `unique_consecutive`, `bincount`, `one_hot` without a number of classes and `repeat_interleave`
    with a tensor of repeats. A `masked_select` whose elements are reduced is rewritten with
    `tpuport.ops.masked_select`.

    ## Why is this bad?
    Every array of a traced program has a shape that is known before any value is, so torchax raises
    `ConcretizationTypeError`. That also holds where the code could state the size: for `bincount`
    with `minlength`, and `nonzero_static`.

    ## Fix safety
    The fix is exact in eager PyTorch; a program adds in another order. For the other calls there is
    none: `torch.where` with three arguments, a `topk` of fixed size, or counting with
    `one_hot(x, n).sum(0)` replace them. Code that packs tokens for flash attention is only noted:
    it never runs without a CUDA device.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU212"
    MESSAGE = "the shape of `{made}` depends on `{decides}`, which has no value while tracing"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                low = torch.masked_select(x, x < 0).sum()
                return low + x.masked_select(x > 0).mean()
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                low = tpuport.ops.masked_select(x, x < 0).sum()
                return low + tpuport.ops.masked_select(x, x > 0).mean()
            """,
        ),
        *(
            Example(
                before=f"""
                import torch


                def forward(x: torch.Tensor, ids: torch.Tensor):
                    return {code}
                """,
                inputs="(torch.randn(3, 4), torch.arange(3))",
                jit_error=error,
                left=left,
            )
            for code, error, left in (
                ("x[torch.nonzero(ids).flatten()]", "ConcretizationTypeError", "no fix"),
                ("torch.where(x > 0)", "ConcretizationTypeError", "no fix"),
                ("torch.bincount(ids, minlength=4)", "ConcretizationTypeError", "no fix"),
                ("ids.unique(), x", "ConcretizationTypeError", "no fix"),
                ("x.repeat_interleave(ids, dim=0)", "ConcretizationTypeError", "no fix"),
                ("torch.nn.functional.one_hot(ids)", "ConcretizationTypeError", "no fix"),
                ("torch.combinations(x[0])", "ConcretizationTypeError", "no fix"),
                ("x.nonzero_static(size=4)", "ConcretizationTypeError", "no fix"),
                ("x.masked_select(x > 0)", "ConcretizationTypeError", "returns as many rows"),
            )
        ),
    )
    CLEAN = (
        """
        import numpy as np
        import torch
        import torch.nn.functional as F


        def forward(x: torch.Tensor, ids: torch.Tensor, names: list, n: int = 3):
            size = x.shape[0]
            one_hot = F.one_hot(ids, num_classes=n) + F.one_hot(ids, n)
            chosen = torch.where(x > 0, x, 0)[: size - 1, :n]
            twice = x.repeat_interleave(2, dim=0).repeat_interleave(repeats=n, dim=1)
            steps = torch.arange(size, device=x.device) + torch.full((n,), 0.5).sum()
            even = torch.nonzero(torch.arange(n) % 2 == 0).flatten()
            return one_hot, chosen, twice, steps, x[even], torch.histc(x), names[:n]
        """,
        """
        import numpy as np
        import torch


        def forward(x: torch.Tensor, table: np.ndarray):
            found = np.unique(table), np.where(table > 0), table.nonzero()
            filled = torch.full((2,), 1.0) + torch.linspace(0, 1, x.shape[1])[:2]
            total = x.count_nonzero() + torch.isin(x, x).sum()
            return found, filled, total, x.new_zeros(x.shape[0], 2), torch.full_like(x, 2)


        def unpad(mask: torch.Tensor):
            return mask.sum(-1), torch.nonzero(mask.flatten()).flatten()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        decides = why_dynamic(node, context)
        if decides is not None:
            context.report(self, node, severity=severity(node, context), made=node, decides=decides)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        function = node.func if isinstance(node, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else ""
        if not isinstance(node, ast.Call) or name != "masked_select" or node.keywords:
            raise NotFixable("this has no fix: choose a size that holds for every input")
        assert isinstance(function, ast.Attribute)
        rows = RowFix(node, context)
        rows.follow(node)
        start, end = context.module.span(function)
        origin = context.module.origin(node)
        edit = Edit(start, end, Passage.of(f"{OPS}.masked_select", origin))
        if context.name(function) is None:
            opening = context.module.token_after(end, "(") + 1
            call = Passage.of(f"{OPS}.masked_select(", origin)
            receiver = context.module.copy_node(function.value)
            edit = Edit(start, opening, call + receiver + ", ")
        rows.edits[start, end] = edit
        return rows.fix()
