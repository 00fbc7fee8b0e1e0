"""TPU121: a new tensor that is filled with a traced number."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

FUNCTIONS = frozenset({"torch.full", "torch.full_like"})


class TracedFill(Rule):
    """A new tensor that is filled with a traced number.

    ## What it does
    Finds `torch.full(size, t)` and `torch.full_like(x, t)` of a traced number `t`. The fix calls
    `tpuport.ops.filled(torch.full)`, which in eager PyTorch is the function itself.

    ## Why is this bad?
    PyTorch takes the value out of the tensor before torchax sees the call: the trace stops with a
    `RuntimeError` about meta tensors or a `ConcretizationTypeError`. `torch.full` with a `device`
    is fine: torchax makes that tensor itself.

    ## Fix safety
    Exact.

    ## References
    https://docs.pytorch.org/docs/stable/generated/torch.full.html
    """

    CODE = "TPU121"
    MESSAGE = "`{call}` takes the value of `{value}`, which has none while traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x * torch.full((x.shape[0], 1), x.mean())
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                return x * tpuport.ops.filled(torch.full)((x.shape[0], 1), x.mean())
            """,
            jit_error="RuntimeError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x + torch.full_like(x, fill_value=x.float().norm())
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                return x + tpuport.ops.filled(torch.full_like)(x, fill_value=x.float().norm())
            """,
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, scale: float):
            steps = torch.full((x.shape[0],), x.argmax(), device=x.device, dtype=torch.long)
            ones = torch.full_like(x, scale).mean()
            return steps + ones, torch.tensor([x.shape[0], scale])
        """,
        """
        import torch


        def collate(rows: list):
            return torch.tensor([row.sum().item() for row in rows])
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = context.name(node.func)
        if name not in FUNCTIONS or not _is_understood(node):
            return
        if name == "torch.full" and any(k.arg == "device" for k in node.keywords):
            return
        value = _value(node)
        if value is not None and context.is_traced(value):
            context.report(self, node, call=node.func, value=value)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        start, end = context.module.span(node.func)
        origin = context.module.origin(node)
        opening, closing = Passage.of(f"{OPS}.filled(", origin), Passage.of(")", origin)
        return Fix((Edit(start, start, opening), Edit(end, end, closing)), (OPS,))


def _is_understood(node: ast.Call) -> bool:
    """Return whether the first argument is positional and no argument is unpacked."""
    unpacked = any(isinstance(a, ast.Starred) for a in node.args)
    return bool(node.args) and not unpacked and all(k.arg is not None for k in node.keywords)


def _value(node: ast.Call) -> ast.expr | None:
    if len(node.args) > 1:
        return node.args[1]
    return next((k.value for k in node.keywords if k.arg == "fill_value"), None)
