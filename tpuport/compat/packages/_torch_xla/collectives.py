"""Collectives of `torch_xla.core.xla_model`, with torch_xla's signatures and numbers.

Each replica gets the tensors of all, and computes what the collective gives it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpuport.compat.emulated import replicas
from tpuport.compat.packages._torch_xla.state import count
from tpuport.foundation.interop.device_mark import is_tagged, tag
from tpuport.tracing.core.errors import port_error

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"


def _logical_or_bits(logical: Any, bits: Any) -> Any:
    def reduce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return logical(a, b) if a.dtype == torch.bool else bits(a, b)

    return reduce


_KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    REDUCE_SUM: torch.add,
    REDUCE_MUL: torch.mul,
    REDUCE_AND: _logical_or_bits(torch.logical_and, torch.bitwise_and),
    REDUCE_OR: _logical_or_bits(torch.logical_or, torch.bitwise_or),
    REDUCE_MIN: torch.minimum,
    REDUCE_MAX: torch.maximum,
}


def _group(name: str, groups: Any = None) -> list[int]:
    """Return the replicas of the group that this one is in, and count the call."""
    count(f"xm.{name}")
    everyone = list(range(replicas.size()))
    if not groups:
        return everyone
    named = sorted(one for group in groups for one in group)
    if named != everyone or len({len(group) for group in groups}) > 1:
        there = "there is one, 0" if len(everyone) == 1 else f"there are {len(everyone)}, from 0 on"
        raise port_error(
            f"xm.{name} names the replicas {[list(group) for group in groups]}, and {there}",
            remedy="leave groups out, or make them from xr.world_size(): each replica in one group,"
            " and all groups of one size",
        )
    return next(list(group) for group in groups if replicas.rank() in group)


def _check_parts(name: str, parts: int, group: list[int]) -> None:
    if parts != len(group):
        there = "there is one replica" if len(group) == 1 else f"a group has {len(group)} replicas"
        raise port_error(
            f"xm.{name} splits into {parts} parts, and {there}",
            remedy=f"make the number from xr.world_size(), which is {replicas.size()}",
        )


def _check_kind(name: str, kind: str) -> None:
    if kind not in _KINDS:
        raise port_error(
            f"xm.{name}: {kind!r} is no reduction", remedy=f"name one of {', '.join(_KINDS)}"
        )


def _given(name: str, group: list[int], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return for each tensor those of the group, in its order."""
    found = replicas.exchange_tensors(f"xm.{name}", tensors)
    return list(zip(*(found[number] for number in group), strict=True))


def _made(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return tag(value) if is_tagged(like) else value


def _put(output: Any, values: Any) -> Any:
    """Write results to given outputs, and return those."""
    single = isinstance(output, torch.Tensor)
    pairs = [(output, values)] if single else zip(output, values, strict=True)
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)
    return output


def _collective(
    name: str,
    value: Any,
    group: list[int],
    function: Callable[[Sequence[torch.Tensor]], torch.Tensor],
) -> Any:
    """Return for a tensor, or each in a list, what a function makes of those of the group."""
    if replicas.size() == 1:
        # With gradients, which a copy has.
        single = isinstance(value, torch.Tensor)
        return function([value]) if single else [function([one]) for one in value]
    given = [value] if isinstance(value, torch.Tensor) else list(value)
    with torch.no_grad():
        found = [function(parts) for parts in _given(name, group, given)]
    made = [_made(like, one) for like, one in zip(given, found, strict=True)]
    return made[0] if isinstance(value, torch.Tensor) else made


