"""`torch.nn.DataParallel` on the one accelerator of a process."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from tpuport.compat.emulated.accelerator import index_of
from tpuport.compat.shims._inside import inside
from tpuport.foundation.patching.shim import Replacement, Shim


def _there(value: Any) -> Any:
    return value.to("cuda") if isinstance(value, torch.Tensor) else value


def _scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
    del self
    for device in device_ids:
        index_of(device)
    return (tree_map(_there, tuple(inputs)),), (tree_map(_there, kwargs),)


class DataParallel(Shim):
    """The unsplit inputs go to the accelerator, and the module is called on them, as with
    one GPU. Sharding (`tpuport.sharding`) spreads the batch over chips.
    """

    TARGET = "torch.nn.DataParallel"
    REASON = "it copies with CUDA's streams, also to one GPU"
    REFERENCE = "torch.nn.DataParallel with one device: the module itself"

    def replacements(self) -> list[Replacement]:
        target = torch.nn.DataParallel
        return [Replacement(target, "scatter", inside(target.scatter, _scatter))]
