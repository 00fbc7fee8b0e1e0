"""TPU413: state that a step leaves in `self`."""

import ast

from tpuport.rules._carrying import is_carried, is_state
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import class_state
from tpuport.rules._writing import step_writes
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context


class StateInForward(Rule):
    """State that one step leaves in `self` for the next.

    ## What it does
    Finds assignments of traced tensors to attributes of `self`, counters such as `self.calls += 1`,
    lists in `self` that take traced tensors, and updates of registered buffers, in the code of a
    step. Where an attribute is read only later in the same step, or not at all, it is a note: the
    value is right, but what stays in the attribute belongs to a finished trace.

    ## Why is this bad?
    Python runs while the program is traced and never again. A counter advances once, a running mean
    is computed from its first value in every call, and a tensor that is carried to the next call is
    a value of a finished trace. No error is raised at the write.

    ## Fix safety
    There is no automatic fix: state has to enter the step as an argument and leave it as a result.
    Registered buffers need no change, if the caller passes in and takes out those that
    `functional_call` changes (`tpuport.convert` does).

    ## References
    https://docs.jax.dev/en/latest/stateful-computations.html
    """

    CODE = "TPU413"
    MESSAGE = "`{attribute}` is state that the step leaves behind: a program does not advance it"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            class Warm(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.calls = 0

                def forward(self, x: torch.Tensor):
                    self.calls += 1
                    return x * min(self.calls / 10, 1.0)


            forward = Warm()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Smooth(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("mean", torch.zeros(4))

                def forward(self, x: torch.Tensor):
                    self.mean.mul_(0.9).add_(0.1 * x.mean(0))
                    return x - self.mean


            forward = Smooth()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Recurrent(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.last = None

                def forward(self, x: torch.Tensor):
                    moved = x if self.last is None else x - self.last
                    self.last = x * 2
                    return moved


            forward = Recurrent()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.width = 4
                self.calls = 0
                self.table = torch.nn.Buffer(torch.ones(4))

            def set_width(self, width):
                self.width = width

            def forward(self, x: torch.Tensor):
                self.height = x.shape[0]
                self.gradient_checkpointing = False
                self.width = self.width.to(x.device)
                table = self.table
                if table.device != x.device:
                    self.table = table = table.to(x.device)
                calls = self.calls + 1
                last = x.clone()
                last.mul_(2)
                return x * self.width + self.height + calls + last + table
        """,
        """
        import torch


        class Counter:
            def __init__(self):
                self.calls = 0

            def tick(self, x: torch.Tensor):
                self.calls += 1
                self.last = x.abs()
                return self.last
        """,
    )

    def visit_ClassDef(self, node: ast.ClassDef, context: Context) -> None:
        for write, way in step_writes(node, context):
            if way == "plain" and is_state(write, class_state(node, context), context):
                carried = is_carried(write, class_state(node, context), context)
                severity = Severity.SILENT if carried else Severity.NOTE
                attribute = f"self.{write.attribute}"
                context.report(self, write.node, severity=severity, attribute=attribute)
