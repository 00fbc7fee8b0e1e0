"""Module calls in a trace.

They go through the explorer, which needs to know the module around a branch on a traced value.
Inputs and outputs of modules get their sharding constraints here, and modules with a remat policy
become regions of `jax.checkpoint`.
"""

from typing import Any

import jax
import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.remat_policy import rematerialised
from tpuport.tracing.core.sharding_constraints import constrain


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
                trace.recorder.guards.note_module(module)
            known = trace.own_modules.get(id(module))
            fqn = known if trace.options.placement is not None else None

            def run(*args: Any, **kwargs: Any) -> Any:
                if fqn is None:
                    return original(module, *args, **kwargs)
                constrain(trace, fqn, "input", (args, kwargs))
                result = original(module, *args, **kwargs)
                constrain(trace, fqn, "output", result)
                return result

            blocks = trace.blocks
            member = None if blocks is None else blocks.members.get(id(module))
            policy = None if known is None else trace.remat_policy(known)

            def inner(*args: Any, **kwargs: Any) -> Any:
                # The compiled program names its instructions and buffers after the user's modules.
                with jax.named_scope(trace.recorder.scope_of(known or type(module).__name__)):
                    if policy is None:
                        return run(*args, **kwargs)
                    roots = [module, args, kwargs]
                    return rematerialised(trace, policy, lambda: run(*args, **kwargs), roots)

            def thunk() -> Any:
                if blocks is None or member is None:
                    return inner(*args, **kwargs)
                return blocks.call(member, args, kwargs, inner)

            name = f"{type(module).__module__}.{type(module).__qualname__}"
            return trace.explorer.run_module(name, thunk, [module, args, kwargs])

        return [Replacement(torch.nn.Module, "__call__", call)]
