"""TPU420: an in-place method that torchax has not."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.engine import Context
from tpuport.source.finding import Safety, Severity

# Each was run under plain torchax: its out-of-place form works, this one has no lowering.
_MISSING = frozenset(
    {
        *("abs_", "atan_", "clamp_max_", "cumsum_", "erf_", "exp_", "floor_", "fmod_", "log_"),
        *("neg_", "reciprocal_", "round_", "rsqrt_", "sign_", "sin_", "t_", "trunc_"),
    }
)


class InPlaceGap(Rule):
    """An in-place method of a traced tensor for which torchax has no lowering.

    ## What it does
    Finds `x.exp_()`, `x.round_()`, `x.neg_()` and the others of the in-place methods that torchax
    lacks, on a traced tensor in a step. `add_`, `mul_`, `clamp_`, `copy_` and most others work.

    ## Why is this bad?
    The call raises `OperatorNotFound`.

    ## Fix safety
    There is no automatic fix: out of place, a tensor of whole numbers may become one of floats
    where PyTorch raises. Write `x = x.exp()`, or `x.copy_(x.exp())` if others see the tensor.

    ## References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-operations-with-autograd
    """

    CODE = "TPU420"
    MESSAGE = "torchax has no `{method}`: write the operation out of place"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = tuple(
        Example(
            before=f"""
            import torch


            def forward(x: torch.Tensor):
                y = x.abs() + 1
                y.{call}
                return y
            """,
            jit_error="OperatorNotFound",
            left="no automatic fix",
        )
        for call in ("exp_()", "neg_()", "round_()", "clamp_max_(1.5)", "log_()", "reciprocal_()")
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, names: list):
            y = x.clone()
            y.add_(1).mul_(2).clamp_(0, 1).zero_()
            y.copy_(x.exp())
            y.sqrt_().relu_()
            table = torch.zeros(4)
            table.exp_()
            return y.round()
        """,
        """
        import torch


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(4))
                with torch.no_grad():
                    self.weight.exp_()

            def forward(self, x: torch.Tensor):
                return x * self.weight
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        match node:
            case ast.Call(func=ast.Attribute(value=target, attr=method)) if method in _MISSING:
                if context.is_traced(target) and runs_in_step(node, context):
                    context.report(self, node, method=method)
            case _:
                pass
