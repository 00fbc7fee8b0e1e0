"""TPU414: an attribute that the first step fills."""

import ast

from tpuport.rules._placing import made_on_device
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import Write
from tpuport.rules._writing import step_writes
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context


class LazyState(Rule):
    """An attribute that a step fills when it is still missing.

    ## What it does
    Finds `if self.x is None: self.x = f(...)` and its like (`not hasattr(self, "x")`, a flag such
    as `self.ready`, `register_buffer("x", None)` filled later) in a step, where the value depends
    on the step's input or is made on its device.

    ## Why is this bad?
    Eager PyTorch takes the value from the first batch and keeps it. A program is traced once, with
    the attribute missing: it silently derives the value from every batch again. The attribute keeps
    a value of the trace, and the next trace, for another batch size, fails with
    `UnexpectedTracerError`.

    ## Fix safety
    There is no automatic fix: the value has to be known before the program is traced. Calibrate,
    then freeze: a first pass over several batches returns the statistics as outputs, a buffer gets
    their value once, on the host, and the step only reads it. A `register_buffer("x", None)` that
    is not filled by then is in no `state_dict` and so in no file. `tpuport.quantize` does this for
    the scales of quantized layers. A value that needs no input is made in `__init__`.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.UnexpectedTracerError
    """

    CODE = "TPU414"
    MESSAGE = "`{attribute}` is filled by the first call: a program computes it again in every call"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            class Scaled(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("scale", None)

                def forward(self, x: torch.Tensor):
                    if self.scale is None:
                        self.scale = x.abs().max()
                    return x / self.scale


            forward = Scaled()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Table(torch.nn.Module):
                def forward(self, x: torch.Tensor):
                    if not hasattr(self, "table"):
                        self.table = torch.arange(x.shape[1], device=x.device)
                    return x * self.table


            forward = Table()
            """,
            jit_error=None,
            harm="leaks",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Rounded(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("scale", None)
                    self.has_scale = False

                def forward(self, x: torch.Tensor):
                    if not self.has_scale:
                        self.scale = x.detach().abs().amax() / 127
                        self.has_scale = True
                    return torch.round(x / self.scale) * self.scale


            forward = Rounded()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        class Rounded(torch.nn.Module):
            def __init__(self, batches: list[torch.Tensor]):
                super().__init__()
                peaks = [x.abs().amax() for x in batches]
                self.register_buffer("scale", torch.stack(peaks).amax() / 127)

            def forward(self, x: torch.Tensor):
                return torch.round(x / self.scale) * self.scale
        """,
        """
        import torch


        class Scaled(torch.nn.Module):
            def __init__(self, scale: float | None = None):
                super().__init__()
                self.scale = scale
                self.width = None
                if self.scale is None:
                    self.scale = torch.ones(()).item()

            def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None):
                if mask is None:
                    mask = torch.ones_like(x)
                if self.width is None:
                    self.width = x.shape[1]
                return x * mask * self.scale / self.width
        """,
        """
        import torch


        class Table(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = None

            def forward(self, x: torch.Tensor):
                if self.table is None:
                    table = torch.arange(x.shape[1], device=x.device)
                else:
                    table = self.table
                return x * table
        """,
    )

    def visit_ClassDef(self, node: ast.ClassDef, context: Context) -> None:
        for write, way in step_writes(node, context):
            if way == "lazy" and _is_of_step(write, context):
                context.report(self, write.node, attribute=f"self.{write.attribute}")


def _is_of_step(write: Write, context: Context) -> bool:
    """Return whether a written value belongs to the trace."""
    value = write.value
    return value is not None and (context.is_traced(value) or made_on_device(value, context))
