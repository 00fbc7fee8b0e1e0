"""TPU707: the tail of gathered rows cut, which is not the sampler's padding."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import name_in_torch_xla
from tpuport.rules._torch_xla_steps import assignments, calls_in, ends_with, same_scope
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_GATHER = "torch_xla.core.xla_model.all_gather"
_SAMPLER = "DistributedSampler"
# What may put the rows into the order of the data set.
_REORDERS = ("transpose", "permute", "swapaxes", "movedim", "unbind", "gather", "index_select")


class GatheredTail(Rule):
    """Rows cut off after `xm.all_gather` that are not the padding of `DistributedSampler`.

    ## What it does
    Finds `xm.all_gather(x)[:n]` in a file with a `DistributedSampler`, where `n` is not a constant
    and nothing reorders the rows.

    ## Why is this bad?
    The sampler deals rows out one by one: process r has rows r, r + world size, and so on, and the
    rows that are repeated to fill up are the last ones of the last processes. `all_gather`
    concatenates whole processes, so that cutting the tail removes samples of the last process, and
    keeps the repeated ones of others. Deal the rows back first (`.view(world, rows).t()`), or use
    `tpuport.training.Batches(last="pad")`, whose `sample_mask` says which rows count.

    ## Fix safety
    There is no fix: in which order the rows are wanted is for the author to say.

    ## References
    https://pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    CODE = "TPU707"
    MESSAGE = "`{cut}` cuts rows of the last process, not those that DistributedSampler repeats"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            from torch.utils.data import DataLoader
            from torch.utils.data.distributed import DistributedSampler

            import torch_xla.core.xla_model as xm


            def evaluate(dataset, model):
                loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
                features = xm.all_gather(model(loader))
                return features[: len(dataset)]


            def forward(x):
                return x
            """,
            jit_error="ModuleNotFoundError",
            left="in which order",
        ),
    )
    CLEAN = (
        """
        from torch.utils.data.distributed import DistributedSampler

        import torch_xla.core.xla_model as xm


        def evaluate(dataset, model, world):
            sampler = DistributedSampler(dataset)
            features = xm.all_gather(model(sampler))
            first = features[:8]
            features = features.view(world, -1).transpose(0, 1).reshape(-1)
            return features[: len(dataset)], first
        """,
        """
        import torch_xla.core.xla_model as xm


        def gathered(x, count):
            return xm.all_gather(x)[:count]
        """,
    )

    def visit_Subscript(self, node: ast.Subscript, context: Context) -> None:
        match node.slice:
            case ast.Slice(lower=None, upper=ast.expr() as upper, step=None):
                if isinstance(upper, ast.Constant | ast.UnaryOp):
                    return
            case _:
                return
        dotted = context.module.by_class.get(ast.Attribute, ())
        has_sampler = any(n.endswith(_SAMPLER) for n in context.module.imports.values()) or any(
            isinstance(one, ast.Attribute) and one.attr == _SAMPLER for one in dotted
        )
        if has_sampler and _is_gathered(node.value, context):
            context.report(self, node, cut=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("only the author knows in which order the rows are wanted")


def _is_gathered(node: ast.expr, context: Context) -> bool:
    values = [node]
    if isinstance(node, ast.Name | ast.Attribute):
        values = [
            value
            for assign, value in assignments(ast.unparse(node), context)
            if same_scope(node, assign, context)
        ]
    calls = [call for value in values for call in calls_in(value)]
    return any(name_in_torch_xla(call.func, context) == _GATHER for call in calls) and not any(
        ends_with(call.func, "t", *_REORDERS) for call in calls
    )
