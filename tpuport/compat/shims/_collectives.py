"""Collectives among one process: what each of them does to its own tensors.

They have PyTorch's signatures. The data is copied without gradients, `async_op=True`
returns a finished piece of work, and an unknown source or destination is an error.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from tpuport.compat.emulated.process_group import Done
from tpuport.tracing.core.errors import port_error

# From here on, each function is named and called as in torch.distributed.


def _finish(group: Any, async_op: bool, result: Any = None) -> Done | None:
    c10d._group_or_default_group(group)  # raises as PyTorch does when there is none
    return Done(result) if async_op else None


def _check_rank(name: str, *ranks: int | None) -> None:
    for rank in ranks:
        if rank not in (None, 0):
            raise port_error(
                f"torch.distributed.{name} names rank {rank} of a group of one process",
                remedy="ask for rank 0, or guard the call by get_world_size() > 1",
            )


def _only(name: str, items: Sequence[Any] | None, what: str) -> Any:
    if items is None or len(items) != 1:
        count = "none" if items is None else len(items)
        raise port_error(
            f"torch.distributed.{name}: {what} has {count} elements, expected 1, one for each"
            " process of the group",
            remedy="make it as long as get_world_size() says",
        )
    return items[0]


def _copy(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise port_error(
            f"torch.distributed.{name}: a result of shape {tuple(target.shape)} and {target.dtype}"
            f" cannot take {tuple(source.shape)} and {source.dtype}",
            remedy="make the output as large as the input times get_world_size(), which is 1",
        )
    with torch.no_grad():
        target.copy_(source.detach().reshape(target.shape))


def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    del op
    return _finish(group, async_op, tensor)


def all_reduce_coalesced(
    tensors: Any, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    del op, tensors
    return _finish(group, async_op)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    del op
    _check_rank("reduce", dst, group_dst)
    return _finish(group, async_op, tensor)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    _check_rank("broadcast", src, group_src)
    return _finish(group, async_op, tensor)


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    done = _finish(group, async_op, tensor_list)
    _copy("all_gather", _only("all_gather", tensor_list, "tensor_list"), tensor)
    return done


def all_gather_coalesced(
    output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Any:
    done = _finish(group, async_op)
    outputs = _only("all_gather_coalesced", output_tensor_lists, "output_tensor_lists")
    for target, source in zip(outputs, input_tensor_list, strict=True):
        _copy("all_gather_coalesced", target, source)
    return done


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
) -> Any:
    done = _finish(group, async_op, output_tensor)
    _copy("all_gather_into_tensor", output_tensor, input_tensor)
    return done


all_gather_single = _all_gather_base = all_gather_into_tensor


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    done = _finish(group, async_op, gather_list)
    _check_rank("gather", dst, group_dst)
    _copy("gather", _only("gather", gather_list, "gather_list"), tensor)
    return done


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    done = _finish(group, async_op, tensor)
    _check_rank("scatter", src, group_src)
    _copy("scatter", tensor, _only("scatter", scatter_list, "scatter_list"))
    return done


def reduce_scatter(
    output: Any, input_list: Any, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    del op
    done = _finish(group, async_op, output)
    _copy("reduce_scatter", output, _only("reduce_scatter", input_list, "input_list"))
    return done


def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    del op
    done = _finish(group, async_op, output)
    _copy("reduce_scatter_tensor", output, input)
    return done


reduce_scatter_single = _reduce_scatter_base = reduce_scatter_tensor


def all_to_all(
    output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Any:
    done = _finish(group, async_op, output_tensor_list)
    target = _only("all_to_all", output_tensor_list, "output_tensor_list")
    _copy("all_to_all", target, _only("all_to_all", input_tensor_list, "input_tensor_list"))
    return done


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    done = _finish(group, async_op, output)
    for sizes in (output_split_sizes, input_split_sizes):
        if sizes:
            _only("all_to_all_single", sizes, "a list of split sizes")
    _copy("all_to_all_single", output, input)
    return done


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    del device_ids
    return _finish(group, async_op)


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    del timeout, wait_all_ranks
    _finish(group, False)


def all_gather_object(object_list: Any, obj: Any, group: Any = None) -> None:
    _finish(group, False)
    _only("all_gather_object", object_list, "object_list")
    object_list[0] = copy.deepcopy(obj)


def broadcast_object_list(
    object_list: Any,
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    **rest: Any,
) -> None:
    del device, rest, object_list
    _finish(group, False)
    _check_rank("broadcast_object_list", src, group_src)


def gather_object(
    obj: Any,
    object_gather_list: Any = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    _finish(group, False)
    _check_rank("gather_object", dst, group_dst)
    _only("gather_object", object_gather_list, "object_gather_list")
    object_gather_list[0] = copy.deepcopy(obj)


def scatter_object_list(
    scatter_object_output_list: Any,
    scatter_object_input_list: Any = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    _finish(group, False)
    _check_rank("scatter_object_list", src, group_src)
    only = _only("scatter_object_list", scatter_object_input_list, "scatter_object_input_list")
    scatter_object_output_list[0] = copy.deepcopy(only)


def _refused(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise port_error(
            f"torch.distributed.{name} needs another process, and this is the only one",
            remedy="guard the call by get_world_size() > 1",
        )

    refuse.__name__ = name
    return refuse


_POINT_TO_POINT = (
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"),
    *("batch_isend_irecv", "split_group", "shrink_group"),
)

COLLECTIVES: dict[str, Any] = {
    **{
        function.__name__: function
        for function in (
            *(all_reduce, all_reduce_coalesced, reduce, broadcast, all_gather),
            *(all_gather_coalesced, all_gather_into_tensor, gather, scatter, reduce_scatter),
            *(reduce_scatter_tensor, all_to_all, all_to_all_single, barrier, monitored_barrier),
            *(all_gather_object, broadcast_object_list, gather_object, scatter_object_list),
        )
    },
    "all_gather_single": all_gather_single,
    "_all_gather_base": _all_gather_base,
    "reduce_scatter_single": reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_base,
    **{name: _refused(name) for name in _POINT_TO_POINT},
}
