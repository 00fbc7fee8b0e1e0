"""TPU101: a Python branch on a traced value."""

import ast

from tpuport.rules._asking import asks_within, is_asked
from tpuport.rules._branching import BranchFix
from tpuport.rules._expressions import OPS, Expressions, function_around
from tpuport.rules._reports import is_report
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Passage


class TensorBranch(Rule):
    """A branch that Python decides by the value of a traced tensor.

    ## What it does
    Finds `if`, `elif`, `x if t else y`, `and`, `or`, `not` and chained comparisons whose outcome
    takes the truth of a tensor that depends on the program's inputs. The fix moves both sides into
    nested functions and hands them to `tpuport.ops.cond`, which calls one of them in eager PyTorch
    and becomes `lax.cond` in a program.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so `bool(tensor)` raises
    `ConcretizationTypeError`.

    ## Fix safety
    The fix is exact in eager PyTorch: order of evaluation, short circuits, exceptions and bindings
    stay. One thing differs: reading a variable that was never bound raises `NameError`, no longer
    its subclass `UnboundLocalError`. There is no fix where a side writes to an object that others
    see, where a name is bound on one side only and read later, or where control leaves the branch
    by `break`, `yield` or a `return` on some paths only.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU101"
    MESSAGE = "Python branches on `{test}`, which has no value while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True
    PINS = True

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, limit: float | None = 2.0):
                if limit is not None and x.abs().max() > limit:  # too large
                    x = x / limit
                    hit = torch.ones(())
                else:
                    hit = torch.zeros(())
                return x, hit
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, limit: float | None = 2.0):
                # too large
                def if_true(x):
                    x = x / limit
                    hit = torch.ones(())
                    return x, hit

                def if_false(x):
                    hit = torch.zeros(())
                    return x, hit

                x, hit = tpuport.ops.cond(
                    tpuport.ops.both(limit is not None, lambda: x.abs().max() > limit),
                    if_true,
                    if_false,
                    (x,),
                )
                return x, hit
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                if x.sum() > 0:
                    return x * 2
                # Rare.
                if x.min() < -2:
                    x = x.clamp(min=-2)
                return x - 1
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                def if_true_2(x):
                    return x * 2

                def if_false_2(x):
                    # Rare.
                    def if_true(x):
                        x = x.clamp(min=-2)
                        return x

                    def if_false(x):
                        return x

                    x = tpuport.ops.cond(x.min() < -2, if_true, if_false, (x,))
                    return x - 1

                return tpuport.ops.cond(x.sum() > 0, if_true_2, if_false_2, (x,))
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = torch.zeros_like(x)
                for i in range(3):
                    if x.mean() > 0.1 * i:
                        continue
                    y = y + x
                return y
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                y = torch.zeros_like(x)
                for i in range(3):
                    def if_true(y):
                        return y

                    def if_false(y):
                        y = y + x
                        return y

                    y = tpuport.ops.cond(x.mean() > 0.1 * i, if_true, if_false, (y,))
                return y
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x + 1 if not x.any() else x
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                return tpuport.ops.cond(tpuport.ops.negate(x.any()), lambda: x + 1, lambda: x)
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, counts: list):
                if x.sum() > 0:
                    counts.append(1)
                    x = x + 1
                return x
            """,
            left="would happen on both sides",
            inputs="(torch.randn(3, 4), [])",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                if x.sum() > 0:
                    scale = 2
                return x * scale
            """,
            left="scale may be unbound",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                for i in range(3):
                    if x.sum() > i:
                        break
                    x = x + 1
                return x
            """,
            left="the break on line 7",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, mask: torch.Tensor | None = None):
            if mask is None or x.shape[0] > 3 and x.dim() == 2:
                mask = torch.ones_like(x)
            n = len(x) if x.size(0) else 0
            return torch.where(mask > 0, x, n)
        """,
        """
        import torch


        def forward(x: torch.Tensor, steps: int = 4):
            table = torch.arange(steps)
            if table.max() > 2 and not isinstance(steps, torch.Tensor):
                x = x + table.sum()
            return x
        """,
    )

    def visit_If(self, node: ast.If, context: Context) -> None:
        if context.asks_traced(node.test) and not is_report(node):
            context.report(self, node, test=node.test)

    def visit_IfExp(self, node: ast.IfExp, context: Context) -> None:
        if context.asks_traced(node.test):
            context.report(self, node, test=node.test)

    def visit_BoolOp(self, node: ast.BoolOp, context: Context) -> None:
        if not is_asked(node, context) and asks_within(node, context):
            context.report(self, node, test=node)

    def visit_UnaryOp(self, node: ast.UnaryOp, context: Context) -> None:
        if not is_asked(node, context) and asks_within(node, context):
            context.report(self, node, test=node.operand)

    def visit_Compare(self, node: ast.Compare, context: Context) -> None:
        if not is_asked(node, context) and asks_within(node, context):
            context.report(self, node, test=node)

    def visit_comprehension(self, node: ast.comprehension, context: Context) -> None:
        for test in node.ifs:
            if context.asks_traced(test):
                context.report(self, test, test=test)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if isinstance(node, ast.If):
            return Fix((BranchFix(node, context).edit(),), (OPS,))
        assert isinstance(node, ast.expr)
        parent = context.module.parents[node]
        if isinstance(parent, ast.comprehension) and node in parent.ifs:
            raise NotFixable("how many elements a comprehension keeps would depend on data")
        # Called for its refusals: an expression outside a function, or one that reads the frame.
        function_around(node, context)
        expressions = Expressions(context)
        if isinstance(node, ast.IfExp):
            start = Passage.of(f"{OPS}.cond(", context.module.origin(node))
            test = expressions.truth(node.test)
            sides = [expressions.delayed(side) for side in (node.body, node.orelse)]
            made = start + test + ", " + sides[0] + ", " + sides[1] + ")"
        else:
            made = expressions.value(node)
        return Fix((expressions.edit(node, made),), (OPS,))
