"""TPU415: random numbers that Python draws while the program is traced."""

import ast

from tpuport.rules._randomness import drawn_at, draws_on_device, is_start
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context


class HostRandomness(Rule):
    """Random numbers that Python, NumPy or the CPU draws in a step.

    ## What it does
    Finds `random.*` and `numpy.random.*`, `torch.rand`, `randn` and `randint` without a device,
    and samples of `torch.distributions` with Python numbers as parameters, in the code of a step.
    Random operations on the device (`randn_like(x)`, `torch.rand(..., device=x.device)`) are a
    note.

    ## Why is this bad?
    The number is drawn while the program is traced and becomes a constant: every call sees the same
    noise, the same timesteps, the same dropped layers. Operations on the device draw new numbers
    only where the key is an argument of the program: `torchax.interop.jax_jit` and
    `tpuport.convert` do that, a bare `jax.jit` does not.

    ## Fix safety
    There is no automatic fix: other numbers change the result. Draw on the device of an input
    (`device=x.device`), or pass the numbers in as an argument.

    ## References
    https://docs.jax.dev/en/latest/random-numbers.html
    """

    CODE = "TPU415"
    MESSAGE = "`{call}` is drawn {where}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import random

            import torch


            def forward(x: torch.Tensor):
                return x * random.random()
            """,
            jit_error=None,
            harm="freezes",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            from torch.distributions import Beta


            def forward(x: torch.Tensor):
                noise = torch.randn(x.shape).to(x.device)
                t = Beta(1.5, 1.0).sample((x.shape[0],)).to(x.device)
                return x * t[:, None] + noise
            """,
            jit_error=None,
            harm="freezes",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Noise(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.times = torch.distributions.Beta(1.5, 1.0)

                def forward(self, x: torch.Tensor):
                    return x * self.times.sample((x.shape[0], 1)).to(x.device)


            forward = Noise()
            """,
            jit_error=None,
            harm="freezes",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import random

        import numpy as np
        import torch


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                random.seed(0)
                np.random.seed(0)
                self.table = torch.randn(4)
                self.noise = random.random() * np.random.rand()

            def forward(self, x: torch.Tensor):
                x = x[torch.randperm(len(x))] + torch.rand(4, device=x.device)
                return x + self.noise + torch.randn_like(x)
        """,
        """
        import torch
        from torch.distributions import Normal


        def forward(x: torch.Tensor, generator: torch.Generator):
            dist = Normal(x, torch.ones_like(x), validate_args=False)
            numbers = [x.sample for x in ()]
            return dist.rsample() + torch.zeros(4, device=x.device) * len(numbers)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        where = drawn_at(node, context)
        if where is None and not draws_on_device(node, context):
            return
        if not runs_in_step(node, context) or is_start(node, context):
            return
        if where is not None:
            text = "once, while the program is traced, and then stays"
            context.report(self, node, call=node, where=text)
        else:
            text = "from the device's key, which must be an argument of the program"
            context.report(self, node, severity=Severity.NOTE, call=node, where=text)
