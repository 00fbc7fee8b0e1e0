"""TPU610: a checkpoint that saves no memory."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context

_CHECKPOINTS = frozenset(
    {
        "torch.utils.checkpoint.checkpoint",
        "torch.utils.checkpoint.checkpoint_sequential",
        "torch.utils.checkpoint.CheckpointFunction.apply",
    }
)
_WRAPPED = frozenset({"_gradient_checkpointing_func", "gradient_checkpointing_func"})


class CheckpointCall(Rule):
    """A call of `torch.utils.checkpoint` in a step.

    ## What it does
    Finds `torch.utils.checkpoint.checkpoint` and `checkpoint_sequential` in the code of a step.
    `self._gradient_checkpointing_func(...)`, by which Hugging Face's models call it when they are
    asked to, is a note.

    ## Why is this bad?
    It works on PyTorch's own autograd. Under `jax.grad` it only calls the function: every
    activation is kept until the backward pass, and a model that fits a GPU may not fit a TPU.

    ## Fix safety
    There is no automatic fix: `jax.checkpoint` needs a function of arrays, such as
    `torchax.interop.torch_view(jax.checkpoint(torchax.interop.jax_view(block)))`.

    ## References
    https://docs.jax.dev/en/latest/gradient-checkpointing.html
    """

    CODE = "TPU610"
    MESSAGE = "`{call}` recomputes nothing under `jax.grad`: every activation is kept"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch
            from torch.utils.checkpoint import checkpoint


            def block(x):
                return (x.sin() * 2).sin()


            def forward(x: torch.Tensor):
                return checkpoint(block, x, use_reentrant=False)
            """,
            jit_error=None,
            harm="keeps_activations",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            import torch.utils.checkpoint


            class Stack(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.blocks = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid())

                def forward(self, x: torch.Tensor):
                    return torch.utils.checkpoint.checkpoint_sequential(
                        self.blocks, 2, x, use_reentrant=False
                    )


            forward = Stack()
            """,
            jit_error=None,
            harm="keeps_activations",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        def load(checkpoint: str):
            return torch.load(checkpoint)


        def forward(self, x: torch.Tensor, checkpoint=None):
            if self.gradient_checkpointing and self.training:
                return self._gradient_checkpointing_func(self.block.__call__, x)
            return self.block(x) if checkpoint is None else checkpoint(x)
        """,
        """
        import functools

        import torch
        from torch.utils.checkpoint import checkpoint


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.run = functools.partial(checkpoint, use_reentrant=False)

            def enable_checkpointing(self, x):
                return checkpoint(self.forward, x, use_reentrant=False)

            def forward(self, x: torch.Tensor):
                return x * 2
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = context.name(node.func) or ""
        is_wrapped = isinstance(node.func, ast.Attribute) and node.func.attr in _WRAPPED
        if not (is_wrapped or name in _CHECKPOINTS) or not runs_in_step(node, context):
            return
        severity = Severity.NOTE if is_wrapped else self.SEVERITY
        context.report(self, node, severity=severity, call=node.func)
