"""TPU517: a function compiled by torch.compile or TorchScript."""

import ast
import re

from tpuport.rules._devices import is_guarded
from tpuport.rules._rule import Example, Rule
from tpuport.rules._unwrapping import unwrapped_call, without_decorator
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, NotFixable, Safety, Severity

_ASKS = re.compile(r"compil|dynamo|inductor|cuda|gpu|available|script|trace", re.IGNORECASE)
_SCRIPT = ("torch.jit.script", "torch.jit.script_method")
_TRACE = ("torch.jit.trace", "torch.jit.trace_module")


class CompiledFunction(Rule):
    """A function compiled by `torch.compile` or TorchScript.

    ## What it does
    Finds `torch.compile` as a decorator or a call, and `torch.jit.trace` in a step. The fix takes
    `torch.compile` away. `torch.jit.script` and compilation that a test chooses are noted.

    ## Why is this bad?
    `jax.jit` compiles the program. Under torchax `torch.compile` is skipped, and raises with
    `fullgraph=True`; outside, once torchax is imported, calling the function raises
    `InternalTorchDynamoError`, so that eager PyTorch can no longer be compared with.

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
            import torch


            @torch.compile
            def act(x):
                return x.sigmoid() * x


            def forward(x: torch.Tensor):
                return act(x)
            """,
            after="""
            import torch


            def act(x):
                return x.sigmoid() * x


            def forward(x: torch.Tensor):
                return act(x)
            """,
            reference="""
            def forward(x):
                return x.sigmoid() * x
            """,
            jit_error=None,
            harm="fails_beside_torchax",
        ),
        Example(
            before="""
            import torch


            class Block:
                def __init__(self):
                    self.scale = 2
                    self.double = torch.compile(self.double)

                def double(self, x):
                    return x * self.scale

                @torch.no_grad()
                @torch.compile(
                    fullgraph=True,
                )
                def run(self, x):
                    return self.double(x)


            relu = torch.compile(torch.relu, mode="max-autotune")
            block = Block()


            def forward(x: torch.Tensor):
                return block.run(relu(x))
            """,
            after="""
            import torch


            class Block:
                def __init__(self):
                    self.scale = 2

                def double(self, x):
                    return x * self.scale

                @torch.no_grad()
                def run(self, x):
                    return self.double(x)


            relu = torch.relu
            block = Block()


            def forward(x: torch.Tensor):
                return block.run(relu(x))
            """,
            reference="""
            def forward(x):
                return x.relu() * 2
            """,
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
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.cache_size_limit = 64


        @torch.compiler.disable
        def plain(x):
            return x


        @torch.jit.ignore
        @torch._dynamo.disable(recursive=False)
        def forward(x: torch.Tensor):
            if torch.jit.is_scripting() or torch.compiler.is_compiling() or torch.jit.is_tracing():
                return x
            return plain(x) * 2


        def pattern(re, text):
            return re.compile(text), compile(text, "a", "exec")


        def maybe(model, compile_model: bool):
            return torch.compile(model) if compile_model else model
        """,
    )

    def visit_Attribute(self, node: ast.Attribute | ast.Name, context: Context) -> None:
        name = context.name(node)
        if name == "torch.compile":
            self._compiled(node, context)
        elif name in _SCRIPT:
            self._report(node, context, Severity.NOTE, "rewriting does not see the code inside")
        elif name in _TRACE:
            reached = Severity.ERROR if context.in_step(node) else Severity.NOTE
            self._report(node, context, reached, "tracing again inside a traced step raises")

    visit_Name = visit_Attribute

    def _compiled(self, node: ast.expr, context: Context) -> None:
        call = context.module.parents[node]
        is_call = isinstance(call, ast.Call) and call.func is node
        if not is_call and not _is_decorator(node, context):
            return
        guarded = is_guarded(node, context.module, _ASKS)
        reached = Severity.NOTE if guarded else Severity.SLOW
        if isinstance(call, ast.Call) and _is_strict(call) and not guarded:
            self._report(node, context, Severity.ERROR, "under torchax `fullgraph=True` raises")
        else:
            self._report(
                node, context, reached, "skipped under torchax, and raises elsewhere beside it"
            )

    def _report(
        self, node: ast.expr, context: Context, severity: Severity, consequence: str
    ) -> None:
        context.report(self, node, code=node, consequence=consequence, severity=severity)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.expr)
        if context.name(node) != "torch.compile":
            raise NotFixable("it is not `torch.compile`")
        if "_orig_mod" in context.module.text.text:
            raise NotFixable("the file looks for the wrapped module")
        if is_guarded(node, context.module, _ASKS):
            raise NotFixable("a test chooses whether to compile")
        if _is_decorator(node, context):
            return without_decorator(node, context)
        call = context.module.parents[node]
        assert isinstance(call, ast.Call)
        if _is_decorator(call, context):
            return without_decorator(call, context)
        return unwrapped_call(call, context)


def _is_decorator(node: ast.expr, context: Context) -> bool:
    return node in getattr(context.module.parents[node], "decorator_list", [])


def _is_strict(call: ast.Call) -> bool:
    return any(
        keyword.arg == "fullgraph"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )
