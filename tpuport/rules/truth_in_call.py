"""TPU119: a call that asks for the truth of traced values."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._rule import Example, Rule
from tpuport.rules._truths import asks_truth, is_choice, is_list_of_numbers
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_CHOICES = {"max": "largest", "min": "smallest"}


class TruthInCall(Rule):
    """A call that asks for the truth of traced values without saying so.

    ## What it does
    Finds Python's `max(a, b)` and `min(a, b)` of values that depend on the program's inputs,
    `sorted`, `any`, `all`, `max` and `min` over the elements of such a tensor, `t in (1, 2)`,
    `torch.equal` and `t.is_nonzero()`. The fix of `max(a, b)` calls `tpuport.ops.largest`, which
    compares in the program while it is traced.

    ## Why is this bad?
    These compare values and take the truth of the outcome. While a program is traced there is none
    yet, so they raise `ConcretizationTypeError`.

    ## Fix safety
    The fix is exact in eager PyTorch. Only `max` and `min` of two or more arguments have one: over
    the elements of a tensor, torch's own `t.max()`, `t.any()` and `torch.sort` are better.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU119"
    MESSAGE = "`{call}` decides by values that do not exist while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, limit: float = 2.0):
                scale = max(x.abs().mean(), 0.5, x.std())
                y = x * min(limit, len(x))
                return y / scale, min(x.flatten()[-1], x.max())
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, limit: float = 2.0):
                scale = tpuport.ops.largest(x.abs().mean(), 0.5, x.std())
                y = x * min(limit, len(x))
                return y / scale, tpuport.ops.smallest(x.flatten()[-1], x.max())
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x * max(x[0])
            """,
            left="torch has this for the elements of a tensor",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                kept = any(x[0] > 0)
                return x, kept
            """,
            left="torch has this for the elements of a tensor",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                known = x[0, 0].long() in (1, 2)
                return x, known
            """,
            left="torch.isin",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                same = torch.equal(x, -x)
                return x, same
            """,
            jit_error="TracerBoolConversionError",
            left="as a tensor",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, names: list, parts: list[torch.Tensor], steps: int = 4):
            n = max(x.shape[0], steps, key=None) + min(x.shape) + max(len(part) for part in parts)
            if any(name in names for name in ("a", "b")) and all(p.ndim == 2 for p in parts):
                x = x.max(-1, keepdim=True).values + torch.any(x > 0)
            known = parts[0] not in ("none", "all") and x.dtype in (torch.float32, torch.float64)
            return x * n, known, sum(parts), sorted(names)
        """,
        """
        import torch


        class Pool(torch.nn.Module):
            def max(self, x, y):
                return torch.maximum(x, y)

            def forward(self, x: torch.Tensor, y: torch.Tensor):
                return self.max(x, y) + torch.max(x, y) + x.max() + x.all()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if asks_truth(node, context):
            context.report(self, node, call=node)

    def visit_Compare(self, node: ast.Compare, context: Context) -> None:
        match node:
            case ast.Compare(ops=[ast.In() | ast.NotIn()], left=left, comparators=[items]):
                if is_list_of_numbers(items) and context.is_traced(left):
                    context.report(self, node, call=node)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if isinstance(node, ast.Compare):
            raise NotFixable("torch.isin returns the answer as a tensor")
        assert isinstance(node, ast.Call)
        if not isinstance(node.func, ast.Name):
            raise NotFixable("(a == b).all() returns the answer as a tensor")
        if not is_choice(node, context):
            raise NotFixable("torch has this for the elements of a tensor")
        helper = Passage.of(f"{OPS}.{_CHOICES[node.func.id]}", context.module.origin(node))
        return Fix((Edit(*context.module.span(node.func), helper),), (OPS,))
