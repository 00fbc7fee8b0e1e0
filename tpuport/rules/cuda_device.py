"""TPU511: a CUDA device written into the code."""

import ast

from tpuport.rules._device_uses import choice, default_passed_on, device_use, is_device_name
from tpuport.rules._devices import is_guarded, severity_anywhere
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context


class CudaDevice(Rule):
    """A CUDA device written into the code.

    ## What it does
    Finds `"cuda"` and `"cuda:0"` where they name a device to put things on: in `.to`, `device=`,
    `map_location=`, a variable or a parameter's default. The fix asks PyTorch whether there is
    CUDA and takes the CPU if not, or the device that a traced tensor is on.

    ## Why is this bad?
    A TPU machine has no CUDA: constructors, weight loading and eager PyTorch raise. Inside its
    environment torchax puts *new* tensors on its own device whatever the name says, but moving a
    traced tensor raises there, too.

    ## Fix safety
    The fix is exact: with CUDA the same name is used. Without it the original raises, or reads
    weights on the CPU where that is the default.

    ## References
    https://pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code
    """

    CODE = "TPU511"
    MESSAGE = "{device} names a device that a TPU machine does not have"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x.to("cuda") + 1
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                return x.to("cuda" if torch.cuda.is_available() else x.device) + 1
            """,
            reference="def forward(x): return x + 1",
            jit_error="TracerArrayConversionError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, name: str | None = None):
                device = torch.device(name or 'cuda:0')
                return x * torch.ones((), device=device) + x.new_ones(())
            """,
            after="""
            import torch


            def forward(x: torch.Tensor, name: str | None = None):
                device = torch.device(name or ('cuda:0' if torch.cuda.is_available() else "cpu"))
                return x * torch.ones((), device=device) + x.new_ones(())
            """,
            reference="def forward(x): return x * 1.0 + 1",
            jit_error=None,
            harm="needs_cuda",
        ),
        Example(
            before="""
            from torch import nn


            class Shift(nn.Linear):
                def __init__(self, device: str = "cuda"):
                    super().__init__(4, 4)
                    self.to(device)


            shift = Shift().bias.new_zeros(())


            def forward(x):
                return x + shift
            """,
            after="""
            from torch import nn
            import torch


            class Shift(nn.Linear):
                def __init__(self, device: str = "cuda" if torch.cuda.is_available() else "cpu"):
                    super().__init__(4, 4)
                    self.to(device)


            shift = Shift().bias.new_zeros(())


            def forward(x):
                return x + shift
            """,
            reference="def forward(x): return x + 0.0",
            jit_error="AssertionError",
        ),
    )
    CLEAN = (
        """
        import torch

        NAMES = {"cuda": "NVIDIA", "xpu": "Intel"}


        def make(args, parser):
            parser.add_argument("--device", default="cuda", help="cuda or cpu")
            kind = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
            return torch.zeros(3, device="cuda" if args.gpu else kind), NAMES["cuda"]


        def place(model):
            '''Move the model with `model.to("cuda")`.'''
            if not torch.cuda.is_available():
                return model, torch.get_autocast_dtype("cuda")
            return model.to("cuda:0"), torch.autocast("cuda", enabled=False)


        def forward(x: torch.Tensor, device_type: str = "cpu"):
            if x.device.type.startswith("cuda") or "cuda" in str(x.device):
                x = x.to("cuda")
            assert x.device != torch.device("cuda"), "sent to device='cuda'"
            return x.float().to(x.device) + torch.ones_like(x)
        """,
    )

    def visit_Constant(self, node: ast.Constant | ast.JoinedStr, context: Context) -> None:
        use = device_use(node, context) if is_device_name(node) else None
        if use is not None and not is_guarded(node, context.module):
            context.report(self, node, device=node, severity=severity_anywhere(node, context, use))

    visit_JoinedStr = visit_Constant

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        argument = default_passed_on(node, context)
        if argument is not None and not is_guarded(node, context.module):
            name = context.module.source(argument)
            context.report(self, argument, device=f'`{name}`, "cuda" if left out,')

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if not isinstance(node, ast.Constant | ast.JoinedStr):
            raise NotFixable("the parameter's default is rewritten instead")
        return Fix((choice(node, context),), ("torch",))
