"""`torch_xla.distributed.xla_multiprocessing`: a process is started already for each replica."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from tpuport.compat.emulated import replicas
from tpuport.compat.emulated.programs import PortWarning
from tpuport.compat.packages._torch_xla.state import STATE
from tpuport.foundation.errors import UsageError


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Call `fn(ordinal, *args)` in this process, as each replica of the run does.

    If there is one, and the host has several devices, each batch that a device loader gives it is
    split over them, as for `nprocs` processes with a part of the batch each.
    """
    del join, daemon, start_method
    if replicas.size() > 1:
        _check_number(nprocs)
        fn(replicas.rank(), *args)
        return
    devices = jax.local_device_count()
    if nprocs not in (None, 1, devices):
        raise UsageError(
            f"xmp.spawn(nprocs={nprocs}): this host has {devices} devices, and one process drives"
            " all of them. What to do: leave nprocs out for all devices, or 1 for one of them"
        )
    splits = nprocs != 1 and devices > 1
    if splits:
        warnings.warn(
            f"torch_xla: one process runs {getattr(fn, '__name__', fn)} on {devices} devices:"
            f" world_size() is 1, and each batch is split over the devices. To have the batches of"
            f" {devices} processes, make the batch {devices} times as large",
            PortWarning,
            stacklevel=3,
        )
    before, STATE.splits_batches = STATE.splits_batches, splits
    try:
        fn(0, *args)
    finally:
        STATE.splits_batches = before


def _check_number(nprocs: int | None) -> None:
    if nprocs not in (None, replicas.size()):
        raise UsageError(
            f"xmp.spawn(nprocs={nprocs}): the run has {replicas.size()} replicas. What to do: leave"
            f" nprocs out, or start it by tpuport run --replicas {nprocs}"
        )


class MpModelWrapper:
    """A holder of a model that is made before `spawn`, and moved in each process."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def to(self, device: Any) -> Any:
        """Return the model on a device."""
        self._model.to(device)
        return self._model


class MpSerialExecutor:
    """A runner of functions that must not run in several processes at once."""

    def run(self, fn: Callable[[], Any]) -> Any:
        """Return the result of a function, which one replica after another calls."""
        result = None
        for number in range(replicas.size()):
            if number == replicas.rank():
                result = fn()
            replicas.exchange("MpSerialExecutor.run", None)
        return result
