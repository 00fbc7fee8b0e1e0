"""TPU112: a Python loop over the rows of a traced tensor."""

import ast
from collections.abc import Sequence

from tpuport.rules._rows import Loop, rows_of
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context


class UnrolledLoop(Rule):
    """A Python loop over the rows of a traced tensor.

    ## What it does
    Finds `for row in x` (also through `enumerate`, `zip` and `x.unbind()`) and
    `for i in range(x.shape[1])` with `x[:, i]` in its body, where `x` depends on the program's
    inputs. A loop over a batch by its index, `x[i]`, is only a note.

    ## Why is this bad?
    Python runs the loop while the program is traced, so the program holds its body once for each
    row: tracing and compiling take longer with every row, a changed number of rows means a retrace,
    and the device works on one row at a time.

    ## Fix safety
    There is no automatic fix. Write the body for all rows at once, or use `torch.vmap`; where one
    iteration needs the result of the one before, `tpuport.ops.while_loop`.

    ## References
    https://docs.jax.dev/en/latest/jit-compilation.html
    """

    CODE = "TPU112"
    MESSAGE = "the program holds the body of this loop once for each row of `{tensor}`"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, w: torch.Tensor):
                found = []
                for i, row in enumerate(x):
                    found.append(row @ w + i)
                return torch.stack(found)
            """,
            inputs="(torch.randn(3, 4), torch.randn(4, 4))",
            jit_error=None,
            harm="unrolls",
            left="for all rows at once",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                rows, width = x.shape
                y = torch.zeros_like(x)
                for i in range(1, width):
                    y[:, i] = y[:, i - 1] * 0.5 + x[:, i]
                return y
            """,
            jit_error=None,
            harm="unrolls",
            left="for all rows at once",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return torch.stack([x[i] * i for i in range(len(x))])
            """,
            jit_error=None,
            harm="unrolls",
            left="for all rows at once",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, layers: list, parts: tuple[torch.Tensor, ...], steps: int = 4):
            for layer in layers:
                x = layer(x)
            for i in range(steps):
                x = x + parts[i]
            for part in x.chunk(2, dim=-1):
                x = x + part.sum()
            sizes = [size for size in x.shape]
            for i in range(x.ndim):
                sizes[i] = x.shape[i]
            total = sum(part.mean() for part in parts)
            for a, b in zip(parts, torch.meshgrid(x[0], x[0], indexing="ij")):
                total = total + a.sum() + b.sum()
            return x, total
        """,
        """
        import torch


        def forward(x: torch.Tensor, xs: list[torch.Tensor], y: torch.Tensor, tile: int = 2):
            b, n = x.shape
            if isinstance(y, (list, tuple)):
                return [part + 1 for part in y]
            for i in range(x.shape[-1]):
                xs.append(x[..., i])
            for i in range(0, n, tile):
                xs.append(x[:, i : i + tile])
            for part, known in zip(x, xs):
                xs.append(part + known)
            halves = torch.split(x, n // 2, dim=1)
            for i in range(b):
                xs.append(xs[i] + 1)
            return [half * 2 for half in halves] + [y for y in xs]
        """,
    )

    def visit_For(self, node: ast.For, context: Context) -> None:
        self._visit(node, node.body, context)

    def visit_comprehension(self, node: ast.comprehension, context: Context) -> None:
        self._visit(node, [context.module.parents[node]], context)

    def _visit(self, node: Loop, body: Sequence[ast.AST], context: Context) -> None:
        if context.in_step(node.iter):
            rows = rows_of(node, body, context)
            if rows is not None:
                severity = Severity.NOTE if rows.of_batch else self.SEVERITY
                context.report(self, node.iter, severity=severity, tensor=rows.tensor)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("its body has to be written for all rows at once")
