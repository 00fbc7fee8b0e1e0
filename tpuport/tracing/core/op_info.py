"""Aliasing facts read from an op's schema: what it writes, what it aliases, its functional form."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.tracing.core.lowering_registry import find
from tpuport.tracing.core.view_steps import VIEWS

aten = torch.ops.aten


@dataclass(frozen=True)
class OpInfo:
    """The facts about an op that dispatch needs: its aliasing and how its value is computed."""

    writes: tuple[tuple[int, str], ...]
    is_random: bool
    functional: Any
    view: Any
    special: Callable[..., Any] | None
    lower: Callable[..., Any] | None
    inplace_view: bool
    aliases: bool


# In-place ops whose functional form has another name or overload than their own.
RENAMED = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.normal_.default: aten.normal_functional.default,
    aten._index_put_impl_.default: aten.index_put.default,
    aten.transpose_.default: aten.transpose.int,
}


def is_taken_apart(func: Any) -> bool:
    """Return whether C++ makes other ops of this one before a trace sees it.

    Only under inference_mode it arrives whole, and without its default arguments. A lowering of it
    would leave out the checks and the lowerings of its parts.
    """
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def functional_of(func: Any) -> Any:
    """Return the op without side effects behind `add_.Tensor` or `add.out`, or None."""
    if func in RENAMED:
        return RENAMED[func]
    name = func._schema.name.split("::")[1]
    packet = getattr(torch.ops, func.namespace)
    if name.endswith("_") and not name.endswith("__"):
        target = getattr(packet, name[:-1], None)
    elif name.startswith("__i") and name.endswith("__"):
        target = getattr(packet, "__" + name[3:], None)
    else:
        target = getattr(packet, name)
    if target is None:
        return None
    # Overload names differ between the forms (pow_.Tensor, pow.Tensor_Tensor), arguments do not.
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    for overload in target.overloads():
        candidate = getattr(target, overload)
        arguments = candidate._schema.arguments
        mutable = any(a.alias_info and a.alias_info.is_write for a in arguments)
        if not mutable and [(a.name, str(a.type)) for a in arguments] == wanted:
            return candidate
    return None


@functools.cache
def op_info(func: Any) -> OpInfo:
    """Return the facts about an op, computed once for each op."""
    arguments = func._schema.arguments
    writes = tuple(
        (index, a.name)
        for index, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    special, lower = find(func)
    if special is None and is_taken_apart(func):
        lower = None
    functional = functional_of(func) if writes and special is None else None
    return OpInfo(
        writes=writes,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        functional=functional,
        view=VIEWS.get(func),
        special=special,
        lower=lower,
        inplace_view=torch.Tag.inplace_view in func.tags,
        aliases=any(r.alias_info is not None for r in func._schema.returns),
    )
