"""TPU419: gradients asked of PyTorch's autograd."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.imported import dotted_name

LOSS = ("loss", "losses", "objective", "cost")


class BackwardCall(Rule):
    """A training loop that calls `loss.backward()`.

    ## What it does
    Finds `.backward()` on a loss, and on what a gradient scaler makes of one. There is no automatic
    fix: the step becomes a function of the parameters, to be passed to `jax.value_and_grad`.

    ## Why is this bad?
    Tensors of torchax carry no autograd graph. `backward()` raises `RuntimeError: element 0 of
    tensors does not require grad`, and an optimizer that finds no `.grad` silently does nothing.

    ## Fix safety
    There is no automatic fix. With `ported = tpuport.convert(model)`, pass a loss that calls
    `ported.apply(params, buffers, key, ...)` to `jax.value_and_grad`.

    ## References
    https://docs.jax.dev/en/latest/_autosummary/jax.value_and_grad.html
    """

    CODE = "TPU419"
    MESSAGE = "`{call}` needs PyTorch's autograd graph, which the tensors of a program do not have"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                layer = torch.nn.Linear(4, 1).to(x.device)
                loss = layer(x).sum()
                loss.backward()
                return layer.weight.grad
            """,
            jit_error="RuntimeError",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        class Double(torch.autograd.Function):
            @staticmethod
            def backward(ctx, grad):
                return Inner.backward(ctx, grad)


        def forward(x: torch.Tensor, text: str = "loss.backward()"):
            return torch.autograd.forward_ad.make_dual(x, x)[0]
        """,
        """
        import torch


        def forward(x: torch.Tensor, graph):
            graph.backward(x)
            return x
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            if _is_loss(node.func.value):
                context.report(self, node, call=node)


def _is_loss(node: ast.expr) -> bool:
    """Return whether an expression is a loss by its name, such as `scaler.scale(out.loss)`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled]):
            return _is_loss(scaled)
        case ast.Call(func=ast.Attribute(value=value, attr="sum" | "mean")):
            return _is_loss(value)
        case ast.BinOp(left=left, right=right):
            return _is_loss(left) or _is_loss(right)
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            return key.endswith(LOSS) or _is_loss(value)
        case _:
            return (dotted_name(node) or "").lower().endswith(LOSS)
