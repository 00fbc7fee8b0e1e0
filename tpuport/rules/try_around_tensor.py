"""TPU113: an exception handler around the computation of a traced tensor."""

import ast

from tpuport.rules._handlers import Danger, danger_of
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context


class TryAroundTensor(Rule):
    """An exception handler that decides what a program computes.

    ## What it does
    Finds `except` clauses in a step that do not raise again and

    - catch what jax raises where the code needs the value of a traced tensor;
    - wait for an error of linear algebra, such as a matrix that is not positive definite;
    - catch every exception around the computation of a traced tensor.

    ## Why is this bad?
    A handler runs, or does not, while the program is traced, for all inputs at once. The errors
    that jax raises for a traced value are a `TypeError`, so the handler takes them for its own
    case and the program silently computes the fallback. And a program raises no error for its
    values: a factorization that fails gives NaN, and the fallback never runs.

    ## Fix safety
    There is no automatic fix. Decide by a value that is known, or compute both ways and select with
    `torch.where`; `torch.linalg.cholesky_ex` and `inv_ex` return the failures as a tensor.

    ## References
    https://docs.jax.dev/en/latest/errors.html
    """

    CODE = "TPU113"
    MESSAGE = "`{clause}` {what} `{code}`{then}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                try:
                    scale = 1 / (torch.linalg.det(x[:, :3]) + 2)
                    x = torch.linalg.cholesky(x @ x.mT - torch.eye(3, device=x.device))
                except torch.linalg.LinAlgError:
                    x, scale = torch.eye(3, device=x.device), 1
                return x * scale
            """,
            jit_error=None,
            harm="differs",
            left="no automatic fix",
        ),
        Example(
            before="""
            import math

            import torch


            def forward(x: torch.Tensor):
                try:
                    weights = [math.exp(v) for v in x[0].tolist()]
                except Exception:
                    weights = [0.0] * 4
                return x * sum(weights)
            """,
            jit_error=None,
            harm="differs",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                try:
                    if x.sum() > -100:
                        x = x + 1
                except (TypeError, ValueError):
                    pass
                return x
            """,
            jit_error=None,
            harm="differs",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch

        try:
            import flash_attn
        except ImportError:
            flash_attn = None


        def forward(x: torch.Tensor, table: dict, sizes: list, name: str):
            try:
                x = x + table[name]
            except KeyError:
                x = x + 1
            try:
                n = int(sizes[0])
            except Exception:
                n = x.shape[0]
            try:
                x = x.reshape(n, -1)
            except Exception as error:
                raise ValueError(f"cannot make {n} rows of {x.shape}") from error
            try:
                y = torch.linalg.solve(torch.eye(3) * 2, torch.ones(3))
            except RuntimeError:
                y = None
            try:
                x = x * 2
            finally:
                table.clear()
            return x, y
        """,
    )

    def visit_Try(self, node: ast.Try, context: Context) -> None:
        if not context.in_step(node):
            return
        for handler in node.handlers:
            danger: Danger | None = danger_of(node, handler, context)
            if danger is not None:
                caught = f" {ast.unparse(handler.type)}" if handler.type is not None else ""
                context.report(
                    self,
                    handler.type or handler,
                    severity=danger.severity,
                    clause=f"except{caught}",
                    what=danger.what,
                    code=danger.code,
                    then=danger.then,
                )
                return
