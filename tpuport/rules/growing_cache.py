"""TPU412: a cache in `self` that a step makes longer."""

import ast

from tpuport.rules._guards import is_growing
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import class_state, is_set_up, module_class, self_name
from tpuport.rules._writing import grown_by, step_writes
from tpuport.source.engine import Context
from tpuport.source.finding import Safety, Severity
from tpuport.source.module import FUNCTIONS


class GrowingCache(Rule):
    """A table or cache in `self` that a step replaces by a longer one.

    ## What it does
    Finds code of a step that makes an attribute longer: `self.cache = torch.cat([self.cache, x])`,
    and branches such as `if length > self.max_cached: self._set_table(length)`, whose body writes
    what its test compares a size with.

    ## Why is this bad?
    The branch runs while the program is traced, not when it is run. A registered buffer is set back
    after the trace, but a length that is kept beside it is not: the next trace believes that the
    table is long enough and reads past its end, where XLA clamps the index. An attribute that is no
    buffer keeps a value of a finished trace, and the next trace fails with `UnexpectedTracerError`.
    A cache of all that came before stops growing after the first call.

    ## Fix safety
    There is no automatic fix: how long the table must be is not in the code. Build it in `__init__`
    for the longest input, and slice it in the step. Hand a cache of earlier values in and out of
    the step as a tensor of fixed size.

    ## References
    https://docs.jax.dev/en/latest/stateful-computations.html
    """

    CODE = "TPU412"
    MESSAGE = "`{attribute}` grows in the step: a program keeps the size that it was traced with"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            class Rope(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self._set_table(2)

                def _set_table(self, length, device=None):
                    self.max_cached = length
                    table = torch.arange(length, device=device).float().cos()
                    self.register_buffer("table", table, persistent=False)

                def forward(self, x: torch.Tensor):
                    if x.shape[1] > self.max_cached:
                        self._set_table(x.shape[1], x.device)
                    places = torch.arange(x.shape[1], device=x.device)
                    return x * self.table[places]


            forward = Rope()
            """,
            jit_error=None,
            harm="second_trace_differs",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Memory(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.seen = torch.zeros(1, 4)

                def forward(self, x: torch.Tensor):
                    self.seen = torch.cat([self.seen.to(x.device), x])
                    return x - self.seen.mean(0)


            forward = Memory()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        class Rope(torch.nn.Module):
            def __init__(self, longest: int = 8):
                super().__init__()
                self.longest = longest
                self.set_table(longest)

            def set_table(self, length):
                if length > self.longest:
                    self.longest = length
                self.register_buffer("table", torch.arange(length).float().cos())

            def forward(self, x: torch.Tensor):
                if x.shape[1] > self.longest:
                    raise ValueError(f"at most {self.longest}")
                rows = [self.table]
                rows = torch.cat([*rows, x.flatten()])
                return x * self.table[: x.shape[1]] + rows.sum()
        """,
    )

    def visit_If(self, node: ast.If, context: Context) -> None:
        if not any(isinstance(part, ast.Compare) for part in ast.walk(node.test)):
            return
        around = module_class(node, context)
        if around is None or not context.in_step(node):
            return
        function = context.module.outermost_function(node)
        assert isinstance(function, FUNCTIONS)
        owner, state = self_name(function), class_state(around, context)
        if owner is None or is_set_up(function, state):
            return
        grown = grown_by(node, owner, state, context)
        if grown is not None:
            context.report(self, node, attribute=f"{owner}.{grown}")

    def visit_ClassDef(self, node: ast.ClassDef, context: Context) -> None:
        for write, _ in step_writes(node, context):
            if is_growing(write):
                context.report(self, write.node, attribute=f"self.{write.attribute}")
