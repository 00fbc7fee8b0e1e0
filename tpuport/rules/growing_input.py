"""TPU612: a tensor that is longer in each call of a model."""

from tpuport.rules._repeating import Loop, growing, model_calls
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context


class GrowingInput(Rule):
    """A tensor that a loop makes longer and passes to a model each time.

    ## What it does
    Finds loops with `x = torch.cat([x, y])` and a call such as `model(x)` in the same body.

    ## Why is this bad?
    A program is compiled for one shape. Each iteration has a different one, so each call of the
    model is traced and compiled again, or adds one more copy of the model if the loop is traced.

    ## Fix safety
    There is no automatic fix: the code does not say how long the tensor may become. Allocate it for
    the longest case and write to it by position, or pass the model the new part and a cache of
    fixed size.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.NonConcreteBooleanIndexError
    """

    CODE = "TPU612"
    MESSAGE = "`{name}` is longer in each iteration: every call of `{model}` recompiles"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch


            class Net(torch.nn.Module):
                def forward(self, x: torch.Tensor):
                    return x.mean(0, keepdim=True)


            class Loop:
                def __init__(self):
                    self.model = Net()

                def main(self, x):
                    while len(x) < 6:
                        y = self.model(x)
                        x = torch.cat([x, y], dim=0)
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


        def main(model, x, batches):
            seen = x
            for batch in batches:
                both = torch.cat([x, batch])
                both = torch.cat([both, batch])
                y = model(both)
                seen = torch.cat([seen, y])
                last = model(seen[-1:])
                first, extra = y, batch
                extra = torch.cat([extra, first])
                last = last + model(extra)
            return seen + last
        """,
        """
        import torch


        def main(model, x):
            x = torch.cat([x, x])
            for _ in range(3):
                x = model(x)
            return torch.cat([x, x])
        """,
    )

    def visit_For(self, node: Loop, context: Context) -> None:
        names = None
        for call in model_calls(node):
            names = growing(node, context) if names is None else names
            given = {*call.args, *(keyword.value for keyword in call.keywords)}
            for argument in sorted(given, key=lambda each: (each.lineno, each.col_offset)):
                if context.module.source(argument) in names:
                    context.report(self, argument, name=argument, model=call.func)

    visit_While = visit_For
