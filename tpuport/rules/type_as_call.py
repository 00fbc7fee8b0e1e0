"""TPU420: `type_as`, which torchax applies to the tensor itself."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS
from tpuport.source.syntax.text import Edit, Passage


class TypeAsCall(Rule):
    """`x.type_as(y)`, which under torchax casts `x` itself.

    ## What it does
    Finds `x.type_as(y)` of traced tensors. It is a silent fault where `x` is read again, and worth
    knowing elsewhere: with a slice for `y` plain torchax raises an `AttributeError`. The fix writes
    `x.to(y)`, which does the same in PyTorch.

    ## Why is this bad?
    torchax 0.0.14.dev20261026 implements `type_as` as a cast in place. All later uses of `x` see
    the other dtype: a float32 residual becomes bfloat16, integer indices become floats.

    ## Fix safety
    Exact.

    ## References
    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.type_as.html
    """

    CODE = "TPU420"
    MESSAGE = "`{call}` casts `{tensor}` itself under torchax, not a copy"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, steps: torch.Tensor):
                y = x * 0.3
                rounded = y.type_as(steps)
                return y - rounded
            """,
            after="""
            import torch


            def forward(x: torch.Tensor, steps: torch.Tensor):
                y = x * 0.3
                rounded = y.to(steps)
                return y - rounded
            """,
            inputs="(torch.randn(3, 4) * 9, torch.arange(4, dtype=torch.int32))",
            jit_error=None,
            harm="differs",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                first = x[:, 1:]
                return (first.float() * 2).type_as(first)
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                first = x[:, 1:]
                return (first.float() * 2).to(first)
            """,
            jit_error="AttributeError",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor):
            y = x.double().to(x)
            return y + y.to(x.dtype)
        """,
        """
        def typed(column, other):
            result = column.type_as(other)
            return result, column
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        match node.func:
            case ast.Attribute(value=tensor, attr="type_as") if context.is_traced(tensor):
                severity = self.SEVERITY if _is_read_again(node, tensor, context) else Severity.NOTE
                context.report(self, node, severity=severity, call=node, tensor=tensor)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        if len(node.args) != 1 or node.keywords:
            raise NotFixable("`to` has another name for its argument")
        end = context.module.span(node.func)[1]
        to = Passage.of("to", context.module.origin(node))
        return Fix((Edit(end - len("type_as"), end, to),), ())


def _is_read_again(node: ast.Call, tensor: ast.expr, context: Context) -> bool:
    """Return whether the tensor, if it has a name, is read after the statement."""
    function = context.module.function(node)
    statement: ast.AST = node
    for parent in context.module.ancestors(node):
        if isinstance(statement, ast.stmt):
            break
        statement = parent
    if not isinstance(tensor, ast.Name) or not isinstance(function, FUNCTIONS):
        return False
    if not isinstance(statement, ast.stmt):
        return False
    bound = {
        part.id
        for part in ast.walk(statement)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    after = context.flow(function).after.get(statement, frozenset())
    return tensor.id in after and tensor.id not in bound
