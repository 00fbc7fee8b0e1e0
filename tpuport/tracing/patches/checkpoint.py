"""Activation checkpointing: torchax runs it but does not rematerialise."""

from typing import Any

import torch

from tpuport.foundation.patching.checkpointing import checkpoint_replaced
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core import regions
from tpuport.tracing.core.bound_tensors import held_by
from tpuport.tracing.core.context import current
from tpuport.tracing.patches._count import count


class ActivationCheckpoint(Shim):
    """`torch.utils.checkpoint.checkpoint` becomes `jax.checkpoint` around the same call."""

    TARGET = "torch.utils.checkpoint.checkpoint"
    REASON = (
        "torchax runs the function but keeps its intermediate values;"
        " jax.checkpoint computes them again"
    )

    def replacements(self) -> list[Replacement]:
        return checkpoint_replaced(self._made)

    def _made(self, eager: Any) -> Any:
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            trace = current()
            if trace is None:
                return eager(function, *args, **kwargs)
            reentrant = kwargs.pop("use_reentrant", None) is not False
            for option in (
                "context_fn",
                "determinism_check",
                "debug",
                "preserve_rng_state",
                "early_stop",
            ):
                kwargs.pop(option, None)
            count(self.TARGET)
            needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
            if not torch.is_grad_enabled() or (reentrant and not needed):
                # Eager runs a reentrant block without grad, and its backward only if an input
                # needs it.
                with torch.no_grad():
                    return function(*args, **kwargs)
            roots = [*held_by(function), args, kwargs]
            return regions.checkpoint(trace, lambda: function(*args, **kwargs), roots)

        return checkpoint
