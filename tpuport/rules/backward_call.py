"""TPU419: gradients asked of PyTorch's autograd."""

import ast
import re

from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.imported import dotted_name

LOSS = ("loss", "losses", "objective", "cost")
# `loss_fn` and the like compute a loss.
_COMPUTES = {"fn", "fun", "func", "function", "layer", "module", "class", "cls", "op"}


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
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                layer = torch.nn.Linear(4, 1).to(x.device)
                loss_av_smoothed = layer(x).sum()
                loss_av_smoothed.backward()
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


        def forward(x: torch.Tensor, graph, loss_fn):
            graph.backward(x)
            loss_fn.backward(x)
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
            return _names_loss(dotted_name(node) or "")


def _names_loss(name: str) -> bool:
    """Return whether a name is one of a loss: `self.loss`, `closs`, `loss_av_smoothed`, `lossG`."""
    found = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.rpartition(".")[2])
    words = [word.lower() for word in found]
    last = "".join(words[-1:])
    return last.endswith(LOSS) or (last not in _COMPUTES and not set(words).isdisjoint(LOSS))
