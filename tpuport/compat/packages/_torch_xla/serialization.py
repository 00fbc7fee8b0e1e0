"""`torch_xla.utils.serialization`: a file with the structure, and a folder with the tensors."""

import shutil
from pathlib import Path
from typing import Any

import torch

from tpuport.compat.packages._torch_xla import xla_model
from tpuport.foundation.interop.device_mark import is_tagged


class TensorReference:
    """The number of a tensor that is in a file of its own."""

    # Pickled as torch_xla pickles it, so that each reads what the other wrote.
    __module__ = "torch_xla.utils.serialization"

    def __init__(self, tid: int) -> None:
        self.tid = tid


def _file(path: Any, number: int) -> Path:
    return Path(f"{path}.tensors") / f"tensor_{number}.pt"


def save(data: Any, path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """Save nested data, each tensor of the device in a file of its own, as `xm.save`."""
    if master_only and not xla_model.is_master_ordinal(local=not global_master):
        return
    folder = Path(f"{path}.tensors")
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir()

    def write(tensors: list[torch.Tensor]) -> list[TensorReference]:
        for number, tensor in enumerate(tensors):
            torch.save(tensor.detach().cpu(), _file(path, number))
        return list(map(TensorReference, range(len(tensors))))

    arena = xla_model.ToXlaTensorArena(
        write, lambda v: isinstance(v, torch.Tensor) and is_tagged(v)
    )
    torch.save(arena.transform(data), path)


def load(path: Any) -> Any:
    """Return what `save` saved, with the tensors on the CPU."""
    data = torch.load(path, weights_only=False)
    arena = xla_model.ToXlaTensorArena(
        lambda found: [torch.load(_file(path, one.tid)) for one in found],
        lambda v: isinstance(v, TensorReference),
    )
    return arena.transform(data)
