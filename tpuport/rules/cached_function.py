"""TPU422: a function of tensors that remembers its results."""

import ast

from tpuport.rules._placing import creation
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Function

_CACHES = {"functools.cache", "functools.lru_cache"}


class CachedFunction(Rule):
    """A function of the step that remembers its results.

    ## What it does
    Finds `@functools.cache` and `@functools.lru_cache` on a function that a step calls and that
    makes or takes tensors.

    ## Why is this bad?
    What the function makes while a program is traced is a tensor of that trace. The cache hands it
    to the next trace, for another batch size, which fails with `UnexpectedTracerError`. A tensor as
    an argument is a new key in each trace, so that nothing is ever found and all is kept.

    ## Fix safety
    There is no automatic fix: a cached function may draw random numbers once, or be called so often
    that it matters. Make a table in `__init__` as a buffer, or drop the decorator: in a program the
    table is a constant anyway.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.UnexpectedTracerError
    """

    CODE = "TPU422"
    MESSAGE = "`{name}` keeps tensors of the trace that computed them, for later traces"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import functools

            import torch


            @functools.lru_cache(maxsize=None)
            def positions(length: int, device: torch.device):
                return torch.arange(length, device=device).float()


            def forward(x: torch.Tensor):
                return x + positions(x.shape[-1], x.device)
            """,
            jit_error=None,
            harm="leaks",
            left="no automatic fix",
        ),
        Example(
            before="""
            from functools import cache

            import torch


            class Rotary(torch.nn.Module):
                @cache
                def table(self, length: int, device: torch.device):
                    return torch.ones(length, device=device).cumsum(0)

                def forward(self, x: torch.Tensor):
                    return x * self.table(x.shape[-1], x.device).cos()


            forward = Rotary()
            """,
            jit_error=None,
            harm="leaks",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import functools

        import torch


        @functools.cache
        def has_kernel():
            return torch.cuda.is_available()


        @functools.lru_cache
        def heads(width: int, size: int = 64):
            return width // size


        def forward(x: torch.Tensor):
            return x.reshape(*x.shape[:-1], heads(x.shape[-1], 1), -1), has_kernel()
        """,
    )

    def visit_FunctionDef(self, node: Function, context: Context) -> None:
        for decorator in node.decorator_list:
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            if context.name(function) in _CACHES and _makes_tensors(node, context):
                context.report(self, decorator, name=node.name)


def _makes_tensors(function: Function, context: Context) -> bool:
    """Return whether a function of the step creates or computes tensors."""
    inside = [one for one in ast.walk(function) if isinstance(one, ast.expr)]
    return any(
        context.in_step(one) and (creation(one, context) is not None or context.is_traced(one))
        for one in inside
    )
