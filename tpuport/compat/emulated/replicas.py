"""The replicas of `tpuport run --replicas N`: processes that run the same script, side by side.

They exchange data on the host, by gloo, and each has all data of all others before it computes a
result: in the order of the replicas, so that all have the same bits. A process that was started
without `--replicas` is the one replica of a world of 1, and exchanges nothing.
"""

import contextlib
import datetime
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore, PrefixStore

from tpuport.compat.emulated.replica_processes import VARIABLE
from tpuport.foundation.interop.device_mark import mark_of, tag
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import tensors_in

_TIMEOUT = datetime.timedelta(minutes=30)
# If another replica has failed, the parent ends this one within that time. Its error is then the
# only one to be seen.
_GRACE_SECONDS = 3.0
END = "the end of the script"


@dataclass
class _World:
    """The replicas.

    Attributes:
        rank: The number of this one.
        size: How many there are.
        folder: Where they find each other.
        group: The process group of gloo, once it is needed.
    """

    rank: int = 0
    size: int = 1
    folder: str = ""
    group: Any = None


_WORLD = _World()


def rank() -> int:
    """Return the number of this replica."""
    return _WORLD.rank


def size() -> int:
    """Return how many replicas there are."""
    return _WORLD.size


def join() -> None:
    """Become the replica that the parent process says, if it says so, and end when it ends."""
    said = os.environ.pop(VARIABLE, None)
    if said is None:
        return
    number, count, pipe, folder = said.split(":", 3)
    _WORLD.rank, _WORLD.size, _WORLD.folder = int(number), int(count), folder
    threading.Thread(target=_end_with_parent, args=(int(pipe),), daemon=True).start()


def _end_with_parent(pipe: int) -> None:
    # Nobody writes: it returns once the parent has gone, however it went.
    os.read(pipe, 1)
    os._exit(1)


def leave() -> None:
    """Wait for the other replicas to end, too."""
    if _WORLD.size > 1:
        exchange(END, None)


def store(name: str) -> Any:
    """Return a store of torch that all replicas share."""
    file = FileStore(os.path.join(_WORLD.folder, "store"), _WORLD.size)
    return PrefixStore(name, file)


def exchange(what: str, value: Any) -> list[Any]:
    """Return the values of all replicas in their order, once each has called this.

    Args:
        what: The name of the operation, for messages.
        value: Anything that can be pickled, with tensors.

    Raises:
        PortError: a replica has ended, or is in another operation.
    """
    if _WORLD.size == 1:
        return [value]
    texts = _gathered(what, pickle.dumps((what, _packed(value)), protocol=5))
    found = [pickle.loads(text) for text in texts]
    others = {name: number for number, (name, _) in reversed(list(enumerate(found)))}
    if len(others) > 1:
        places = " and ".join(f"replica {n} in {name}" for name, n in sorted(others.items()))
        raise port_error(
            f"replicas wait for each other in different places: {places}",
            remedy="let each replica call the same collectives in the same order, with as many"
            " batches on each (drop_last=True, or a DistributedSampler)",
        )
    return [_unpacked(value) for _, value in found]


def _gathered(what: str, text: bytes) -> list[bytes]:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        own = torch.from_numpy(np.frombuffer(bytearray(text), np.uint8))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(_WORLD.size)]
        _run(what, lengths, torch.tensor([len(text)]))
        longest = max(int(one) for one in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(_WORLD.size)]
        _run(what, texts, torch.nn.functional.pad(own, (0, longest - len(text))))
        pairs = zip(texts, lengths, strict=True)
        return [one[: int(length)].numpy().tobytes() for one, length in pairs]


def _run(what: str, targets: list[torch.Tensor], own: torch.Tensor) -> None:
    with ending_together(what):
        if _WORLD.group is None:
            kind = torch.distributed.ProcessGroupGloo
            _WORLD.group = kind(store("tpuport"), _WORLD.rank, _WORLD.size, _TIMEOUT)
        _WORLD.group.allgather([targets], [own]).wait()


