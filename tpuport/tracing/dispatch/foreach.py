"""The `_foreach_*` ops, by which optimizers and tensordict compute with lists of tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tpuport.tracing.core.context import current
from tpuport.tracing.core.lowering_registry import special
from tpuport.tracing.dispatch.compute import within

# Those that are called otherwise for one tensor.
_NAMES = {"maximum": "clamp_min", "minimum": "clamp_max"}


def _alone(packet: str) -> Callable[..., Any] | None:
    """Return the function for one tensor of an op on lists; None if torch has none."""
    name = packet.removeprefix("_foreach_")
    if name == "norm":
        return torch.linalg.vector_norm
    base = name.removesuffix("_")
    function = _NAMES.get(base, base)
    return getattr(*((torch, function) if base == name else (torch.Tensor, function + "_")), None)


def _each(func: Any, alone: Callable[..., Any], *given: Any, **kwargs: Any) -> list[Any] | None:
    """Run an op on lists as one op for each element."""
    trace, args = current(), list(given)
    if "addc" in func._opname and len(args) == 4:  # one tensor's factor has to be named
        *args, factors = args
        kwargs["value"] = factors.tolist() if isinstance(factors, torch.Tensor) else factors
    count = next(len(a) for a in args if isinstance(a, (list, tuple)))

    def at(value: Any, index: int) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    def run() -> list[Any]:
        return [
            alone(*(at(a, i) for a in args), **{k: at(v, i) for k, v in kwargs.items()})
            for i in range(count)
        ]

    results = within(None if trace is None else trace.dispatch_mode, run, (), {})
    return results if func._schema.returns else None


def register_foreach() -> None:
    """Register all ops on lists."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if packet.startswith("_foreach_") and not overload.endswith("out"):
            alone = _alone(packet)
            if alone is not None:
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                special(op)(functools.partial(_each, op, alone))
