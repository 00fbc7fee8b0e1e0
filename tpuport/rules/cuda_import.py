"""TPU514: an import of a package that needs CUDA."""

import ast
import re
from pathlib import PurePath

from tpuport.rules._devices import is_aside, is_guarded
from tpuport.rules._rule import Example, Rule
from tpuport.source.inference.gpu_only import CUDA_PACKAGES
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Function, Module

# At the top of a file any test is taken for one that asks whether the package is there.
_ANY = re.compile("")
_ASKS_PACKAGE = re.compile(
    r"available|installed|has_|_found|find_spec|import|supported|version|cuda|gpu|nvidia|TYPE_CHECK",
    re.IGNORECASE,
)


class CudaImport(Rule):
    """An import of a package that needs CUDA.

    ## What it does
    Finds imports of packages such as flash_attn, xformers, triton, apex, deepspeed and bitsandbytes
    at the top of a file or class, and in a constructor or `forward`, where nothing catches the
    error or asks first. An import in any other function, or only for a flag or setting, is host
    code: that setting does not work on a TPU machine. So is one whose handler raises in turn,
    unless the function does nothing else.

    ## Why is this bad?
    The packages hold kernels for NVIDIA GPUs. On a TPU machine they are not installed, so the file
    cannot be imported, and with it nothing that imports it.

    ## Fix safety
    There is no fix: what takes the package's place is a decision. For attention it is
    `torch.nn.functional.scaled_dot_product_attention`, for fused norms and optimizers the plain
    ones, for sharding `tpuport.shard`. An import that only some configurations need belongs in
    `try: ... except ImportError:`.

    ## References
    https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """

    CODE = "TPU514"
    MESSAGE = "`{package}` needs CUDA: on a TPU machine this import fails"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch
            from flash_attn.bert_padding import pad_input


            def forward(x: torch.Tensor):
                return pad_input(x)
            """,
            jit_error="ModuleNotFoundError",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch

            try:
                from apex.normalization import FusedRMSNorm
            except ImportError as error:
                raise RuntimeError("Please install apex") from error


            def forward(x: torch.Tensor):
                return FusedRMSNorm(4)(x)
            """,
            jit_error="RuntimeError",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                import xformers.ops as xops

                return xops.memory_efficient_attention(x, x, x)
            """,
            jit_error="ModuleNotFoundError",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        from typing import TYPE_CHECKING

        import torch
        from transformers.utils import is_flash_attn_2_available
        from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

        from .triton import kernel
        from .apex.layers import Norm

        if TYPE_CHECKING:
            import deepspeed

        if is_flash_attn_2_available():
            from flash_attn import flash_attn_func

        try:
            import xformers.ops as xops
        except ImportError:
            xops = None
        else:
            import triton

        try:
            from apex.normalization import FusedRMSNorm
        except:
            pass


        def forward(x: torch.Tensor, kind: str = "plain"):
            if kind == "sage":
                from sageattention import sageattn

                return sageattn(x, x, x)
            return x
        """,
        """
        import torch


        class Model(torch.nn.Module):
            def __init__(self, quantize: bool = False):
                super().__init__()
                if quantize:
                    import bitsandbytes as bnb

                    self.layer = bnb.nn.Linear8bitLt(4, 4)

            def load_8bit(self):
                import bitsandbytes as bnb

                return bnb.nn.Linear8bitLt(4, 4)


        def import_flash_attn():
            global flash_attn_func
            try:
                from flash_attn import flash_attn_func
            except ImportError:
                raise ImportError("Please install flash_attn")
        """,
    )

    def visit_Import(self, node: ast.Import, context: Context) -> None:
        self._look(node, [alias.name for alias in node.names], context)

    def visit_ImportFrom(self, node: ast.ImportFrom, context: Context) -> None:
        if node.level == 0 and node.module is not None:
            self._look(node, [node.module], context)

    def _look(self, node: ast.stmt, names: list[str], context: Context) -> None:
        own = {*PurePath(context.module.file).parts, *context.own}  # a package may import itself
        roots = [name.partition(".")[0] for name in names]
        packages = [root for root in roots if root in CUDA_PACKAGES and root not in own]
        if not packages:
            return
        function = context.module.function(node)
        chosen = is_guarded(node, context.module, _ANY)
        if chosen and (function is None or is_guarded(node, context.module, _ASKS_PACKAGE)):
            return
        around = [one for one in context.module.ancestors(node) if isinstance(one, ast.Try)]
        if any(not _raises(one) for one in around):
            return
        if around and function is not None and function.body[-1] is around[-1]:
            return  # it only imports: its callers ask first
        # Not by role: code that uses a package of kernels is taken for code that no TPU runs.
        lazy = bool(chosen or around) or (
            function is not None and not _is_entry(function, context.module)
        )
        reached = Severity.DEVICE if lazy or is_aside(node, context.module) else Severity.ERROR
        context.report(self, node, package=packages[0], severity=reached)


def _raises(around: ast.Try) -> bool:
    """Return whether a `try` goes on only if the import in it succeeds."""
    ends = [handler.body[-1] for handler in around.handlers]
    return bool(ends) and all(isinstance(end, ast.Raise) for end in ends)


def _is_entry(function: Function, module: Module) -> bool:
    """Return whether every use of a file's class runs a function: a constructor or `forward`."""
    outer = module.outermost_function(function)
    return function is outer and function.name in {"__init__", "forward"}
