"""TPU705: a training loop of torch_xla in which no step ends."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import canonical, is_torch_xla, name_in_torch_xla
from tpuport.rules._torch_xla_steps import assignments, calls_in, enclosing, ends_with, same_scope
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_CORE = "torch_xla.core.xla_model"
_STEP = f"{_CORE}.optimizer_step"
_ENDS = {
    "torch_xla.sync",
    "torch_xla.step",
    "torch_xla.compile",
    "torch_xla.experimental.eager_mode",
    "torch_xla.experimental.compile",
    f"{_CORE}.mark_step",
    f"{_CORE}.unlazy",
    f"{_CORE}.wait_device_ops",
    "torch_xla.distributed.parallel_loader.MpDeviceLoader",
}
_LOADER = "torch.utils.data.DataLoader"


class LazyStepWithoutEnd(Rule):
    """A training loop of torch_xla in which no step ends.

    ## What it does
    Finds loops over a `DataLoader` of torch that call `xm.optimizer_step` without `barrier=True`,
    in a file that ends no step: no device loader's `per_device_loader`, `xm.mark_step`,
    `torch_xla.sync`, `step` or `compile`.

    ## Why is this bad?
    Operations are only recorded until a step ends. The graph grows with each round, until a value
    is read or memory is full, and it is compiled anew each time. Iterating over a device loader
    ends a step, and so does `barrier=True`. Steps of `tpuport.training` need none of it.

    ## Fix safety
    There is no fix: the loop needs an end of its step, or a training step of tpuport.

    ## References
    https://docs.pytorch.org/xla/master/learn/xla-overview.html
    """

    CODE = "TPU705"
    MESSAGE = "`{call}` is in a loop that ends no step: the graph grows with each round"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            from torch.utils.data import DataLoader

            import torch_xla.core.xla_model as xm


            def train(dataset, model, optimizer):
                loader = DataLoader(dataset, batch_size=8)
                device = xm.xla_device()
                for x in loader:
                    optimizer.zero_grad()
                    model(x.to(device)).sum().backward()
                    xm.optimizer_step(optimizer)


            def forward(x):
                return x
            """,
            jit_error="ModuleNotFoundError",
            left="an end of its step",
        ),
    )
    CLEAN = (
        """
        from torch.utils.data import DataLoader

        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.parallel_loader as pl


        def train(dataset, model, optimizer, device):
            loader = pl.ParallelLoader(DataLoader(dataset), [device])
            for x in loader.per_device_loader(device):
                model(x).sum().backward()
                xm.optimizer_step(optimizer)
        """,
        """
        from torch.utils.data import DataLoader

        import torch_xla.core.xla_model as xm


        def train(dataset, model, optimizer, device):
            for x in DataLoader(dataset):
                model(x.to(device)).sum().backward()
                xm.optimizer_step(optimizer, barrier=True)


        def given(loader, model, optimizer):
            for x in loader:
                model(x).sum().backward()
                xm.optimizer_step(optimizer)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if name_in_torch_xla(node.func, context) != _STEP:
            return
        if any(keyword.arg in ("barrier", None) for keyword in node.keywords) or len(node.args) > 1:
            return
        loops = [one for one in enclosing(node, context) if isinstance(one, ast.For)]
        if loops and _reads_plain_loader(loops[0].iter, context) and not _ends_steps(context):
            context.report(self, node, call=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("the loop needs an end of its step, or a training step of tpuport")


def _reads_plain_loader(iterated: ast.expr, context: Context) -> bool:
    """Return whether a loop goes over a loader of torch that is made in the same file."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
        if iterated.func.id in ("enumerate", "tqdm") and iterated.args:
            return _reads_plain_loader(iterated.args[0], context)
    if isinstance(iterated, ast.Call):
        return (context.name(iterated.func) or "").startswith(_LOADER)
    if not isinstance(iterated, ast.Name | ast.Attribute):
        return False
    values = [
        value
        for assign, value in assignments(ast.unparse(iterated), context)
        if same_scope(iterated, assign, context)
    ]
    return bool(values) and all(
        isinstance(one, ast.Call) and context.name(one.func) == _LOADER for one in values
    )


def _ends_steps(context: Context) -> bool:
    """Return whether anything in the file ends a step, wherever it is called."""
    if any(is_torch_xla(n) and canonical(n) in _ENDS for n in context.module.imports.values()):
        return True
    return any(
        name_in_torch_xla(call.func, context) in _ENDS or ends_with(call.func, "per_device_loader")
        for call in calls_in(context.module.tree)
    )
