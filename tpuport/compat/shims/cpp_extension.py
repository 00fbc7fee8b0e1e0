"""`torch.utils.cpp_extension`: kernels in CUDA cannot be built, which is refused with a reason."""

import functools
import sys
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.foundation.errors import UsageError
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.foundation.user_frames import user_line

_MODULE = "torch.utils.cpp_extension"


def _is_cuda(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call builds CUDA code, as torch finds it out."""
    if kwargs.get("with_cuda") is not None:
        return bool(kwargs["with_cuda"])
    if name == "load_inline":
        return bool(kwargs.get("cuda_sources", args[2] if len(args) > 2 else None))
    sources = kwargs.get("sources", args[1] if len(args) > 1 else ())
    named = (sources,) if isinstance(sources, str) else sources
    return any(str(source).endswith((".cu", ".cuh")) for source in named)


def _refusing(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        if active() is None or not _is_cuda(name, args, kwargs):
            return original(*args, **kwargs)
        what = kwargs.get("name", args[0] if args else "an extension")
        msg = (
            f"{user_line()}: {what} is built from CUDA code, which does not run on TPU. What to do:"
            " take the package's own PyTorch implementation where it has one (an option such as"
            " impl='ref', or what it does on the CPU), or write these functions with torch"
        )
        raise UsageError(msg)

    return build


class CppExtensions(Shim):
    """Extensions in C++ are built as ever; those in CUDA are refused.

    Packages that catch the error go on with an implementation of their own in PyTorch.
    """

    TARGET = "torch.utils.cpp_extension.load"
    REASON = "torch says that CUDA_HOME is not set, which tells nobody what to do"
    REFERENCE = "torch without CUDA refuses them too"
    MODULE = _MODULE

    def replacements(self) -> list[Replacement]:
        module = sys.modules[_MODULE]
        return [
            Replacement(module, name, _refusing(name, getattr(module, name)))
            for name in ("load", "load_inline")
        ]
