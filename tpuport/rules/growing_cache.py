"""TPU412: a cache in `self` that a step makes longer."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._guards import is_growing, may_compare_sizes
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import class_state, is_set_up, module_class, self_name
from tpuport.rules._writing import grown_by, step_writes
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS
from tpuport.source.syntax.statements import is_ops_call
from tpuport.source.syntax.text import Edit, Passage


class GrowingCache(Rule):
    """A table or cache in `self` that a step replaces by a longer one.

    ## What it does
    Finds code of a step that makes an attribute longer: `self.cache = torch.cat([self.cache, x])`,
    and branches such as `if length > self.max_cached: self._set_table(length)`, whose body writes
    the attribute that its test compares a size with. Where that test is traced, the fix asks
    `tpuport.ops.grows(...)`, which in a program of torchax alone is false.

    ## Why is this bad?
    The branch is decided while the program is traced, not when it runs. A registered buffer is
    restored after the trace, but a length that is kept next to it is not: the next trace believes
    that the table is long enough and reads past its end. An attribute that is no buffer keeps a
    value of a finished trace, and the next trace fails with `UnexpectedTracerError`.

    ## Fix safety
    Exact in eager PyTorch. A program cannot make the table longer: build it in `__init__` for the
    longest input, and look for shorter ones with `tpuport.ops.debug_checks`. A cache of all that
    came before has no fix: pass it in and out of the step as a tensor of fixed size.

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
                    self.register_buffer("table", torch.arange(8).cos())

                def forward(self, x: torch.Tensor):
                    return x * self.rows(torch.arange(x.shape[1], device=x.device))

                def rows(self, places: torch.Tensor):
                    if places.max() >= len(self.table):
                        self.table = torch.arange(int(places.max()) + 1).cos()
                    return self.table[places]


            forward = Rope()
            """,
            after="""
            import torch
            import tpuport.ops


            class Rope(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("table", torch.arange(8).cos())

                def forward(self, x: torch.Tensor):
                    return x * self.rows(torch.arange(x.shape[1], device=x.device))

                def rows(self, places: torch.Tensor):
                    if tpuport.ops.grows(places.max() >= len(self.table)):
                        self.table = torch.arange(tpuport.ops.to_int(places.max()) + 1).cos()
                    return self.table[places]


            forward = Rope()
            """,
        ),
        Example(
            before="""
            import torch


            class Rope(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self._set_table(2)

                def _set_table(self, length, device=None):
                    self.length = length
                    self.register_buffer("table", torch.arange(length, device=device).cos())

                def forward(self, x: torch.Tensor):
                    if x.shape[1] > self.length:
                        self._set_table(x.shape[1], x.device)
                    return x * self.table[torch.arange(x.shape[1], device=x.device)]


            forward = Rope()
            """,
            jit_error=None,
            harm="second_trace_differs",
            left="only a comparison of traced values",
        ),
    )
    CLEAN = (
        """
        import torch

        class Rope(torch.nn.Module):
            def __init__(self, longest: int = 8):
                super().__init__()
                self.longest, self.table = longest, torch.nn.Buffer(torch.rand(longest))

            def forward(self, x: torch.Tensor):
                if x.shape[1] > self.longest:
                    raise ValueError(f"at most {self.longest}")
                return x * torch.cat([self.table, x.flatten()])[: x.shape[1]]
        """,
    )

    def visit_If(self, node: ast.If, context: Context) -> None:
        compares = may_compare_sizes(node.test) and not is_ops_call(node.test)
        around = module_class(node, context) if compares else None
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

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if not isinstance(node, ast.If):
            raise NotFixable("this rule has no automatic fix")
        test, origin = node.test, context.module.origin(node)
        if not isinstance(test, ast.Compare) or len(test.ops) > 1 or not context.is_traced(test):
            raise NotFixable("only a comparison of traced values can be answered for the program")
        opening, closing = Passage.of(f"{OPS}.grows(", origin), Passage.of(")", origin)
        start, end = context.module.span(test)
        return Fix((Edit(start, start, opening), Edit(end, end, closing)), (OPS,))
