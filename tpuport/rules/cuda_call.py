"""TPU510: a tensor or module sent to CUDA with `.cuda()`."""

import ast

from tpuport.rules._devices import (
    is_guarded,
    is_half_guarded,
    refuse_guarded,
    severity_anywhere,
    within,
)
from tpuport.rules._expressions import OPS
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.statements import is_ops_call
from tpuport.source.syntax.text import Edit, Passage


class CudaCall(Rule):
    """A tensor or module sent to CUDA with `.cuda()`.

    ## What it does
    Finds calls of `.cuda()` that no test for CUDA guards. The fix calls `tpuport.ops.cuda`, which
    calls `.cuda()` where PyTorch has CUDA and returns the value itself elsewhere.

    ## Why is this bad?
    A TPU machine has no CUDA, and torchax does not redirect the call: it raises "Torch not compiled
    with CUDA enabled", in a constructor as well as in a traced step.

    ## Fix safety
    The fix is exact: with CUDA the very same method is called with the same arguments, so a class
    with a `cuda` of its own keeps it. Without CUDA the original raises. A class method that only
    passes the call on, and a call guarded by `torch.cuda.is_available()`, are left alone.

    ## References
    https://pytorch.org/docs/stable/generated/torch.Tensor.cuda.html
    """

    CODE = "TPU510"
    MESSAGE = "`{call}` needs CUDA, which a TPU machine does not have"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, scale: torch.Tensor):
                return x.cuda() * scale.sum().cuda(non_blocking=True)
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, scale: torch.Tensor):
                return tpuport.ops.cuda(x) * tpuport.ops.cuda(scale.sum(), non_blocking=True)
            """,
            reference="def forward(x, scale): return x * scale.sum()",
            inputs="(torch.randn(3, 4), torch.randn(3, 4))",
            jit_error="AssertionError",
        ),
        Example(
            before="""
            from torch import nn

            model = nn.ReLU().cuda(0)
            model.cuda()


            def forward(x):
                return model((
                    x
                    .abs()
                ).cuda() - 1)
            """,
            after="""
            from torch import nn
            import tpuport.ops

            model = tpuport.ops.cuda(nn.ReLU(), 0)
            tpuport.ops.cuda(model)


            def forward(x):
                return model(tpuport.ops.cuda((
                    x
                    .abs()
                )) - 1)
            """,
            reference="def forward(x): return (x.abs() - 1).relu()",
            jit_error="AssertionError",
        ),
    )
    CLEAN = (
        """
        import torch
        from numba import cuda


        def forward(x: torch.Tensor, use_cuda: bool = False):
            if torch.cuda.is_available():
                x = x.cuda()
            return x.cuda() if use_cuda else x


        class Rotation:
            def __init__(self, matrix, quantizer, gpu=None):
                self.matrix = matrix if gpu is None else matrix.cuda(gpu)
                self.quantizer = quantizer

            def cuda(self):
                return Rotation(self.matrix.cuda(), self.quantizer)

            def dequantize(self, x, meta):
                self.quantizer.cuda(x, meta=meta, device=x.device)
                return torch.cuda.is_available() and x.cuda()

            def place(self, *args):
                if not torch.cuda.is_available():
                    return self
                return self.matrix.cuda(*args)

            def to_gpu(self):
                require_cuda()
                return self.matrix.cuda()


        def load(model, stream):
            '''`load(model).cuda()` puts it on a GPU.'''
            return model, cuda.jit(stream.cuda)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "cuda":
            return
        receiver = node.func.value
        if not _is_move(node) or is_ops_call(node) or context.name(receiver) is not None:
            return
        if within(node, context.module, "cuda"):
            return
        if not is_guarded(node, context.module):
            context.report(self, node, call=node, severity=severity_anywhere(node, context))
        elif is_half_guarded(node, context.module):
            context.report(self, node, call=node, severity=Severity.DEVICE)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        refuse_guarded(node, context.module)
        module, origin = context.module, context.module.origin(node)
        start, name_end = module.span(node.func)
        text = module.text.text
        dot = text.rindex(".", start, name_end)
        opening = module.token_after(name_end, "(")
        if module.comments(dot, opening):
            raise NotFixable("there is a comment between the value and the call")
        gap = ", " if node.args or node.keywords else ""
        call = Edit(start, start, Passage.of(f"{OPS}.cuda(", origin))
        return Fix((call, Edit(dot, opening + 1, Passage.of(gap, origin))), (OPS,))


def _is_move(node: ast.Call) -> bool:
    """Return whether a call has the arguments of `.cuda()` of tensors and modules."""
    named = {keyword.arg for keyword in node.keywords}
    return len(node.args) <= 1 and named <= {"device", "non_blocking", "memory_format"}
