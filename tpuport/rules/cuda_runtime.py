"""TPU512: a call of PyTorch's CUDA runtime."""

import ast

from tpuport.rules._cuda_facts import CUDA_ACTIONS, CUDA_VALUES
from tpuport.rules._devices import (
    ASKS_STREAMS,
    AVAILABLE,
    insists_on_cuda,
    is_guarded,
    is_half_guarded,
    refuse_guarded,
    severity_anywhere,
)
from tpuport.rules._groups import deals_with_groups
from tpuport.rules._guarding import guarded_statement
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context


class CudaRuntime(Rule):
    """A call of PyTorch's CUDA runtime that raises without CUDA.

    ## What it does
    Finds calls such as `torch.cuda.synchronize()`, `torch.cuda.set_device(0)`, `torch.cuda.Event()`
    and `torch.cuda.get_device_properties(0)` that no test for CUDA guards. The fix puts
    `if torch.cuda.is_available():` before a statement that only acts; a call whose value is used
    stays, and so does `assert torch.cuda.is_available()`, which is also found, as is
    `assert x.is_cuda`. Calls that PyTorch
    answers without CUDA are not found.

    ## Why is this bad?
    On a TPU machine PyTorch has no CUDA, so the call raises. Inside a traced step it would be
    wrong in any case: it would run while the program is traced and never again. To wait for a
    result use `jax.block_until_ready`, to profile `jax.profiler`.

    ## Fix safety
    The fix is exact: with CUDA the same call is made, and without it the original raises.

    ## References
    https://pytorch.org/docs/stable/cuda.html
    """

    CODE = "TPU512"
    MESSAGE = "`{call}` needs CUDA, which a TPU machine does not have"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x * 2
                torch.cuda.synchronize()
                for _ in range(2):
                    torch.cuda.set_device(
                        0
                    )  # the first
                return y
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                y = x * 2
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                for _ in range(2):
                    if torch.cuda.is_available():
                        torch.cuda.set_device(
                            0
                        )  # the first
                return y
            """,
            reference="def forward(x): return x * 2",
            jit_error="AssertionError",
        ),
        Example(
            before="""
            from torch import cuda

            def forward(x):
                with cuda.device(0):
                    return x + 1
            """,
            jit_error="RuntimeError",
            left="its value is used",
        ),
        Example(
            before="""
            import torch

            def forward(x):
                assert torch.cuda.is_available(), "needs a GPU"
                return x + 1
            """,
            jit_error="AssertionError",
            left="only the author knows whether the code needs a GPU",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor):
            torch.cuda.empty_cache()
            scale = 1 + torch.cuda.device_count() + torch.cuda.max_memory_allocated()
            if x.is_cuda and torch.cuda.current_stream() is not None:
                torch.cuda.synchronize()
            return x * scale
        """,
        """
        import torch


        def memory(device=None):
            if not torch.cuda.is_available():
                return 0
            device = device if device is not None else torch.cuda.current_device()
            return torch.cuda.get_device_properties(device).total_memory


        def wait(device: torch.device):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        def start():
            try:
                return torch.cuda.Event(enable_timing=True)
            except RuntimeError:
                return None
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        package, _, name = (context.name(node.func) or "").partition("torch.cuda.")
        if package or name not in CUDA_ACTIONS | CUDA_VALUES:
            return
        if name == "device" and not isinstance(context.module.parents[node], ast.withitem):
            return  # only entering it raises
        if not is_guarded(node, context.module, ASKS_STREAMS):
            chosen = deals_with_groups(node, context.module)
            found = Severity.DEVICE if chosen else severity_anywhere(node, context)
            context.report(self, node, call=node, severity=found)
        elif is_half_guarded(node, context.module):
            context.report(self, node, call=node, severity=Severity.DEVICE)

    def visit_Assert(self, node: ast.Assert, context: Context) -> None:
        if insists_on_cuda(node, context):
            off_tpu = context.is_off_tpu(node)
            found = Severity.DEVICE if off_tpu else severity_anywhere(node, context)
            context.report(self, node, call=node.test, severity=found)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if isinstance(node, ast.Assert):
            raise NotFixable("only the author knows whether the code needs a GPU")
        refuse_guarded(node, context.module, ASKS_STREAMS)
        statement = context.module.parents[node]
        if not isinstance(statement, ast.Expr):
            raise NotFixable("its value is used")
        return guarded_statement(statement, AVAILABLE, context, imports=("torch",))
