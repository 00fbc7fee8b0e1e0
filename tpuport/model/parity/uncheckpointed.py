"""Replacements while eager PyTorch runs as the reference of a ported program."""

from typing import Any

import torch

from tpuport.foundation.patching.checkpointing import checkpoint_replaced
from tpuport.foundation.patching.shim import Replacement, Shim

_OPTIONS = ("context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")


class Uncheckpointed(Shim):
    """A checkpointed block runs once, with the same results and gradients."""

    TARGET = "torch.utils.checkpoint.checkpoint"
    REASON = (
        "computed again in the backward pass it would draw other random numbers than the program"
        " did, and a reentrant block refuses torch.autograd.grad"
    )
    REFERENCE = "the block, without grad if it is reentrant and none of its inputs needs any"

    def replacements(self) -> list[Replacement]:
        """Replace the function for all who hold it."""

        def checkpoint(
            function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any
        ) -> Any:
            for option in _OPTIONS:
                kwargs.pop(option, None)
            needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
            with torch.set_grad_enabled(
                torch.is_grad_enabled() and (use_reentrant is False or needed)
            ):
                return function(*args, **kwargs)

        return checkpoint_replaced(lambda _: checkpoint)


class ReentrantBackward(Shim):
    """A reentrant checkpointed block gives its gradients to `torch.autograd.grad`, too."""

    TARGET = "torch.autograd._is_checkpoint_valid"
    REASON = (
        "a script that calls torch's `CheckpointFunction`, or has one like it, calls `backward()`,"
        " and the comparison reads what such a block adds to `.grad`"
    )
    REFERENCE = "`backward()` without `inputs`"

    def replacements(self) -> list[Replacement]:
        """Replace what such a block asks before it computes its gradients."""
        return [Replacement(torch.autograd, "_is_checkpoint_valid", lambda: True)]
