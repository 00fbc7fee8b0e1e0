"""`torch_xla.amp`: autocast, and optimizers that skip a step."""

from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import is_accelerator

# From here on, each class is named and called as in torch_xla.


class autocast(torch.amp.autocast_mode.autocast):
    """CUDA's autocast with bfloat16, whatever the hardware: a run on a CPU rehearses the TPU's."""

    def __init__(
        self,
        device: Any,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        cache_enabled: bool = True,
    ) -> None:
        if not is_accelerator(device if isinstance(device, str) else torch.device(device)):
            raise UsageError(f"torch_xla.amp.autocast: expected an xla device, got {device}")
        dtype = torch.bfloat16 if dtype is None else dtype
        if dtype != torch.bfloat16:
            raise UsageError(
                f"torch_xla.amp.autocast: expected torch.bfloat16, which is what TPUs multiply,"
                f" got {dtype}. What to do: leave dtype out"
            )
        super().__init__("cuda", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda", *args, **kwargs)


class _Skipping(torch.optim.Optimizer):
    """An optimizer whose `step` takes `found_inf`, and skips the step unless that is 0."""

    def step(self, closure: Any = None, found_inf: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        if found_inf is not None and found_inf.shape:
            raise ValueError("The found_inf tensor has to be scalar type")
        if found_inf is None or not bool(found_inf):
            return super().step(closure)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


class Adam(_Skipping, torch.optim.Adam):
    """`torch.optim.Adam`, whose `step` takes `found_inf`."""


class AdamW(_Skipping, torch.optim.AdamW):
    """`torch.optim.AdamW`, whose `step` takes `found_inf`."""


class SGD(_Skipping, torch.optim.SGD):
    """`torch.optim.SGD`, whose `step` takes `found_inf`."""
