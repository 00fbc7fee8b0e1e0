"""`torch.profiler` asked for CUDA's activity, which records the host's."""

import functools
from typing import Any

from torch.autograd import profiler

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim


class Profiling(Shim):
    """Torch's profiler sees no accelerator here, nor its kernels; jax's profiler sees the programs
    (`tpuport run --profile`).
    """

    TARGET = "torch.profiler.profile"
    REASON = "it would look for CUDA's events, as torch.cuda says that there is a device"
    REFERENCE = "torch.profiler.profile(activities=[ProfilerActivity.CPU])"

    def replacements(self) -> list[Replacement]:
        eager = profiler.profile.__init__

        @functools.wraps(eager)
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            if active() is not None:
                options.pop("use_cuda", None)
                if options.get("use_device") == "cuda":
                    options["use_device"] = None
            eager(self, *args, **options)

        return [Replacement(profiler.profile, "__init__", __init__)]
