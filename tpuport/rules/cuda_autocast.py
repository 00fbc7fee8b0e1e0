"""TPU513: mixed precision that is on only with CUDA."""

import ast

from tpuport.rules._devices import AVAILABLE, is_guarded, is_half_guarded, refuse_guarded
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_GENERAL = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
_CUDA = ("torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast")
_SCALERS = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler")


class CudaAutocast(Rule):
    """Mixed precision that is on only with CUDA.

    ## What it does
    Finds `torch.autocast("cuda", ...)` and `torch.cuda.amp.autocast(...)`, except with
    `enabled=False`, and notes gradient scalers. The fix, which has to be asked for, names the CPU
    where there is no CUDA: a ported program then has the dtypes that autocast gives there.

    ## Why is this bad?
    Without CUDA PyTorch turns the region off with a warning. What was computed in half precision is
    then computed in the dtype of its operands: slower and in twice the memory, or, where the region
    asks for float32 and the weights are bfloat16, less exactly. Where the region was what made
    dtypes agree, torchax silently promotes.

    ## Fix safety
    With CUDA nothing changes. Without it results become those of autocast, as the fix intends;
    where no dtype is named, in bfloat16 instead of float16. Plain torchax ignores autocast.

    ## References
    https://pytorch.org/docs/stable/amp.html
    """

    CODE = "TPU513"
    MESSAGE = "`{call}` is on only with CUDA: without it the dtypes here differ"
    SAFETY = Safety.UNSAFE
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch

            DTYPE = torch.bfloat16


            def forward(x: torch.Tensor, on: bool = True):
                with torch.autocast("cuda", DTYPE, on):
                    y = x @ x.transpose(-1, -2)
                with torch.autocast(device_type="cuda"):
                    return y + x @ x.transpose(-1, -2)
            """,
            after="""
            import torch

            DTYPE = torch.bfloat16


            def forward(x: torch.Tensor, on: bool = True):
                with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", DTYPE, on):
                    y = x @ x.transpose(-1, -2)
                with torch.autocast(device_type="cuda" if torch.cuda.is_available() else "cpu"):
                    return y + x @ x.transpose(-1, -2)
            """,
            reference="""
            import torch


            def forward(x: torch.Tensor, on: bool = True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                    y = x @ x.transpose(-1, -2)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return y + x @ x.transpose(-1, -2)
            """,
            jit_error=None,
            harm="ignores_autocast",
            plain_harm="ignores_autocast",
        ),
        Example(
            before="""
            import torch
            from torch.cuda.amp import autocast


            def forward(x: torch.Tensor):
                with autocast(dtype=torch.bfloat16):
                    return x @ x.transpose(-1, -2)
            """,
            left="`torch.cuda.amp.autocast` takes no device",
            jit_error=None,
            harm="ignores_autocast",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, t: torch.Tensor):
            with torch.amp.autocast("cuda", enabled=False):
                y = t.float() * 2
            with torch.autocast(device_type=x.device.type, dtype=torch.float32):
                y = y + x
            if torch.is_autocast_enabled() and x.dtype != torch.get_autocast_dtype("cuda"):
                y = y.to(torch.get_autocast_gpu_dtype())
            return y
        """,
        """
        import torch


        def forward(x: torch.Tensor):
            region = torch.autocast("cuda") if torch.cuda.is_available() else torch.no_grad()
            with region, torch.autocast(x.device.type, enabled=False):
                return x + 1
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = context.name(node.func)
        if name is None or not _is_on(node):
            return
        if name == "functools.partial" and node.args and context.name(node.args[0]) in _CUDA:
            context.report(self, node, call=node)
        if name in _SCALERS:
            context.report(self, node, call=node, severity=Severity.DEVICE)
        elif name in _CUDA or (name in _GENERAL and _device(node) is not None):
            if not is_guarded(node, context.module):
                context.report(self, node, call=node)
            elif is_half_guarded(node, context.module):
                context.report(self, node, call=node, severity=Severity.DEVICE)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        refuse_guarded(node, context.module)
        if context.name(node.func) == "functools.partial":
            raise NotFixable("it is made here and used elsewhere")
        if context.name(node.func) in _SCALERS:
            raise NotFixable("without CUDA a scaler does nothing")
        device = _device(node)
        if device is None:
            raise NotFixable("`torch.cuda.amp.autocast` takes no device: use `torch.autocast`")
        _, end = context.module.span(device)
        choice = Passage.of(f' if {AVAILABLE} else "cpu"', context.module.origin(device))
        return Fix((Edit(end, end, choice),), ("torch",))


def _is_on(call: ast.Call) -> bool:
    return not any(
        keyword.arg == "enabled"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
        for keyword in call.keywords
    )


def _device(call: ast.Call) -> ast.Constant | None:
    """Return the constant `"cuda"` that a call of `torch.autocast` takes as its device."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "device_type"]
    for value in [*call.args[:1], *named]:
        if isinstance(value, ast.Constant) and value.value == "cuda":
            return value
    return None
