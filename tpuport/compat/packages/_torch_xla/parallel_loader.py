"""`torch_xla.distributed.parallel_loader`: loaders that put batches on the device."""

from collections.abc import Iterator
from typing import Any

import torch

from tpuport.compat.packages._torch_xla import spmd, xla_model
from tpuport.compat.packages._torch_xla.state import STATE, mark_step
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import is_accelerator

# From here on, each class is named and called as in torch_xla.


class PerDeviceLoader:
    """The batches on the device. Each `next` ends a step, as does the end of the batches."""

    def __init__(self, loader: "ParallelLoader", device: Any) -> None:
        self._loader, self._device = loader, device
        self._batches = iter(loader.cpu_loader)
        self._since = 0

    def __iter__(self) -> "PerDeviceLoader":
        return self

    def __next__(self) -> Any:
        return self.next()

    def __len__(self) -> int:
        return self._loader.per_device_samples()

    def next(self) -> Any:
        """Return the next batch."""
        if STATE.tracer_marked_step:
            STATE.tracer_marked_step = False
            self._since += 1
        elif self._since >= self._loader.batches_per_execution - 1:
            self._since = 0
            mark_step()
        else:
            self._since += 1
        try:
            batch = next(self._batches)
        except StopIteration:
            mark_step()
            raise
        with torch.no_grad():
            return self._loader.sent(batch, self._device)


class ParallelLoader:
    """A loader around a `DataLoader`, whose batches go to the device.

    The batches of a launched function are split over the devices along `batchdim`, if their number
    divides it. The arguments about threads and queues change nothing.
    """

    def __init__(
        self,
        cpu_loader: Any,
        devices: Any,
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
    ) -> None:
        del loader_prefetch_size, device_prefetch_size, host_to_device_transfer_threads
        for device in devices:
            if not is_accelerator(torch.device(device)):
                raise UsageError(f"ParallelLoader: expected an xla device, got {device}")
        if len(devices) != 1:
            raise UsageError(f"ParallelLoader: expected one device, got {list(devices)}")
        self.cpu_loader, self.batches_per_execution = cpu_loader, batches_per_execution
        self._batchdim, self._sharding = batchdim, input_sharding

    def per_device_loader(self, device: Any) -> PerDeviceLoader:
        """Return the batches on a device."""
        return PerDeviceLoader(self, device)

    def per_device_samples(self) -> int:
        """Return the number of batches."""
        return len(self.cpu_loader)

    def close(self) -> None:
        """Do nothing: no thread runs."""

    def sent(self, batch: Any, device: Any) -> Any:
        """Return a batch on the device."""
        if isinstance(self._sharding, dict):
            return self._sent_by_name(batch, device)
        # A tuple becomes a list, as torch_xla has it.
        there = xla_model.send_cpu_data_to_device([batch], device, self._sharding)[0]
        if STATE.splits_batches and self._sharding is None:
            for tensor in _tensors(there):
                spmd.split_over_devices(tensor, self._batchdim)
        return there

    def _sent_by_name(self, batch: Any, device: Any) -> dict[str, Any]:
        if not isinstance(batch, dict):
            raise UsageError(
                f"ParallelLoader: input_sharding is a dict, so a batch has to be one; it is a"
                f" {type(batch).__name__}"
            )
        missing = sorted(batch.keys() - self._sharding.keys())
        if missing:
            raise KeyError(f"Keys: {missing} are missing from input_sharding.")
        return {
            name: xla_model.send_cpu_data_to_device(tensor, device, self._sharding[name])[0]
            for name, tensor in batch.items()
        }


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    xla_model.utils.for_each_instance(batch, lambda v: isinstance(v, torch.Tensor), found.append)
    yield from found


class MpDeviceLoader:
    """A loader around a `DataLoader`, whose batches go to a device."""

    def __init__(self, loader: Any, device: Any, **kwargs: Any) -> None:
        self._loader, self._device, self._options = loader, device, kwargs

    def __iter__(self) -> PerDeviceLoader:
        loader = ParallelLoader(self._loader, [self._device], **self._options)
        return loader.per_device_loader(self._device)

    def __len__(self) -> int:
        return len(self._loader)
