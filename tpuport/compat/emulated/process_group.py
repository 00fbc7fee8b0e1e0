"""The process group of one process: rank 0 of 1, without a network; or that of the replicas.

PyTorch's own `fake` backend keeps the books (ranks, groups, meshes). It moves no data, so the
collectives themselves are replaced by `compat/shims/distributed.py`. Among replicas gloo does all.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from tpuport.compat.emulated import replicas
from tpuport.tracing.core.errors import port_error

# The backend that the code asked for, by the id of the group; kept as long as the default group.
_ASKED: dict[int, tuple[Any, str]] = {}
_STATE: dict[str, Any] = {"contexts": 0, "groups": 0, "ours": None, "excepthook": None}


class Done(dist.Work):
    """A finished collective, as `async_op=True` returns it."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Any]:
        """Return the tensors of the collective."""
        return [] if self._result is None else [self._result]

    def get_future(self) -> Any:
        """Return a future that holds the result already."""
        import torch

        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


def begin(original: Any, backend: Any, world_size: int, rank: int, timeout: Any) -> None:
    """Make the default group of the only process, or of the replicas.

    Args:
        original: PyTorch's own `init_process_group`.
        backend: The backend that the code asked for, which `get_backend` returns.
        world_size: The size that the code asked for, -1 to read the environment.
        rank: The rank that the code asked for, -1 to read the environment.
        timeout: Passed on.

    Raises:
        PortError: A launcher or the code asks for more than one process.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    asked = world_size if world_size >= 0 else int(os.environ.get("WORLD_SIZE", "1"))
    size = replicas.size()
    if asked != size or (rank > 0 and rank != replicas.rank()):
        raise _wrong_number(asked, rank)
    hook = sys.excepthook
    made = {"rank": replicas.rank(), "world_size": size, "timeout": timeout}
    if size == 1:
        original(backend="fake", store=HashStore(), **made)
    else:
        _STATE["groups"] += 1
        original(backend="gloo", store=replicas.store(f"group{_STATE['groups']}"), **made)
    sys.excepthook = hook  # PyTorch's own only puts the rank before each line
    _STATE["ours"] = c10d._get_default_group()
    note(_STATE["ours"], backend)


def _wrong_number(asked: int, rank: int) -> Exception:
    size = replicas.size()
    if size == 1:
        return port_error(
            f"init_process_group asks for {asked} processes; inside tpuport one process drives all"
            " chips of a host, and the compiler spreads the program over them",
            remedy="start one process per host, without torchrun (or with --nproc_per_node=1), and"
            " give the devices by a mesh",
        )
    return port_error(
        f"init_process_group asks for rank {rank} of {asked} processes, and this is replica"
        f" {replicas.rank()} of {size}",
        remedy=f"leave rank and world_size to the environment, or tpuport run --replicas {asked}",
    )


def note(group: Any, backend: Any) -> None:
    """Record which backend the code asked for."""
    name = "undefined" if backend is None else str(backend).lower()
    _ASKED[id(group)] = (group, name)


def asked_backend(group: Any) -> str | None:
    """Return the backend that the code asked for, if the group is one of ours."""
    group = c10d._get_default_group() if group is None else group
    found = _ASKED.get(id(group)) or _ASKED.get(id(_STATE["ours"]))
    if found is None:
        return None
    return "nccl" if found[1] == "undefined" else found[1]


def is_ours() -> bool:
    """Return whether the default group is the one made here."""
    return _STATE["ours"] is not None and c10d.GroupMember.WORLD is _STATE["ours"]


def is_alone() -> bool:
    """Return whether the default group is the one made here, of one process."""
    return is_ours() and replicas.size() == 1


def forget() -> None:
    """Drop all records of groups, which are gone."""
    _STATE["ours"] = None
    _ASKED.clear()


@contextlib.contextmanager
def ended_afterwards() -> Iterator[None]:
    """Destroy a group made in the block when the last of these blocks ends."""
    _STATE["contexts"] += 1
    try:
        yield
    finally:
        _STATE["contexts"] -= 1
        if _STATE["contexts"] == 0 and is_ours():
            dist.destroy_process_group()
            forget()
