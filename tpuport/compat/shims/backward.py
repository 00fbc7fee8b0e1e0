"""User code in a backward pass (custom functions, checkpointed blocks), without torch's modes."""

import functools
from typing import Any

import torch
from torch.utils.hooks import BackwardHook

from tpuport.compat.emulated.asked_gradients import hook_of_output
from tpuport.compat.emulated.device import resumed
from tpuport.foundation.patching.checkpointing import checkpoint_replaced
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.reentrancy import compares_gradients, is_part_of_program


class CustomBackward(Shim):
    """`backward` of a `torch.autograd.Function` sees the accelerator as its `forward` did."""

    TARGET = "torch.autograd.function.BackwardCFunction.apply"
    REASON = "torch takes function modes away in a backward pass"
    REFERENCE = "the same function on CUDA, where a device is no mode"

    def replacements(self) -> list[Replacement]:
        owner = torch.autograd.function.BackwardCFunction
        original = owner.apply

        def apply(node: Any, *args: Any) -> Any:
            with resumed():
                return original(node, *args)

        return [Replacement(owner, "apply", apply)]


class CheckpointedBackward(Shim):
    """A block under `torch.utils.checkpoint` sees the accelerator when it is computed again."""

    TARGET = "torch.utils.checkpoint.checkpoint"
    REASON = "torch takes function modes away in a backward pass"
    REFERENCE = "the same function on CUDA, where a device is no mode"

    def replacements(self) -> list[Replacement]:
        return checkpoint_replaced(self._made)

    def _made(self, original: Any) -> Any:
        @functools.wraps(original)
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            @functools.wraps(function, updated=())
            def block(*inner: Any, **named: Any) -> Any:
                with resumed():
                    return function(*inner, **named)

            return original(block, *args, **kwargs)

        return checkpoint


_REASON_OF_HOOKS = (
    "the node of a program leads to all parameters, and torch gives None to hooks of others"
)


class GradientHook(Shim):
    """A hook of a tensor is called if the tensor gets a gradient in a backward pass of the script.

    Comparisons of gradients leave out the hooks that the script put on parameters.
    """

    TARGET = "torch.Tensor.register_hook"
    REASON = _REASON_OF_HOOKS
    REFERENCE = "the same hook in eager PyTorch, whose graph does not reach such a tensor"

    def replacements(self) -> list[Replacement]:
        original = torch.Tensor.register_hook

        def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
            is_of_script = not is_part_of_program()

            @functools.wraps(hook, updated=())
            def called(gradient: Any) -> Any:
                if gradient is None or (is_of_script and compares_gradients()):
                    return None
                return hook(gradient)

            handle = hook_of_output(tensor, called) if is_of_script else None
            return original(tensor, called) if handle is None else handle

        return [Replacement(torch.Tensor, "register_hook", register_hook)]


class ModuleGradientHook(Shim):
    """A backward hook of a module is called if its results get a gradient, in the script's passes.

    Comparisons of gradients leave these hooks out, too.
    """

    TARGET = "torch.utils.hooks.BackwardHook"
    REASON = _REASON_OF_HOOKS
    REFERENCE = "the same hook in eager PyTorch, whose graph does not reach such a module"

    def replacements(self) -> list[Replacement]:
        original = BackwardHook.__init__

        def init(made: Any, module: Any, hooks: Any, pre_hooks: Any) -> None:
            if not is_part_of_program():
                hooks = [_if_reached(hook) for hook in hooks]
                pre_hooks = [_if_reached(hook) for hook in pre_hooks]
            original(made, module, hooks, pre_hooks)

        return [Replacement(BackwardHook, "__init__", init)]


def _if_reached(hook: Any) -> Any:
    """Return a hook of a module that is called if one of its results has a gradient."""

    def called(module: torch.nn.Module, *gradients: Any) -> Any:
        if compares_gradients() or all(one is None for one in gradients[-1]):
            return None
        return hook(module, *gradients)

    return called
