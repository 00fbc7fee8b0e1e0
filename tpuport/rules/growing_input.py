"""TPU612: a tensor that is longer in each call of a model."""

import ast
import re

from tpuport.rules._repeating import Loop, growing, model_calls
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.names import all_arguments

_CAT = {"torch.cat", "torch.concat", "torch.concatenate"}
# Arguments by which a step gets what earlier calls have made.
_EARLIER = re.compile(r"^past(_|$|k)|^kv_?cache|_past$|^(prev|previous|cached)_(k|v|key|value)s?$")


class GrowingInput(Rule):
    """A tensor that a loop makes longer and passes to a model each time.

    ## What it does
    Finds loops with `x = torch.cat([x, y])` and a call such as `model(x)` in the same body, and a
    step that appends to a cache it is given: `k = torch.cat([past_key_value[0], k], dim=2)`.

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
        Example(
            before="""
            import torch


            class Net(torch.nn.Module):
                def forward(self, x: torch.Tensor, past: torch.Tensor | None = None):
                    if past is not None:
                        x = torch.cat([past, x], dim=0)
                    return x


            class Loop:
                def __init__(self):
                    self.model = Net()

                def main(self, x):
                    past = None
                    for _ in range(3):
                        past = self.model(x, past)
                    return past


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
        """
        import torch


        class Net(torch.nn.Module):
            def forward(self, x: torch.Tensor, past: torch.Tensor, skip: torch.Tensor):
                both = torch.cat([skip, x], dim=1) + torch.cat([past[-2:], x])
                return torch.stack([past, x]), torch.cat([past, past]), both
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

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        past = _past(node, context)
        if past is not None and context.in_step(node):
            function = context.module.function(node)
            name = "forward" if function is None else function.name
            context.report(self, node, name=past, model=name)


def _past(call: ast.Call, context: Context) -> ast.expr | None:
    """Return the argument of the function around a call to which the call appends other values."""
    function = context.module.function(call)
    if function is None or context.name(call.func) not in _CAT or not call.args:
        return None
    if not isinstance(call.args[0], ast.List | ast.Tuple) or len(call.args[0].elts) != 2:
        return None
    first, second = call.args[0].elts
    root = first
    while isinstance(root, ast.Subscript | ast.Attribute | ast.Call):
        if isinstance(root, ast.Subscript) and not isinstance(root.slice, ast.Constant):
            return None  # a part of the past, of a length of its own
        root = root.func if isinstance(root, ast.Call) else root.value
    given = {argument.arg for argument in all_arguments(function.args)}
    if not isinstance(root, ast.Name) or root.id not in given or not _EARLIER.search(root.id):
        return None
    inside = {one.id for one in ast.walk(second) if isinstance(one, ast.Name)}
    return None if root.id in inside else first
