"""TPU111: a traced value where a size must be known."""

import ast
from collections.abc import Iterator

from tpuport.rules._rule import Example, Rule
from tpuport.rules._sizes import is_of_a_tensor, size_arguments
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context


class TensorAsSize(Rule):
    """A traced value used as a size, a bound or a count.

    ## What it does
    Finds a tensor (or a number read from one) that depends on the program's inputs where a shape or
    a number of iterations is made of it: `range(t)`, `torch.zeros(t)`, `torch.arange(t)`,
    `x.reshape(t, -1)`, `x.topk(t)`, the bounds of a slice `x[:t]`, `[pad] * t`.

    ## Why is this bad?
    A program has static shapes: every size is known when it is traced, and a traced value is not.
    The call raises `ConcretizationTypeError`, `TracerBoolConversionError` or `TypeError`.

    ## Fix safety
    There is no automatic fix, since the result has another shape for every input. Take a bound
    that is known instead: build the largest case and mask what is too much
    (`torch.arange(bound) < t`, `torch.where`), or pass the size as a Python number.

    ## References
    https://docs.jax.dev/en/latest/notebooks/Common_Gotchas_in_JAX.html#dynamic-shapes
    """

    CODE = "TPU111"
    MESSAGE = "`{size}` decides a size, which has to be known when the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, lengths: torch.Tensor):
                longest = lengths.max()
                return x[:, :longest]
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, (3,)))",
            left="bound that is known",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, lengths: torch.Tensor):
                positions = torch.arange(lengths.max() + 1, device=x.device)
                return positions[None] < lengths[:, None]
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, (3,)))",
            jit_error="TracerBoolConversionError",
            left="bound that is known",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, rounds: torch.Tensor):
                for _ in range(rounds):
                    x = x * 0.5
                return x
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, ()))",
            left="bound that is known",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, groups: torch.Tensor):
                zeros = torch.zeros((groups, 4), device=x.device)
                return x.reshape(-1, 4) + zeros[:1]
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, ()))",
            jit_error="TypeError",
            left="bound that is known",
        ),
    )
    CLEAN = (
        """
        import torch
        import torch.nn.functional as F


        def forward(x: torch.Tensor, mask: torch.Tensor, steps: int = 4):
            b, n = x.shape[0], x.size(1)
            for i in range(n):
                mask = mask + i
            table = torch.arange(steps)
            size = table.max() + 1
            x = x[: b // 2, -n:].reshape(b // 2, *mask.shape[1:]).expand(b // 2, n)
            x = torch.full((b // 2, n), x.mean(), device=x.device) + x[:, table[0] :]
            return F.pad(x, (0, n), value=0.0)[: len(mask)].repeat(size, 1).view(mask.dtype)
        """,
        """
        import torch


        def forward(x: torch.Tensor, index: torch.Tensor, embed: torch.nn.Module, block):
            x, height, width = embed(x)
            x = x.view(-1, height * width, block.num_heads).to(block.norm(x).mean().dtype)
            y = x[index] + x[:, 0, None].roll(1, dims=0)
            return torch.linspace(0, x.max(), 5, device=x.device), y.clamp(x.min(), x.max())
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        for size in size_arguments(node, context):
            if context.is_traced(size) and is_of_a_tensor(size, context):
                context.report(self, size, size=size)
                return

    def visit_Subscript(self, node: ast.Subscript, context: Context) -> None:
        for bound in _bounds(node):
            if context.is_traced(bound) and is_of_a_tensor(bound, context):
                context.report(self, bound, size=bound)
                return

    def visit_BinOp(self, node: ast.BinOp, context: Context) -> None:
        match node:
            case (
                ast.BinOp(op=ast.Mult(), left=ast.List(), right=count)
                | ast.BinOp(op=ast.Mult(), left=count, right=ast.List())
            ) if context.is_traced(count) and is_of_a_tensor(count, context):
                context.report(self, count, size=count)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("the shape of the result depends on data; take a bound that is known")


def _bounds(node: ast.Subscript) -> Iterator[ast.expr]:
    indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for index in indices:
        if isinstance(index, ast.Slice):
            yield from (b for b in (index.lower, index.upper, index.step) if b is not None)
    if isinstance(node.value, ast.List):
        # An index of a Python list has to be known, that of a tensor need not.
        yield from (index for index in indices if not isinstance(index, ast.Slice))
