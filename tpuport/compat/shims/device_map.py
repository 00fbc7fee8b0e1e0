"""`from_pretrained(device_map="cuda")`: with one accelerator, the model is moved there."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim

# Ways to spread layers over several devices, which are all the same with one device.
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


def device_of(device_map: Any) -> Any:
    """Return the only device that a map names; None if there are several."""
    if isinstance(device_map, str):
        return "cuda" if device_map in _SPREAD else device_map
    if isinstance(device_map, dict):
        devices = {str(_device(value)) for value in device_map.values()}
        return devices.pop() if len(devices) == 1 else None
    return _device(device_map)


def _device(value: Any) -> Any:
    return f"cuda:{value}" if isinstance(value, int) else value


_REASON = "it needs accelerate, which spreads layers over GPUs; here there is one device"


class TransformersDeviceMap(Shim):
    """`transformers.PreTrainedModel.from_pretrained(device_map=...)`."""

    TARGET = "transformers.PreTrainedModel.from_pretrained"
    REASON = _REASON
    REFERENCE = "the same without device_map, then .to(device)"
    MODULE = "transformers.modeling_utils"

    def replacements(self) -> list[Replacement]:
        return _replaced(self.MODULE, "PreTrainedModel")


class DiffusersDeviceMap(Shim):
    """`diffusers.ModelMixin.from_pretrained(device_map=...)`."""

    TARGET = "diffusers.ModelMixin.from_pretrained"
    REASON = _REASON
    REFERENCE = "the same without device_map, then .to(device)"
    MODULE = "diffusers.models.modeling_utils"

    def replacements(self) -> list[Replacement]:
        return _replaced(self.MODULE, "ModelMixin")


class DiffusersPipelineDeviceMap(Shim):
    """`diffusers.DiffusionPipeline.from_pretrained(device_map=...)`."""

    TARGET = "diffusers.DiffusionPipeline.from_pretrained"
    REASON = _REASON
    REFERENCE = "the same without device_map, then .to(device)"
    MODULE = "diffusers.pipelines.pipeline_utils"

    def replacements(self) -> list[Replacement]:
        return _replaced(self.MODULE, "DiffusionPipeline")


class DiffusersOffload(Shim):
    """`enable_model_cpu_offload()` and the like move the pipeline to the accelerator and leave it
    there: offloading saves memory of a GPU, which is not there.
    """

    TARGET = "diffusers.DiffusionPipeline.enable_model_cpu_offload"
    REASON = "it needs accelerate's hooks, which move weights to a GPU and back at each call"
    REFERENCE = 'the same pipeline after .to("cuda")'
    MODULE = "diffusers.pipelines.pipeline_utils"

    def replacements(self) -> list[Replacement]:
        owner = importlib.import_module(self.MODULE).DiffusionPipeline
        return [
            Replacement(owner, name, _staying(vars(owner)[name]))
            for name in self._names(vars(owner))
        ]

    @staticmethod
    def _names(known: Iterable[str]) -> list[str]:
        return [
            n for n in ("enable_model_cpu_offload", "enable_sequential_cpu_offload") if n in known
        ]


class DiffusersGroupOffload(Shim):
    """`apply_group_offloading` and `enable_group_offload()` move the module to the device that it
    computes on, and leave it there.
    """

    TARGET = "diffusers.hooks.apply_group_offloading"
    REASON = "its hooks give weights other memory in the middle of a call, to save that of a GPU"
    REFERENCE = "the same module after .to(onload_device)"
    MODULE = "diffusers.hooks.group_offloading"

    def replacements(self) -> list[Replacement]:
        name = "apply_group_offloading"
        owner = importlib.import_module(self.MODULE)
        package = sys.modules.get("diffusers.hooks")
        owners = [one for one in (owner, package) if one is not None and hasattr(one, name)]
        loaded = _loaded(getattr(owner, name))
        return [Replacement(one, name, loaded) for one in owners]


def _loaded(original: Any) -> Any:
    @functools.wraps(original)
    def apply_group_offloading(module: Any, onload_device: Any, *args: Any, **kwargs: Any) -> None:
        if active() is None:
            original(module, onload_device, *args, **kwargs)
        else:
            module.to(onload_device)

    return apply_group_offloading


def _alone() -> bool:
    """Return whether these calls are answered here, and not by an installed accelerate."""
    return active() is not None and importlib.util.find_spec("accelerate") is None


def _replaced(module: str, name: str) -> list[Replacement]:
    owner = getattr(importlib.import_module(module), name)
    loading = _loading(vars(owner)["from_pretrained"])
    return [Replacement(owner, "from_pretrained", loading)]


def _loading(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = device_of(kwargs.get("device_map"))
        if device is None or not _alone():
            return function(cls, *args, **kwargs)
        for name in ("device_map", "max_memory", "offload_folder", "low_cpu_mem_usage"):
            kwargs.pop(name, None)
        loaded = function(cls, *args, **kwargs)
        # With output_loading_info there is a tuple.
        (loaded[0] if isinstance(loaded, tuple) else loaded).to(device)
        return loaded

    return classmethod(from_pretrained)


def _staying(original: Any) -> Any:
    @functools.wraps(original)
    def offload(self: Any, gpu_id: int | None = None, device: Any = None) -> None:
        if not _alone():
            return original(self, gpu_id, *([] if device is None else [device]))
        self.to("cuda" if device is None else device)
        return None

    return offload
