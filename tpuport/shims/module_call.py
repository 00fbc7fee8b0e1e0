"""Module calls go through the explorer, which needs to know which module a branch on a traced value
is in.
"""

from typing import Any

import torch

from tpuport.model.trace import current
from tpuport.shims._shim import Replacement, Shim


class ModuleCall(Shim):
    """`torch.nn.Module.__call__` tells the running trace which module is being called."""

    TARGET = "torch.nn.Module.__call__"
    REASON = "a branch on a traced value is explored at the innermost module call"

    def replacements(self) -> list[Replacement]:
        original = torch.nn.Module.__dict__["__call__"]

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            trace = current()
            if trace is None or trace.explorer is None:
                return original(module, *args, **kwargs)
            if id(module) not in trace.own_modules:
                trace.guards.note_module(module)
            name = f"{type(module).__module__}.{type(module).__qualname__}"
            return trace.explorer.run_module(
                name, lambda: original(module, *args, **kwargs), [module, args, kwargs]
            )

        return [Replacement(torch.nn.Module, "__call__", call)]
