"""safetensors files opened for "cuda": read on the host, marked as on the accelerator."""

from typing import Any

import torch

from tpuport.compat.emulated.device import is_accelerator, tag
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim, copies


class _Slice:
    """A tensor in the file whose slices are read to the accelerator."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return tag(self._real[index].clone())


class _File:
    """An open file whose tensors are on the accelerator."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._given: set[str] = set()

    def __enter__(self) -> "_File":
        self._real.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._real.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file.

        The first time it is over the mapped file itself (private to this process), so that loading
        takes no second copy. Later it is a copy, as each is on a GPU: a write to one of them must
        not show in the other.
        """
        tensor = self._real.get_tensor(name)
        if name in self._given:
            tensor = tensor.clone()
        self._given.add(name)
        return tag(tensor)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the file."""
        return {name: self.get_tensor(name) for name in self._real.keys()}

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor of the file to take slices of."""
        return _Slice(self._real.get_slice(name))


class SafetensorsFiles(Shim):
    """`safe_open(..., device="cuda")`, and with it `safetensors.torch.load_file` and what
    transformers and diffusers load.
    """

    TARGET = "safetensors.safe_open"
    REASON = "it copies to a GPU through pinned memory, without torch's knowing"
    REFERENCE = "safetensors.safe_open(..., device='cpu')"
    MODULE = "safetensors"

    def copied(self) -> list[Any]:
        import safetensors

        return [safetensors.safe_open]

    def replacements(self) -> list[Replacement]:
        import safetensors

        eager = safetensors.safe_open

        def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
            there = framework in ("pt", "torch", "pytorch") and is_accelerator(device)
            if active() is None or not there:
                return eager(filename, framework, device=device, **options)
            return _File(eager(filename, framework, device="cpu", **options))

        return [
            Replacement(safetensors, "safe_open", safe_open),
            *copies(eager, safe_open, safetensors),
        ]
