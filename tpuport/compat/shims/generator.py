"""`torch.Generator(device="cuda")`: a CPU generator that reports the accelerator as its device."""

from typing import Any

import torch

from tpuport.compat.emulated.device import is_accelerator, shown_device
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim

_EAGER = torch.Generator


def _restore(state: torch.Tensor) -> "CudaGenerator":
    made = CudaGenerator()
    made.set_state(state)
    return made


class CudaGenerator(_EAGER):
    """A generator of the emulated device.

    Its numbers are those of the CPU's generator with the same seed: eager PyTorch, with which a
    port is compared, runs there.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the accelerator."""
        return shown_device()

    def clone_state(self) -> "CudaGenerator":
        """Return a generator with the same state."""
        return _restore(self.get_state())

    def __reduce__(self) -> Any:
        return _restore, (self.get_state(),)


class _Meta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _EAGER)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _EAGER)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        if active() is not None and is_accelerator(device):
            return CudaGenerator()
        return _EAGER(device=device)


class _Generator(metaclass=_Meta):
    """Replacement of `torch.Generator`: every generator is an instance of it."""


class Generator(Shim):
    """A generator made for "cuda" reports that device; its numbers are the CPU generator's."""

    TARGET = "torch.Generator"
    REASON = "torch without CUDA cannot make a generator on it"
    REFERENCE = "torch.Generator(device='cpu') with the same seed"

    def replacements(self) -> list[Replacement]:
        return [Replacement(torch, "Generator", _Generator)]
