"""TPU704: a value read in each step of torch_xla's device."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import uses_torch_xla
from tpuport.rules._torch_xla_steps import ends_with, is_every_step
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context


class ItemInLazyStep(Rule):
    """A value that each step of a training loop reads from torch_xla's device.

    ## What it does
    Finds `.item()` in a function for `torch_xla.compile`, in `with torch_xla.step()` and in loops
    over `MpDeviceLoader` or `ParallelLoader`, unless a test decides when it runs.

    ## Why is this bad?
    The host waits for the device in each step and cannot prepare the next one; torch_xla also cuts
    the step's graph there. Read values every few steps, or keep sums on the device. The metrics of
    a step of `tpuport.training` wait only when one is read.

    ## Fix safety
    There is no fix: when the value is needed is for the author to say.

    ## References
    https://docs.pytorch.org/xla/master/learn/troubleshoot.html
    """

    CODE = "TPU704"
    MESSAGE = "`{call}` waits for the device in each step"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch_xla.distributed.parallel_loader as pl


            def run(loader, model, device):
                total = 0.0
                for x in pl.MpDeviceLoader(loader, device):
                    loss = model(x)
                    loss.backward()
                    total += loss.item()
                return total


            def forward(x):
                return x
            """,
            jit_error="ModuleNotFoundError",
            left="when it is needed",
        ),
        Example(
            before="""
            import torch_xla


            def measured(model, x):
                return model(x).sum().item()


            def forward(x):
                return x


            measured = torch_xla.compile(measured)
            """,
            jit_error="ModuleNotFoundError",
            left="when it is needed",
        ),
    )
    CLEAN = (
        """
        import torch_xla
        import torch_xla.distributed.parallel_loader as pl


        def run(loader, model, device):
            total = 0
            for number, x in enumerate(pl.MpDeviceLoader(loader, device)):
                error = model(x)
                error.backward()
                total += error.detach()
                if number % 100 == 0:
                    print(error.item())
            return total.item()
        """,
        """
        import numpy as np
        import torch_xla


        def lengths(loader):
            return [np.sum(x).item() for x in loader]
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if node.args or not ends_with(node.func, "item") or not uses_torch_xla(context):
            return
        if is_every_step(node, context):
            context.report(self, node, call=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("only the author knows when it is needed")
