"""Collectives of `torch_xla.core.xla_model` among one replica, with torch_xla's signatures."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpuport.compat.packages._torch_xla.state import count
from tpuport.tracing.core.errors import port_error

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"
_KINDS = (REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX)


def _check(name: str, groups: Any = None, kind: str = REDUCE_SUM, shards: int = 1) -> None:
    count(f"xm.{name}")
    if kind not in _KINDS:
        raise port_error(
            f"xm.{name}: {kind!r} is no reduction", remedy=f"name one of {', '.join(_KINDS)}"
        )
    for group in groups or ():
        if list(group) != [0]:
            raise port_error(
                f"xm.{name} names the replicas {list(group)}, and there is one, 0",
                remedy="leave groups out, or make them from xr.world_size()",
            )
    if shards != 1:
        raise port_error(
            f"xm.{name} splits into {shards} parts, and there is one replica",
            remedy="make the number from xr.world_size(), which is 1",
        )


def _put(output: Any, values: Any) -> Any:
    """Write results to given outputs, and return those."""
    pairs = [(output, values)] if isinstance(output, torch.Tensor) else zip(output, values)  # noqa: B905
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)
    return output


def _each(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return [function(one) for one in value]


# From here on, each function is named and called as in torch_xla.


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Return a copy of a tensor, or the list itself: as torch_xla does without replicas."""
    del scale, pin_layout
    _check("all_reduce", groups, reduce_type)
    return inputs.clone() if isinstance(inputs, torch.Tensor) else inputs


def all_gather(
    value: Any,
    dim: int = 0,
    groups: Any = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
) -> Any:
    """Return a copy of the tensor or of each in a list, or write them to `output`."""
    del dim, pin_layout, channel_id, use_global_device_ids
    _check("all_gather", groups)
    return _each(value, torch.clone) if output is None else _put(output, value)


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
    """Return the input times `scale`, or write it to `output`."""
    del scatter_dim, pin_layout, channel_id, use_global_device_ids
    _check("reduce_scatter", groups, reduce_type, shard_count)
    scaled = _each(input, lambda one: one * scale)
    return scaled if output is None else _put(output, scaled)


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
    """Return a copy of the tensor."""
    del split_dimension, concat_dimension, pin_layout
    _check("all_to_all", groups, shards=split_count)
    return value.clone()


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return a copy of the tensor, or zeros if nothing is sent to replica 0."""
    for pair in pairs:
        _check("collective_permute", [[one] for one in pair])
    return value.clone() if pairs else torch.zeros_like(value)


def collective_broadcast(
    tensors: list[torch.Tensor],
    root_ordinal: int = 0,
    groups: Any = None,
    pin_layout: bool = True,
) -> None:
    """Leave the tensors as they are; only replica 0 can be the root."""
    del tensors, pin_layout
    _check("collective_broadcast", [*(groups or ()), [root_ordinal]])


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Leave the model as it is."""
    collective_broadcast([*model.parameters(), *model.buffers()])


def all_reduce_bucketized_gradients(
    gradients: Any, scale: float, groups: Any, pin_layout: bool, bucket_cap_mb: int = 0
) -> None:
    """Leave the gradients as they are."""
    del bucket_cap_mb
    all_reduce(REDUCE_SUM, list(gradients), scale, groups, pin_layout)


def reduce_gradients(optimizer: Any, groups: Any = None, pin_layout: bool = True) -> None:
    """Leave the gradients as they are: the average over one replica."""
    del optimizer, pin_layout
    _check("reduce_gradients", groups)


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


# `torch_xla.core.functions`: the same with gradients, which a copy has.


def all_reduce_function(
    reduce_type: str,
    value: torch.Tensor,
    scale: float = 1.0,
    groups: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Return a copy of a tensor, through which gradients flow."""
    return all_reduce(reduce_type, value, scale, groups, pin_layout)


def all_gather_function(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return a copy of a tensor, through which gradients flow."""
    return all_gather(value, dim)
