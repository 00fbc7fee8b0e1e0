"""TPU416: `torch.no_grad` around a value that a gradient flows through."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.rules._stopping import asks_for_gradients, detached, is_evaluation, is_stopper, leaking
from tpuport.source.rewrite.finding import Fix, Safety, Severity
from tpuport.source.rewrite.matching import Context


class NoGradAsStopGradient(Rule):
    """A value computed under `torch.no_grad` and used where gradients are asked for.

    ## What it does
    Finds `with torch.no_grad():` (and `inference_mode`, `set_grad_enabled(False)`) in a step, whose
    body computes a traced value that is read after it. Functions that sample or evaluate, and those
    that are decorated with it, are left alone. The fix calls `.detach()` on the values.

    ## Why is this bad?
    The block switches PyTorch's autograd off. `jax.grad` knows nothing of that: the gradient flows
    through the target network, the teacher or the statistics, and training silently changes.
    `.detach()` becomes `jax.lax.stop_gradient`.

    ## Fix safety
    The fix is exact: under `no_grad` a tensor has no gradient to lose. There is none where the
    value may be more than one tensor, such as the result of a module.

    ## References
    https://docs.jax.dev/en/latest/_autosummary/jax.lax.stop_gradient.html
    """

    CODE = "TPU416"
    MESSAGE = "`{stopper}` does not stop the gradient of `{name}` under `jax.grad`"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                with torch.no_grad():
                    target = x * 2  # no gradient
                    weight = torch.softmax(x.float(), dim=-1)
                return x * target * weight
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                with torch.no_grad():
                    target = (x * 2).detach()  # no gradient
                    weight = torch.softmax(x.float(), dim=-1).detach()
                return x * target * weight
            """,
            jit_error=None,
            harm="gradient_flows",
        ),
        Example(
            before="""
            import torch


            class Distilled(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.teacher = torch.nn.Tanh()

                def forward(self, x: torch.Tensor):
                    with torch.no_grad():
                        wanted = self.teacher(x)
                    return (x - wanted).square()


            forward = Distilled()
            """,
            jit_error=None,
            harm="gradient_flows",
            left="may be more than one tensor",
        ),
    )
    CLEAN = (
        """
        import torch


        @torch.no_grad()
        def rotate(x: torch.Tensor):
            y = x * 2
            return y


        def sample(x: torch.Tensor):
            with torch.no_grad():
                y = x * 2
            return y + 1


        def forward(x: torch.Tensor):
            with torch.no_grad():
                target = (x * 2).detach()
                mask = x > 0
                best = x.argmax(-1)
                scratch = x * 3
                plain = x * 4
                table = torch.arange(4)
                del scratch
            return x * target * mask + best[:, None] + plain.detach() + table.sum()
        """,
        """
        import torch


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                with torch.no_grad():
                    self.weight = torch.nn.Parameter(torch.ones(4))

            def forward(self, x: torch.Tensor):
                with torch.set_grad_enabled(self.training):
                    y = x * self.weight
                return y
        """,
    )

    def visit_With(self, node: ast.With, context: Context) -> None:
        stoppers = [i.context_expr for i in node.items if is_stopper(i.context_expr, context)]
        function = context.module.function(node)
        if not stoppers or function is None or not runs_in_step(node, context):
            return
        if not asks_for_gradients(function, context) or is_evaluation(node, context):
            return
        for name, _ in leaking(node, context):
            context.report(self, stoppers[0], stopper=stoppers[0], name=name)
            return

    def fix(self, node: ast.AST, context: Context) -> Fix:
        # The finding is at the expression, whose parent is the `withitem`.
        block = context.module.parents[context.module.parents[node]]
        assert isinstance(block, ast.With)
        return Fix(tuple(detached(name, value, context) for name, value in leaking(block, context)))
