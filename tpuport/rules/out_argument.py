"""TPU411: `out=` of an operation that takes none under torchax."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context

# Each was run under plain torchax with `out=`: these raise, others such as `add` take it.
_REFUSES_OUT = frozenset(
    {
        "abs",
        "pow",
        "exp",
        "log",
        "rsqrt",
        "sin",
        "cos",
        "neg",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "cat",
        "stack",
        "cumsum",
        "sum",
        "mean",
        "maximum",
        "minimum",
        "where",
        "gather",
        "index_select",
        "argmax",
        "round",
        "floor",
        "reciprocal",
        "square",
        "eq",
        "gt",
        "dot",
        "logical_and",
        "softmax",
        "erf",
        "sign",
        "atan2",
        "fmod",
        "remainder",
        "prod",
        "norm",
    }
)


class OutArgument(Rule):
    """A torch function that writes its result to `out=`.

    ## What it does
    Finds `out=` of `torch.exp`, `matmul`, `cat`, `where` and the other functions that have no such
    form in torchax, with traced operands. `torch.add`, `mul`, `clamp` and a few more take it.

    ## Why is this bad?
    The call raises `TypeError`.

    ## Fix safety
    There is no automatic fix: `out=` also resizes and converts. Where the tensor is new, bind the
    result to its name: `y = torch.exp(x)`.

    ## References
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
    """

    CODE = "TPU411"
    MESSAGE = "`{function}` cannot write to `out={out}` under torchax: bind its result instead"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = torch.empty_like(x)
                torch.exp(x, out=y)
                return y
            """,
            jit_error="TypeError",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                both = torch.empty_like(torch.cat([x, x]))
                return torch.cat([x, x * 2], out=both)
            """,
            jit_error="TypeError",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import numpy as np
        import torch


        def forward(x: torch.Tensor):
            y = torch.empty_like(x)
            torch.add(x, 1, out=y)
            torch.clamp(y, 0, 1, out=y)
            table = torch.arange(4.0)
            torch.exp(table, out=table)
            rows = np.zeros(3)
            np.exp(rows, out=rows)
            z = torch.exp(x, out=None)
            return y * z, rows
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        out = next((keyword.value for keyword in node.keywords if keyword.arg == "out"), None)
        root, _, name = (context.name(node.func) or "").rpartition(".")
        if out is None or root != "torch" or (isinstance(out, ast.Constant) and out.value is None):
            return
        operands: list[ast.expr] = []
        for argument in node.args:
            is_list = isinstance(argument, ast.List | ast.Tuple)
            operands += argument.elts if is_list else [argument]
        if not any(context.is_traced(operand) for operand in operands):
            return
        if name in _REFUSES_OUT and runs_in_step(node, context):
            context.report(self, node, function=node.func, out=out)
