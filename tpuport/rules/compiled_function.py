"""TPU517: a function compiled by torch.compile or TorchScript."""

import ast
import re

from tpuport.rules._devices import is_guarded
from tpuport.rules._rule import Example, Rule
from tpuport.rules._unwrapping import has_true, is_wrapping, without_wrapper
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_SCRIPT = ("torch.jit.script", "torch.jit.script_method")
_TRACE = ("torch.jit.trace", "torch.jit.trace_module")
# Words in a test that decides whether to compile.
ASKS = re.compile(r"compil|dynamo|inductor|cuda|gpu|available|script|trace", re.IGNORECASE)
_COMPILERS = frozenset({"compile", "script", "script_method", "trace", "trace_module"})


class CompiledFunction(Rule):
    """A function compiled by `torch.compile` or TorchScript.

    ## What it does
    Finds `torch.compile` as a decorator or a call, and `torch.jit.trace` in a step. The fix takes
    `torch.compile` away. `torch.jit.script` and compilation that a test chooses are noted.

    ## Why is this bad?
    `jax.jit` compiles the program. Under torchax `torch.compile` is skipped, and raises with
    `fullgraph=True`; outside, once torchax is imported, calling the function raises
    `InternalTorchDynamoError`, so the program can no longer be compared with eager PyTorch.

    ## Fix safety
    The function is the same; its compiled form may round differently, within 1e-5 in float32.
    There is no fix where the file looks for `_orig_mod`, the wrapped module of `torch.compile`.

    ## References
    https://pytorch.org/docs/stable/generated/torch.compile.html
    """

    CODE = "TPU517"
    MESSAGE = "`{code}`: {consequence}"
    SAFETY = Safety.close(1e-5)
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            from torch import compile


            @compile
            def forward(x):
                return x.sigmoid() * x
            """,
            after="""
            from torch import compile


            def forward(x):
                return x.sigmoid() * x
            """,
            reference="def forward(x): return x.sigmoid() * x",
            jit_error=None,
            harm="fails_beside_torchax",
        ),
        Example(
            before="""
            import torch


            relu, abs = torch.compile(torch.relu, mode="max-autotune"), torch.abs
            abs = torch.compile(abs)


            @torch.compile(
                fullgraph=True,
            )
            def double(x):
                return x * 2


            def forward(x: torch.Tensor):
                return double(relu(x)) + abs(x)
            """,
            after="""
            import torch


            relu, abs = torch.relu, torch.abs


            def double(x):
                return x * 2


            def forward(x: torch.Tensor):
                return double(relu(x)) + abs(x)
            """,
            reference="def forward(x): return x.relu() * 2 + x.abs()",
            jit_error="RuntimeError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return torch.jit.trace(lambda y: y.sin(), x)(x)
            """,
            left="not `torch.compile`",
            jit_error="RuntimeError",
        ),
    )
    CLEAN = (
        """
        import torch

        torch._dynamo.config.cache_size_limit = 64


        @torch.jit.ignore
        @torch.compiler.disable
        @torch._dynamo.disable(recursive=False)
        def forward(x: torch.Tensor):
            if torch.jit.is_scripting() or torch.compiler.is_compiling() or torch.jit.is_tracing():
                return x
            return x * 2


        def maybe(re, model, text, compile_model: bool):
            re.compile(text), compile(text, "a", "exec")
            return torch.compile(model) if compile_model else model
        """,
    )

    def visit_Attribute(self, node: ast.Attribute | ast.Name, context: Context) -> None:
        name = context.name(node) if _is_candidate(node, context) else None
        if name == "torch.compile" and is_wrapping(node, context):
            found, consequence = _fate(node, context)
        elif name in _SCRIPT:
            found, consequence = Severity.NOTE, "rewriting does not see the code inside"
        elif name in _TRACE:
            found = Severity.ERROR if context.in_step(node) else Severity.NOTE
            consequence = "tracing again inside a traced step raises"
        else:
            return
        context.report(self, node, code=node, consequence=consequence, severity=found)

    visit_Name = visit_Attribute

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.expr)
        if context.name(node) != "torch.compile":
            raise NotFixable("it is not `torch.compile`")
        if "_orig_mod" in context.module.text.text:
            raise NotFixable("the file looks for the wrapped module")
        if is_guarded(node, context.module, ASKS):
            raise NotFixable("a test chooses whether to compile")
        return without_wrapper(node, context)


def _is_candidate(node: ast.Attribute | ast.Name, context: Context) -> bool:
    """Return whether a name may be a compiler's: a quick look, as every name of a file is asked."""
    if isinstance(node, ast.Attribute):
        return node.attr in _COMPILERS
    full = context.module.imports.get(node.id)
    return full is not None and full.rpartition(".")[2] in _COMPILERS


def _fate(node: ast.expr, context: Context) -> tuple[Severity, str]:
    """Return the severity of a use of `torch.compile`, and what happens to it, in words."""
    if is_guarded(node, context.module, ASKS):
        return Severity.NOTE, "skipped under torchax"
    if has_true(context.module.parents[node], "fullgraph"):
        return Severity.ERROR, "under torchax `fullgraph=True` raises"
    return (
        Severity.SLOW,
        "skipped under torchax, and raises in eager PyTorch once torchax is imported",
    )
