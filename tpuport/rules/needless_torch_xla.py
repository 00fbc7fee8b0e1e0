"""TPU702: a call of torch_xla that nothing stands for."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import NEEDLESS, name_in_torch_xla
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context


class NeedlessTorchXla(Rule):
    """A call of torch_xla that has to go.

    ## What it does
    Finds calls that do something only for lazy tensors or for a process for each device:
    `xm.mark_step()`, `torch_xla.sync()`, `xm.reduce_gradients()`, `xr.use_spmd()` and the like.
    `tpuport rewrite --from torch_xla` removes them.

    ## Why is this bad?
    There is nothing that they could do: no tensor is lazy, one process drives all devices, and the
    compiler inserts collectives where arrays are sharded.

    ## Fix safety
    There is no fix of one call: which of them change together depends on the training step.

    ## References
    docs/torch_xla_migration.md
    """

    CODE = "TPU702"
    MESSAGE = "`{call}` goes: {why}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.NOTE

    EXAMPLES = (
        Example(
            before="""
            import torch_xla.core.xla_model as xm
            from torch_xla import runtime

            runtime.use_spmd()


            def forward(x):
                y = x + 1
                xm.mark_step()
                return y
            """,
            jit_error="ModuleNotFoundError",
            left="tpuport rewrite --from torch_xla",
        ),
    )
    CLEAN = (
        """
        import torch


        class Profile:
            def step(self):
                return 1


        def forward(x: torch.Tensor, profile=Profile()):
            profile.step()
            return x
        """,
        """
        from my_library import torch_xla


        def forward(x):
            torch_xla.sync()
            return x
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = name_in_torch_xla(node.func, context)
        if name in NEEDLESS:
            context.report(self, node, call=node.func, why=NEEDLESS[name].replace("`", ""))

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("`tpuport rewrite --from torch_xla` removes it with the rest")