@contextlib.contextmanager
def ending_together(what: str) -> Any:
    """Explain an error of gloo: it is raised where another replica has gone.

    Args:
        what: The name of the operation.
    """
    try:
        yield
    except RuntimeError as error:
        # Those of other modules (PortError) are not gloo's.
        if type(error).__module__ not in ("builtins", "torch", "torch.distributed"):
            raise
        time.sleep(_GRACE_SECONDS)
        raise port_error(
            f"{what} waits for all {_WORLD.size} replicas, and one of them has gone or is stuck:"
            f" {str(error).splitlines()[0]}",
            remedy="let each replica run to the end, with the same collectives in the same order",
        ) from error


@dataclass
class _Packed:
    """A tensor as bytes: numpy has no bfloat16."""

    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]


def _packed(value: Any) -> Any:
    """Return nested data with its tensors as bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return _Packed(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))
    return _each(value, _packed)


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Packed):
        # `frombuffer` refuses no bytes at all.
        return torch.from_numpy(value.data.copy()).view(value.dtype).reshape(value.shape)
    return _each(value, _unpacked)


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(function, value))
    if type(value) is dict:
        return {name: function(one) for name, one in value.items()}
    return value


def exchange_tensors(what: str, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors of all replicas, in their order, on the host.

    Raises:
        PortError: they differ in number, shape or dtype, or are those of a program.
    """
    refuse_traced(what, tensors)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        found = exchange(what, list(tensors))
    kinds = [[(tuple(one.shape), one.dtype) for one in each] for each in found]
    for number, each in enumerate(kinds):
        if each != kinds[0]:
            other = next((p for p in zip(kinds[0], each, strict=False) if p[0] != p[1]), None)
            said = (
                f"{len(kinds[0])} tensors on replica 0 and {len(each)} on replica {number}"
                if other is None
                else f"{other[0]} on replica 0 and {other[1]} on replica {number}"
            )
            raise port_error(
                f"{what} got tensors of other shapes or dtypes on each replica: {said}",
                remedy="give it the same on each: drop_last=True for batches, and zeros for a"
                " gradient that only some replicas have",
            )
    return found


def refuse_traced(what: str, values: Any) -> None:
    """Raise an error for tensors of a program, which runs on one replica alone.

    Raises:
        PortError: one of the tensors belongs to a trace.
    """
    if any(isinstance(one, TracedTensor) for one in tensors_in(values)):
        raise port_error(
            f"{what} is called inside of a module that becomes a program, and a program runs on one"
            f" of {_WORLD.size} replicas",
            remedy="call it outside of the module, or leave the module's class to eager PyTorch"
            " (--eager)",
        )


def written(result: Any, given: Any) -> Any:
    """Note that torch's C++ wrote to the tensors given, and put its results where those are."""
    marks = [mark_of(one) for one in tensors_in(given)]
    for mark in marks:
        if mark is not None:
            mark.writes += 1
    for one in tensors_in([result]) if any(marks) else ():
        tag(one)
    return result


def copy_from_first(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Write the tensors of replica 0 to those of the others."""
    values = exchange_tensors(what, tensors)[0]
    with torch.no_grad():
        for target, value in zip(tensors, values, strict=True):
            target.copy_(value)


def average_gradients(what: str, params: Sequence[torch.Tensor]) -> None:
    """Write the average over the replicas to the gradients; one that is missing counts as 0."""
    has = exchange(what, [param.grad is not None for param in params])
    held = [p for p, *known in zip(params, *has, strict=True) if any(known)]
    with torch.no_grad():
        for param in held:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        found = exchange_tensors(what, [param.grad for param in held if param.grad is not None])
        for param, parts in zip(held, zip(*found, strict=True), strict=True):
            assert param.grad is not None
            param.grad.copy_(sum(parts[1:], parts[0]) / _WORLD.size)
