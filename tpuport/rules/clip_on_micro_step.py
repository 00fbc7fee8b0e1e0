"""TPU703: gradients clipped on each micro-step, before all of them are there."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._torch_xla_facts import name_in_torch_xla, uses_torch_xla
from tpuport.rules._torch_xla_steps import calls_in, enclosing, ends_with
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_STEPS = {"torch_xla.core.xla_model.optimizer_step", "torch_xla.core.xla_model.reduce_gradients"}


class ClipOnMicroStep(Rule):
    """Gradients clipped on each micro-step of an accumulated update.

    ## What it does
    Finds `clip_grad_norm_` in a training loop of torch_xla that clips in every round, while
    `xm.optimizer_step` updates only every few rounds.

    ## Why is this bad?
    `backward()` adds to gradients that were clipped before, so early micro-steps count less than
    late ones, and the sum that the optimizer gets can be longer than the limit. Clip once, before
    the update: `make_train_step(..., accumulate=, clip_norm=)` does.

    ## Fix safety
    There is no fix: clipping at another place changes what is trained.

    ## References
    https://pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
    """

    CODE = "TPU703"
    MESSAGE = "`{call}` clips on each micro-step, but the update comes every few of them"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch
            import torch_xla.core.xla_model as xm


            def run(loader, model, optimizer, every=4, limit=1.0):
                for number, x in enumerate(loader):
                    loss = model(x) / every
                    loss.backward()
                    if limit > 0:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                    if (number + 1) % every == 0:
                        xm.optimizer_step(optimizer)
                        optimizer.zero_grad()


            def forward(x):
                return x
            """,
            jit_error="ModuleNotFoundError",
            left="changes what is trained",
        ),
    )
    CLEAN = (
        """
        import torch
        import torch_xla.core.xla_model as xm


        def run(loader, model, optimizer, every=4):
            for number, x in enumerate(loader):
                error = model(x) / every
                error.backward()
                if (number + 1) % every == 0:
                    xm.reduce_gradients(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()


        def each(loader, model, optimizer):
            for x in loader:
                model(x).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                xm.optimizer_step(optimizer)
        """,
        """
        import torch


        def run(loader, model, optimizer, every=4):
            for number, x in enumerate(loader):
                model(x).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if (number + 1) % every == 0:
                    optimizer.step()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if not ends_with(node.func, *_CLIPS) or not uses_torch_xla(context):
            return
        loops = [one for one in enclosing(node, context) if isinstance(one, ast.For | ast.While)]
        if loops and not _is_now_and_then(node, loops[0], context):
            if _updates_now_and_then(loops[0], context):
                context.report(self, node, call=node.func)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("clipping once changes what is trained")


def _updates_now_and_then(loop: ast.For | ast.While, context: Context) -> bool:
    """Return whether a loop takes every backward pass, but updates by the remainder of a number."""
    steps = [c for c in calls_in(loop) if name_in_torch_xla(c.func, context) in _STEPS]
    backward = [c for c in calls_in(loop) if ends_with(c.func, "backward")]
    return (
        bool(steps)
        and all(_is_now_and_then(one, loop, context) for one in steps)
        and any(not _is_now_and_then(one, loop, context) for one in backward)
    )


def _is_now_and_then(node: ast.AST, loop: ast.AST, context: Context) -> bool:
    for parent in enclosing(node, context):
        if parent is loop:
            return False
        if isinstance(parent, ast.If) and _has_remainder(parent.test, loop):
            return True
    return False


def _has_remainder(test: ast.expr, loop: ast.AST) -> bool:
    """Return whether a test, or what a name in it was set to in the loop, is of a remainder."""
    names = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
    set_to = [
        one.value
        for one in ast.walk(loop)
        if isinstance(one, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in names for target in one.targets)
    ]
    return any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
        for tree in (test, *set_to)
        for one in ast.walk(tree)
    )
