"""TPU611: a Python number that changes from call to call of a model."""

from tpuport.rules._repeating import Loop, arguments, counters, is_varying_number, model_calls
from tpuport.rules._rule import Example, Rule
from tpuport.source.inference.roles import Role
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context


class VaryingScalar(Rule):
    """A Python number that changes in each iteration of a host loop and is passed to a model.

    ## What it does
    Finds calls such as `model(x, step)` in a loop outside the traced step, where an argument is the
    loop's counter, `t.item()` or `float(t)`.

    ## Why is this bad?
    `tpuport.convert` takes Python numbers as constants of the program, as `static_argnums` of
    `jax.jit` does: every new number costs a retrace and a compilation, seconds to minutes each.

    ## Fix safety
    There is no automatic fix: only the model knows whether it also takes a tensor. Pass
    `torch.tensor(step)`, or leave `.item()` out.

    ## References
    https://docs.jax.dev/en/latest/jit-compilation.html#marking-arguments-as-static
    """

    CODE = "TPU611"
    MESSAGE = "`{argument}` is a Python number that varies: every call of `{model}` recompiles"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch


            class Net(torch.nn.Module):
                def forward(self, x: torch.Tensor, step: int):
                    return x * (step + 1)


            class Loop:
                def __init__(self):
                    self.model = Net()

                def main(self, x):
                    for step in range(3):
                        x = self.model(x, step)
                    return x


            forward = Loop().main
            """,
            jit_error=None,
            harm="retraces",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        def main(model, x, writer, times):
            for step, t in enumerate(times):
                x = model(x, t)
                x = model(x, torch.tensor(step), 3, scale=0.5)
                writer.add_scalar("loss", x.mean().item(), step)
                print(step)
                writer.save_model(args=x, model=model, epoch=step)
                evaluate(model, step)
            return x
        """,
        """
        import torch


        class Sampler(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, x: torch.Tensor):
                for step in range(3):
                    x = self.model(x, step)
                return x
        """,
    )

    def visit_For(self, node: Loop, context: Context) -> None:
        calls = list(model_calls(node))
        if not calls or context.role(node) is not Role.HOST:
            return
        counted = counters(node)
        for call in calls:
            for argument in arguments(call):
                if is_varying_number(argument, counted):
                    context.report(self, argument, argument=argument, model=call.func)

    visit_While = visit_For