def _reduced(kind: str, scale: float, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = functools.reduce(_KINDS[kind], parts)
    return total if scale == 1.0 else (total * scale).to(total.dtype)


# From here on, each function is named and called as in torch_xla.


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Return the reduced tensor, or reduce each in a list in place; among one, return a copy."""
    del pin_layout
    group = _group("all_reduce", groups)
    _check_kind("all_reduce", reduce_type)
    single = isinstance(inputs, torch.Tensor)
    if replicas.size() == 1:
        return inputs.clone() if single else inputs
    reduce = functools.partial(_reduced, reduce_type, scale)
    found = _collective("all_reduce", inputs, group, reduce)
    return found if single else _put(inputs, found)


def all_gather(
    value: Any,
    dim: int = 0,
    groups: Any = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
) -> Any:
    """Return the tensors of all replicas side by side, or write them to `output`."""
    del pin_layout, channel_id, use_global_device_ids
    group = _group("all_gather", groups)
    found = _collective("all_gather", value, group, lambda parts: _side_by_side(parts, dim))
    return found if output is None else _put(output, found)


def _side_by_side(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    # Numbers have no dimension to be put side by side in; torch_xla has no answer for them either.
    return parts[0].clone() if len(parts) == 1 else torch.cat(list(parts), dim)


def all_gather_bucketized(
    input_list: list[torch.Tensor],
    dim: int = 0,
    groups: Any = None,
    output: Any = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> Any:
    """Do as `all_gather` does with a list."""
    del bucket_cap_mb
    return all_gather(input_list, dim, groups, output, pin_layout)


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Any = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
) -> Any:
    """Return this replica's part of the reduced tensor, or write it to `output`."""
    del pin_layout, channel_id, use_global_device_ids
    group = _group("reduce_scatter", groups)
    _check_kind("reduce_scatter", reduce_type)
    _check_parts("reduce_scatter", shard_count, group)

    def part(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = _reduced(reduce_type, scale, parts)
        _check_divides("reduce_scatter", total, scatter_dim, shard_count)
        if shard_count == 1:
            return total.clone()
        return total.chunk(shard_count, scatter_dim)[group.index(replicas.rank())].clone()

    found = _collective("reduce_scatter", input, group, part)
    return found if output is None else _put(output, found)


def _check_divides(name: str, tensor: torch.Tensor, dim: int, parts: int) -> None:
    if parts > 1 and tensor.shape[dim] % parts:
        raise port_error(
            f"xm.{name} splits dim {dim} of {tuple(tensor.shape)} into {parts} parts, which do not"
            " divide it",
            remedy="pad the tensor, or split another dim",
        )


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Any = None,
    output: Any = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> Any:
    """Do as `reduce_scatter` does with a list."""
    del bucket_cap_mb, pin_layout
    return reduce_scatter(reduce_type, input_list, scale, scatter_dim, shard_count, groups, output)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Return this replica's part of the tensor of each, side by side."""
    del pin_layout
    group = _group("all_to_all", groups)
    _check_parts("all_to_all", split_count, group)
    mine = group.index(replicas.rank())

    def exchanged(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        _check_divides("all_to_all", tensors[0], split_dimension, split_count)
        parts = [one.chunk(split_count, split_dimension)[mine] for one in tensors]
        return _side_by_side(parts, concat_dimension)

    return _collective("all_to_all", value, group, exchanged)


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the tensor of the replica that sends to this one, or zeros if none does."""
    group = _group("collective_permute")
    targets = [target for _, target in pairs]
    unknown = sorted({one for pair in pairs for one in pair} - set(group))
    if unknown or len(set(targets)) < len(targets):
        named = f"names the replicas {unknown}, and there {_are(group)}"
        twice = f"sends to a replica twice: {[list(pair) for pair in pairs]}"
        raise port_error(
            f"xm.collective_permute {named if unknown else twice}",
            remedy="make the pairs (source, target) from xr.world_size(), each target once",
        )
    source = {target: source for source, target in pairs}.get(replicas.rank())

    def sent(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.zeros_like(tensors[0]) if source is None else tensors[source].clone()

    return _collective("collective_permute", value, group, sent)


def _are(group: list[int]) -> str:
    return "is one, 0" if len(group) == 1 else f"are {len(group)}"


def collective_broadcast(
    tensors: list[torch.Tensor],
    root_ordinal: int = 0,
    groups: Any = None,
    pin_layout: bool = True,
) -> None:
    """Write the tensors of one replica to those of the others."""
    del pin_layout
    group = _group("collective_broadcast", groups)
    if root_ordinal not in group:
        raise port_error(
            f"xm.collective_broadcast names the replicas [{root_ordinal}] as its root, and there"
            f" {_are(group)} in the group",
            remedy="name a root that is in each group",
        )
    if replicas.size() > 1:
        at = group.index(root_ordinal)
        values = _collective("collective_broadcast", tensors, group, lambda parts: parts[at])
        _put(tensors, values)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Give all replicas the parameters and buffers of replica 0."""
    collective_broadcast([*model.parameters(), *model.buffers()])


def all_reduce_bucketized_gradients(
    gradients: Any, scale: float, groups: Any, pin_layout: bool, bucket_cap_mb: int = 0
) -> None:
    """Reduce the gradients by their sum, times `scale`."""
    del bucket_cap_mb
    all_reduce(REDUCE_SUM, list(gradients), scale, groups, pin_layout)


def reduce_gradients(optimizer: Any, groups: Any = None, pin_layout: bool = True) -> None:
    """Average the gradients over the replicas; within groups they are divided by all, as there."""
    if replicas.size() == 1:
        _group("reduce_gradients", groups)
        return
    all_reduce(REDUCE_SUM, _gradients(optimizer), 1.0 / replicas.size(), groups, pin_layout)


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    params = [one for group in optimizer.param_groups for one in group["params"]]
    return [one.grad for one in params if one.requires_grad and one.grad is not None]


class CoalescingBuckets:
    """A collective over a list of tensors in one call."""

    def __init__(
        self, func: Any, input_list: Any, output_list: Any = None, bucket_cap_mb: int = 160
    ) -> None:
        del bucket_cap_mb
        self._call, self._given, self._output = func, input_list, output_list

    def __call__(self) -> Any:
        """Return the result of the collective."""
        return self._call(self._given, self._output)


# `torch_xla.core.functions`: the same with gradients. That of a sum passes as it is to each
# replica, and that of a gather is this replica's part: nothing is exchanged on the way back.


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, reduce_type: str, scale: float, groups: Any
    ) -> torch.Tensor:
        result = all_reduce(reduce_type, value, scale, groups)
        ctx.save_for_backward(value, result)
        ctx.kind, ctx.scale = reduce_type, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        value, result = ctx.saved_tensors
        grad, zero = grads[0] * ctx.scale, torch.zeros_like(value)
        if ctx.kind == REDUCE_MUL:
            grad = grad * torch.where(value != 0, result / value, zero)
        elif ctx.kind in (REDUCE_MIN, REDUCE_MAX):
            grad = torch.where(value == result, grad, zero)
        elif ctx.kind != REDUCE_SUM:
            raise port_error(
                f"torch_xla.core.functions.all_reduce({ctx.kind!r}) has no gradient",
                remedy="reduce a detached tensor",
            )
        return grad, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return all_gather(value, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(replicas.size(), ctx.dim)[replicas.rank()].clone(), None


def all_reduce_function(
    reduce_type: str,
    value: torch.Tensor,
    scale: float = 1.0,
    groups: Any = None,
) -> torch.Tensor:
    """Return the reduced tensor, through which gradients flow."""
    if replicas.size() == 1:
        return all_reduce(reduce_type, value, scale, groups)
    replicas.refuse_traced("xm.all_reduce", [value])
    return _AllReduce.apply(value, reduce_type, scale, groups)


def all_gather_function(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the tensors of all replicas side by side, through which gradients flow."""
    if replicas.size() == 1:
        return all_gather(value, dim)
    replicas.refuse_traced("xm.all_gather", [value])
    return _AllGather.apply(value, dim)
