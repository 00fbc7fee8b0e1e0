"""TPU511: a CUDA device written into the code."""

import ast

from tpuport.rules._device_uses import Use, device_use
from tpuport.rules._devices import AVAILABLE, is_guarded, severity
from tpuport.rules._rule import Example, Rule
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, Safety, Severity
from tpuport.source.text import Edit, Passage


class CudaDevice(Rule):
    """A CUDA device written into the code.

    ## What it does
    Finds `"cuda"` and `"cuda:0"` where they name the device that something is put on: in `.to`,
    `torch.device`, `device=`, `device_map=`, `map_location=`, in a variable or a parameter's
    default. The fix asks PyTorch whether there is CUDA, and takes the CPU if there is none:
    tensors made on the CPU join the program that is being traced.

    ## Why is this bad?
    A TPU machine has no CUDA: constructors, weight loading and eager PyTorch raise "Torch not
    compiled with CUDA enabled". Inside its environment torchax puts *new* tensors on its own device
    whatever the name says, but moving a traced tensor raises there, too.

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
                return x.to("cuda" if torch.cuda.is_available() else "cpu") + 1
            """,
            reference="""
            def forward(x):
                return x + 1
            """,
            jit_error="TracerArrayConversionError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, device: str | None = None):
                device = torch.device(device or 'cuda:0')
                ones = torch.ones(3, device="cuda")
                return x * torch.arange(3, device=device) + ones
            """,
            after="""
            import torch


            def forward(x: torch.Tensor, device: str | None = None):
                device = torch.device(device or ('cuda:0' if torch.cuda.is_available() else "cpu"))
                ones = torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")
                return x * torch.arange(3, device=device) + ones
            """,
            reference="""
            import torch


            def forward(x, device=None):
                return x * torch.arange(3) + torch.ones(3)
            """,
            inputs="(torch.randn(2, 3),)",
            jit_error=None,
            harm="needs_cuda",
        ),
        Example(
            before="""
            from torch import nn

            layer = nn.LayerNorm(4, device="cuda")


            def forward(x):
                return layer(x)
            """,
            after="""
            from torch import nn
            import torch

            layer = nn.LayerNorm(4, device="cuda" if torch.cuda.is_available() else "cpu")


            def forward(x):
                return layer(x)
            """,
            reference="""
            import torch
            from torch import nn

            layer = nn.LayerNorm(4)


            def forward(x):
                return layer(x)
            """,
            jit_error="AssertionError",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, device_type: str = "cpu"):
            \"\"\"Move the model with `model.to("cuda")` first.\"\"\"
            if x.device.type == "cuda" or "cuda" in str(x.device):
                x = x.to("cuda")
            assert x.device != torch.device("cuda"), "sent to device='cuda'"
            with torch.autocast("cuda", enabled=False):
                return x.float().to(x.device) + torch.ones_like(x)
        """,
        """
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        device_type = torch.device("cuda:0" if torch.cuda.is_available() else "cpu").type
        NAMES = {"cuda": "NVIDIA", "xpu": "Intel"}
        backends = ("cuda", "xpu")


        def supports(name):
            return name.startswith("cuda") and NAMES.get("cuda") is not None


        def make(args, parser):
            parser.add_argument("--device", default="cuda", help="cuda or cpu")
            kind = "cuda" if args.gpu else "cpu"
            return torch.zeros(3, device=kind)


        def place(model):
            if not torch.cuda.is_available():
                return model
            return model.to("cuda:0")
        """,
        """
        import torch

        AUTO = torch.get_autocast_dtype("cuda")


        class Loader:
            def pick(self, table):
                try:
                    return torch.zeros(1, device="cuda")
                except (RuntimeError, AssertionError):
                    return table["cuda"]
        """,
    )

    def visit_Constant(self, node: ast.Constant, context: Context) -> None:
        if isinstance(node.value, str) and node.value.startswith("cuda"):
            self._look(node, context)

    def visit_JoinedStr(self, node: ast.JoinedStr, context: Context) -> None:
        match node.values:
            case [ast.Constant(value="cuda:"), ast.FormattedValue()]:
                self._look(node, context)
            case _:
                pass

    def _look(self, node: ast.expr, context: Context) -> None:
        use = device_use(node, context)
        if use is not None and not is_guarded(node, context.module):
            found = severity(node, context, use.severity)
            context.report(self, node, device=node, severity=found)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        module, origin = context.module, context.module.origin(node)
        start, end = module.span(node)
        made = module.copy(start, end) + f' if {AVAILABLE} else "cpu"'
        if not isinstance(module.parents[node], Use.FREE_PARENTS):
            made = Passage.of("(", origin) + made + ")"
        return Fix((Edit(start, end, made),), ("torch",))
