"""TPU706: an environment variable that changes float32 behind the program."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import uses_torch_xla
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_VARIABLES = {"XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16"}
_OFF = {"0", "", "false", "False"}


class DowncastVariable(Rule):
    """An environment variable that makes torch_xla compute float32 in another dtype.

    ## What it does
    Finds code with torch_xla that sets `XLA_USE_BF16`, `XLA_DOWNCAST_BF16`, `XLA_USE_FP16` or
    `XLA_DOWNCAST_FP16`.

    ## Why is this bad?
    Every float32 tensor, the optimizer's state and sums of losses included, is held in 16 bits
    while the program says float32: small updates are lost. torch_xla deprecates the variables, and
    `tpuport run` refuses them. Say it in the program: `tpuport.cast(ported, "bfloat16")`, or
    `torch.autocast`.

    ## Fix safety
    There is no fix: which parts may be in 16 bits is for the author to say.

    ## References
    https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/__init__.py
    """

    CODE = "TPU706"
    MESSAGE = "`{name}` changes float32 to 16 bits behind the program, optimizer state included"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import os

            import torch_xla.core.xla_model as xm


            def main():
                os.environ["XLA_USE_BF16"] = "1"
                os.environ.setdefault("XLA_DOWNCAST_BF16", "1")


            def forward(x):
                return x.to(xm.xla_device())
            """,
            jit_error="ModuleNotFoundError",
            left="may be in 16 bits",
        ),
    )
    CLEAN = (
        """
        import os

        import torch_xla.core.xla_model as xm

        os.environ["XLA_USE_BF16"] = "0"
        os.environ["PJRT_DEVICE"] = "TPU"
        in_bfloat16 = os.environ.get("XLA_USE_BF16", "0") == "1"
        """,
        """
        import os

        os.environ["XLA_USE_BF16"] = "1"
        """,
    )

    def visit_Assign(self, node: ast.Assign, context: Context) -> None:
        for target in node.targets:
            match target:
                case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                    if _is_environment(value, context):
                        self._look(node, name, node.value, context)
                case _:
                    pass

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        match node:
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), value]):
                match function:
                    case ast.Attribute(value=owner, attr="setdefault"):
                        if _is_environment(owner, context):
                            self._look(node, name, value, context)
                    case _:
                        if context.name(function) == "os.putenv":
                            self._look(node, name, value, context)
            case _:
                pass

    def _look(self, node: ast.AST, name: str, value: ast.expr, context: Context) -> None:
        is_off = isinstance(value, ast.Constant) and value.value in _OFF
        if name in _VARIABLES and not is_off and uses_torch_xla(context):
            context.report(self, node, name=name)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("only the author knows which parts may be in 16 bits")


def _is_environment(node: ast.expr, context: Context) -> bool:
    return context.name(node) == "os.environ"
