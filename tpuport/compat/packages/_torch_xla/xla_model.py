"""`torch_xla.core.xla_model` but for its collectives."""

import io
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypedDict

import torch

from tpuport.compat.emulated import accelerator, replicas
from tpuport.compat.packages._torch_xla import device, runtime, utils
from tpuport.compat.packages._torch_xla.collectives import reduce_gradients
from tpuport.compat.packages._torch_xla.state import STATE, count
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import is_accelerator, is_tagged

# From here on, each function is named and called as in torch_xla.


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return the device."""
    del devkind
    return device.device(n)


def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    """Return the names of the devices that tensors can be on."""
    del max_devices
    return ["xla:0"]


def xla_real_devices(devices: Any = None) -> list[str]:
    """Return the names of devices by their hardware."""
    return [f"{xla_device_hw(one)}:0" for one in devices or get_xla_supported_devices()]


def xla_device_hw(device: Any) -> str:
    """Return the hardware of the device: "TPU", "CPU"."""
    if not is_accelerator(torch.device(device)):
        raise UsageError(f"xm.xla_device_hw: expected an xla device, got {device}")
    return runtime.device_type()


def xla_device_kind(device: Any = None) -> str:
    """Return jax's name for the kind of device."""
    del device
    return accelerator.name()


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the device."""
    return is_tagged(tensor)


def get_local_ordinal() -> int:
    """Return the number of this replica."""
    return replicas.rank()


def get_ordinal() -> int:
    """Return the number of this replica; before 2.7 its name for `runtime.global_ordinal`."""
    return replicas.rank()


def xrt_world_size() -> int:
    """Return the number of replicas; before 2.7 its name for `runtime.world_size`."""
    return replicas.size()


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this is replica 0: all are on one host."""
    del local
    return replicas.rank() == 0


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """Print, on the master."""
    if is_master_ordinal(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


def unlazy(tensors: Any) -> None:
    """Do nothing: no tensor is lazy."""
    del tensors


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step."""
    device.sync(wait, reset_scope)


def add_step_closure(
    closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False
) -> None:
    """Call a function at the next step boundary; in this thread also with `run_async`."""
    del run_async
    STATE.closures.append(lambda: closure(*args))


def wait_device_ops(devices: Any = ()) -> None:
    """Wait until everything that was given to the device is computed."""
    del devices
    runtime.wait_device_ops()


def set_replication(device: Any, devices: Any) -> None:
    """Do nothing: the replicas are those of the run."""
    del device, devices


def _fetch_gradients(optimizer: Any) -> list[torch.Tensor]:
    """Return the gradients of an optimizer's parameters; accelerate averages them itself."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.grad for param in params if param.grad is not None]


def optimizer_step(
    optimizer: Any,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Average the gradients over the replicas, step, and end the step if `barrier`."""
    reduce_gradients(optimizer, groups, pin_layout)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        device.sync()
    return loss


def save(
    data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False
) -> None:
    """Save with the tensors on the CPU, on the master alone unless `master_only` is False."""
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(_maybe_convert_to_cpu(data), file_or_path)


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    """Return nested data with the tensors on the CPU."""
    if not convert:
        return data
    return utils.for_each_instance_rewrite(
        data, lambda v: isinstance(v, torch.Tensor) and is_tagged(v), lambda v: v.detach().cpu()
    )


def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """Return nested data with the tensors on the device, sharded as the spec says."""

    def send(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.to(device)
        if input_sharding is not None and input_sharding.can_apply(made):
            input_sharding.apply(made)
        return made

    if type(datas) is torch.Tensor:
        datas = [datas]
    return utils.for_each_instance_rewrite(
        datas, lambda v: type(v) is torch.Tensor and not is_tagged(v), send
    )


def xla_rendezvous(payload: bytes = b"", ordinals: Any = None, tag: str | None = None) -> list[Any]:
    """Return the payloads of all replicas, once each is here."""
    count("xm.rendezvous")
    if not isinstance(payload, bytes):
        raise TypeError(f"`payload` must be bytes, not {type(payload)}")
    if ordinals and sorted(ordinals) != list(range(replicas.size())):
        raise UsageError(
            f"rendezvous {tag!r} names the replicas {ordinals}, and there are {replicas.size()},"
            " which all have to meet. What to do: leave them out"
        )
    device.sync()
    return replicas.exchange("xm.rendezvous", payload)


def rendezvous(tag: str, payload: bytes = b"", replicas: Any = ()) -> list[Any]:
    """Return the payloads of all replicas, once each is here."""
    return xla_rendezvous(payload, replicas or None, tag)


def do_on_ordinals(target: Callable[..., Any], data: Any = (), ordinals: Any = (0,)) -> Any:
    """Call a function with its data on the CPU on some replicas, and wait for those."""
    wanted = [ordinals] if isinstance(ordinals, int) else list(ordinals)
    given = _maybe_convert_to_cpu(data)
    result = target(*given) if replicas.rank() in wanted else None
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")
    return result


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[..., Any]) -> Any:
    """Reduce a list with copies of the data of all replicas, on the host."""
    stream = io.BytesIO()
    torch.save(_maybe_convert_to_cpu(data), stream)
    texts = rendezvous(tag, stream.getvalue())
    return reduce_fn([torch.load(io.BytesIO(text), weights_only=False) for text in texts])


class MemoryInfo(TypedDict):
    """The memory of a device in bytes."""

    bytes_used: int
    bytes_limit: int


def get_memory_info(device: Any = None) -> dict[str, int]:
    """Return the memory of the device in bytes, of the host if the device is a CPU."""
    del device
    found, limit = accelerator.statistics(), accelerator.total_memory()
    used = found.get("bytes_in_use", limit - accelerator.free_memory())
    peak = found.get("peak_bytes_in_use", used)
    return {"bytes_used": used, "bytes_limit": limit, "peak_bytes_used": peak}


def optimization_barrier_(tensors: Any) -> None:
    """Do nothing: what a checkpoint computes again is not merged with what it computed first."""
    del tensors


class RateTracker:
    """A count of samples, and their rates: since the last question (smoothed), and over all."""

    def __init__(self, smooth_factor: float | None = None) -> None:
        if smooth_factor is None:
            smooth_factor = float(os.environ.get("RATE_TRACKER_SMOOTHING", "0.4"))
        self._weight = 1 - smooth_factor
        self._begun = self._asked = time.time()
        self._new, self._total = 0.0, 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count samples."""
        self._new += count

    def rate(self) -> float:
        """Return the samples a second since the last call, smoothed; 0 if no time has passed."""
        now = time.time()
        if now <= self._asked:
            return 0.0
        rate = self._new / (now - self._asked)
        if self._rate is not None:
            rate = self._weight * rate + (1 - self._weight) * self._rate
        self._total, self._new = self._total + self._new, 0.0
        self._asked, self._rate = now, rate
        return rate

    def global_rate(self) -> float:
        """Return the samples a second since the beginning."""
        passed = time.time() - self._begun
        return (self._total + self._new) / passed if passed > 0 else 0.0


class ToXlaTensorArena:
    """A conversion of the tensors in nested data, all at once."""

    def __init__(self, convert_fn: Callable[..., Any], select_fn: Callable[[Any], bool]) -> None:
        self._convert, self._select = convert_fn, select_fn

    def transform(self, inputs: Any) -> Any:
        """Return the data with the selected tensors converted."""
        found: list[Any] = []
        utils.for_each_instance(inputs, self._select, found.append)
        made = dict(zip(map(id, found), self._convert(found) if found else [], strict=True))
        return utils.for_each_instance_rewrite(inputs, self._select, lambda v: made[id(v)])
