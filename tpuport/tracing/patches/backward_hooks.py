"""Full backward hooks of modules: they see gradients that a program does not keep."""

from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.foundation.user_frames import place_of
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import error_here
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.patches._count import count

BackwardHook = torch.utils.hooks.BackwardHook


class ModuleBackwardHooks(Shim):
    """A module with backward hooks runs forward; a gradient through it is refused."""

    TARGET = "torch.utils.hooks.BackwardHook"
    REASON = "its hooks are called by torch's autograd, which does not run in a ported program"

    def replacements(self) -> list[Replacement]:
        eager = BackwardHook._apply_on_tensors

        def apply_on_tensors(hook: Any, attach: Any, args: Any) -> Any:
            if current() is None:
                return eager(hook, attach, args)
            count(self.TARGET)
            made = [_refusing(hook, one) for one in args]
            return (tuple(made) if type(args) is tuple else type(args)(*made)), None

        return [Replacement(BackwardHook, "_apply_on_tensors", apply_on_tensors)]


def _refusing(hook: Any, value: Any) -> Any:
    """Return a tensor as it is, whose gradient is refused in the name of a module's hooks."""
    if not isinstance(value, TracedTensor) or not value.requires_grad:
        return value
    error = error_here(
        f"a backward hook of {type(hook.module).__name__} sees gradients that jax does not keep",
        code="TPU403",
        place=place_of([*hook.user_hooks, *hook.user_pre_hooks][0]),
        remedy="remove it while the port takes gradients, or register a hook on the tensor"
        " (y.register_hook) that returns the gradient as it should be",
    )

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise error

    made = value.view_as(value)
    made.register_hook(refuse)
    return made
