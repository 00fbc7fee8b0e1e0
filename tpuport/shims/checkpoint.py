"""Activation checkpointing: torchax runs it but does not rematerialise."""

from typing import Any

import torch.utils.checkpoint

from tpuport.model import region
from tpuport.model.trace import current
from tpuport.shims._shim import Replacement, Shim


class Checkpoint(Shim):
    """`torch.utils.checkpoint.checkpoint` becomes `jax.checkpoint` around the same call."""

    TARGET = "torch.utils.checkpoint.checkpoint"
    REASON = "torchax runs the function but keeps its intermediate values; jax.checkpoint computes them again"

    def replacements(self) -> list[Replacement]:
        eager = torch.utils.checkpoint.checkpoint

        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            trace = current()
            if trace is None:
                return eager(function, *args, **kwargs)
            for option in (
                "use_reentrant",
                "context_fn",
                "determinism_check",
                "debug",
                "preserve_rng_state",
                "early_stop",
            ):
                kwargs.pop(option, None)
            self.count(self.TARGET)
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            return region.checkpoint(trace, lambda: function(*args, **kwargs))

        return [
            Replacement(torch.utils.checkpoint, "checkpoint", checkpoint),
            *_copies(eager, checkpoint),
        ]


def _copies(eager: Any, replacement: Any) -> list[Replacement]:
    """`from torch.utils.checkpoint import checkpoint` made copies in the importing modules: replace those too."""
    import sys

    return [
        Replacement(module, name, replacement)
        for module in list(sys.modules.values())
        if module is not None
        and module is not torch.utils.checkpoint
        and isinstance(getattr(module, "__dict__", None), dict)
        for name, value in list(vars(module).items())
        if value is eager
    ]
