"""TPU701: a call of torch_xla that jax, torch or tpuport has a counterpart of."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import COUNTERPARTS, name_in_torch_xla
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context


class TorchXlaCall(Rule):
    """A call of torch_xla that has a counterpart.

    ## What it does
    Finds calls of torch_xla for which jax, torch or tpuport has something else, and names it.
    `tpuport rewrite --from torch_xla` writes what is proved to be the same, and lists the rest.

    ## Why is this bad?
    The last release of torch_xla is 2.9, and newer releases of torch have none. Such code runs as
    it is under `tpuport run`, but its optimizers and losses then run in eager PyTorch on the host.

    ## Fix safety
    There is no fix of one call: which of them change together depends on the training step.

    ## References
    docs/torch_xla_migration.md
    """

    CODE = "TPU701"
    MESSAGE = "`{call}` is torch_xla's. What to write: {instead}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.NOTE

    EXAMPLES = (
        Example(
            before="""
            import torch_xla
            import torch_xla.core.xla_model as xm


            def forward(x):
                xm.master_print(x.shape)
                return x.to(torch_xla.device())
            """,
            jit_error="ModuleNotFoundError",
            left="tpuport rewrite --from torch_xla",
        ),
        Example(
            before="""
            import torch_xla.distributed.spmd as xs


            def forward(x, mesh=None):
                return xs.mark_sharding(x, mesh, ("data", None))
            """,
            jit_error="ModuleNotFoundError",
            left="tpuport rewrite --from torch_xla",
        ),
    )
    CLEAN = (
        """
        import my_xla_model as xm
        from torch.distributed import all_gather


        def forward(x, device=None):
            xm.master_print(x.shape)
            return x if device is None else x.to(xm.xla_device())
        """,
        """
        class Runtime:
            def world_size(self):
                return 1

            def mark_step(self):
                return self.world_size()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = name_in_torch_xla(node.func, context)
        if name in COUNTERPARTS:
            context.report(self, node, call=node.func, instead=COUNTERPARTS[name].replace("`", ""))

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("`tpuport rewrite --from torch_xla` moves the script as a whole")
