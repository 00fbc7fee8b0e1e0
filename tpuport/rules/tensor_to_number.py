"""TPU103: a traced value turned into a Python number."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._rule import Example, Rule
from tpuport.rules._texts import is_message
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import is_in_f_string
from tpuport.source.syntax.text import Edit, Passage

_BUILTINS = frozenset({"float", "int", "bool", "complex", "len"})


class TensorToNumber(Rule):
    """A traced tensor turned into a Python number.

    ## What it does
    Finds `float(t)`, `int(t)`, `bool(t)` and `complex(t)` of a tensor that depends on the program's
    inputs, functions of `math` on one, and, while a program is traced, `len(t)` of one whose size
    depends on data. The fix calls `tpuport.ops.to_float` and its siblings,
    which return a Python number in eager PyTorch and a traced number while a program is traced.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, and Python insists on a real `float`, so
    the call raises `ConcretizationTypeError`.

    ## Fix safety
    The fix is exact in eager PyTorch. A `float`, `int` or `bool` that the file binds to something
    else is left alone. There is no fix for `complex` and for `math`, which computes in double
    precision; torch has the same functions for tensors.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU103"
    MESSAGE = "`{call}` makes a Python number of a value that has none while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True
    PINS = True

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                scale = float(x.detach().abs().max())
                count = int((x > 0).sum())
                return x / scale * count, count, bool(x.sum() > 0)
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                scale = tpuport.ops.to_float(x.detach().abs().max())
                count = tpuport.ops.to_int((x > 0).sum())
                return x / scale * count, count, tpuport.ops.to_bool(x.sum() > 0)
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                name = f"{float(x.sum()):.2f}"
                return x + len(name)
            """,
            left="inside an f-string",
        ),
        Example(
            before="""
            import math

            import torch


            def forward(x: torch.Tensor):
                return x / math.sqrt(x.square().sum()) + math.sqrt(x.shape[-1])
            """,
            left="math computes with Python numbers; use torch.sqrt",
        ),
    )
    CLEAN = (
        """
        import math

        import torch


        def forward(x: torch.Tensor, ratio: str = "0.5"):
            half = int(x.shape[0] * float(ratio))
            return x[:half] * float(len(x)) / math.sqrt(x.shape[-1]) + x.float() + math.pi
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _BUILTINS:
                if node.keywords or isinstance(argument, ast.Starred):
                    return
                # A trace records the call as traced, inference from source its argument. The length
                # of a traced tensor is known, unless a trace finds that it is not.
                known = name == "len" or not context.is_traced(argument)
                if known and not context.is_traced(node):
                    return
                # Text in an error's message is made only if the error is raised.
                is_text = is_in_f_string(node, context.module) and is_message(node, context)
                if not is_text and not context.module.binds_otherwise(name):
                    context.report(self, node, call=node)
            case ast.Call(args=[_, *_]) if (context.name(node.func) or "").startswith("math."):
                if any(context.is_traced(argument) for argument in node.args):
                    context.report(self, node, call=node)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        name = context.name(node.func)
        if name is not None:
            function = name.rpartition(".")[2]
            raise NotFixable(f"math computes with Python numbers; use torch.{function}", pins=False)
        assert isinstance(node.func, ast.Name)
        if node.func.id == "complex":
            raise NotFixable("a complex number cannot be part of a program", pins=False)
        start, end = context.module.span(node.func)
        function = "length" if node.func.id == "len" else f"to_{node.func.id}"
        name = Passage.of(f"{OPS}.{function}", context.module.origin(node))
        return Fix((Edit(start, end, name),), (OPS,))
