"""TPU708: the same seed of the device's generator in all processes."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import name_in_torch_xla
from tpuport.rules._torch_xla_steps import calls_in, ends_with, launched
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Function

_SEEDS = {"torch_xla.manual_seed", "torch_xla.core.xla_model.set_rng_state"}


class EqualSeeds(Rule):
    """The device's generator seeded alike in all processes of torch_xla.

    ## What it does
    Finds `torch_xla.manual_seed` and `xm.set_rng_state` with a constant, in a function for
    `torch_xla.launch` or `xmp.spawn`, if the file trains. `torch.manual_seed` is not found: the
    host's generator is meant to be the same, as it initialises the weights.

    ## Why is this bad?
    All processes draw the same dropout masks and the same noise for their different rows, so that
    samples of a batch are not independent. Add the ordinal. With tpuport there is one program over
    the entire batch, whose rows draw different numbers.

    ## Fix safety
    There is no fix: another seed draws other numbers.

    ## References
    https://docs.pytorch.org/xla/master/learn/api-guide.html
    """

    CODE = "TPU708"
    MESSAGE = "`{call}` gives all processes the same random numbers"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch_xla
            import torch_xla.core.xla_model as xm


            def main(index):
                xm.set_rng_state(42)
                forward(x).backward()


            def forward(x):
                return x


            if __name__ == "__main__":
                torch_xla.launch(main)
            """,
            jit_error="ModuleNotFoundError",
            left="draws other numbers",
        ),
    )
    CLEAN = (
        """
        import torch
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr


        def main(index):
            torch.manual_seed(42)
            xm.set_rng_state(42 + xr.global_ordinal())


        if __name__ == "__main__":
            torch_xla.launch(main)
        """,
        """
        import torch_xla

        torch_xla.manual_seed(42)
        """,
        """
        import torch_xla
        import torch_xla.core.xla_model as xm


        def compare(index):
            xm.set_rng_state(42)


        torch_xla.launch(compare)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if name_in_torch_xla(node.func, context) not in _SEEDS or not node.args:
            return
        function = context.module.function(node)
        trains = any(ends_with(call.func, "backward") for call in calls_in(context.module.tree))
        if not trains or not launched(function, context):
            return
        assert function is not None
        if _is_constant(node.args[0], function):
            context.report(self, node, call=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("another seed draws other numbers")


def _is_constant(node: ast.expr, function: Function) -> bool:
    """Return whether a seed is a number, or a name that the function sets to one."""
    if isinstance(node, ast.Name):
        values = [
            one.value
            for one in ast.walk(function)
            if isinstance(one, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == node.id for target in one.targets)
        ]
        return len(values) == 1 and isinstance(values[0], ast.Constant)
    return isinstance(node, ast.Constant)
