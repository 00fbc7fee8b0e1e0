"""Running statistics of batch norm whose momentum is a traced number: a cumulative average."""

from typing import Any

import torch
import torch.nn.functional as F

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Trace
from tpuport.tracing.functions.registry import function

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@function(F.batch_norm)
def _batch_norm(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move the statistics by a traced part of the way, which C++ would ask for its value."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    momentum = given.get("momentum")
    if not isinstance(momentum, sym_numbers.SYMBOLIC):
        return NotImplemented
    held = {name: given[name] for name in ("running_mean", "running_var")}
    moves = given.get("training") and held["running_mean"] is not None
    # With a momentum of 1 they become those of the batch.
    batch = {name: tensor.detach().clone() for name, tensor in held.items()} if moves else held
    made = func(**{**given, **batch, "momentum": 1.0})
    share: Any = momentum
    if moves:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(tensor * (1 - share) + batch[name] * share)
    return made
