"""Which modules are on the accelerator, and whether a module has parts that are."""

import torch

from tpuport.foundation.interop.device_mark import is_tagged


def is_on_accelerator(module: torch.nn.Module) -> bool:
    """Return whether the weights of a module, or its buffers if it has none, are there."""
    # A class may have a `parameters` of its own, which returns a list.
    first = next(torch.nn.Module.parameters(module), None)
    if first is None:
        first = next(torch.nn.Module.buffers(module), None)
    return first is not None and is_tagged(first)


def has_parts(module: torch.nn.Module) -> bool:
    """Return whether submodules can be programs where the module cannot be one."""
    return any(is_on_accelerator(child) for child in module.children())
