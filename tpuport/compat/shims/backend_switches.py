"""The switches that choose a kernel of attention, or the precision of products: kept, not obeyed.

They choose between ways to compute the same numbers on a GPU. On the CPU, the reference of a port,
some would leave attention without any kernel, or compute products in less than float32.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.attention

from tpuport.compat.emulated.settings import active
from tpuport.compat.shims._inside import functions
from tpuport.foundation.patching.shim import Replacement, Shim, copies

_SWITCHES = {
    "enable_flash_sdp": "flash_sdp_enabled",
    "enable_mem_efficient_sdp": "mem_efficient_sdp_enabled",
    "enable_math_sdp": "math_sdp_enabled",
    "enable_cudnn_sdp": "cudnn_sdp_enabled",
}


class _Switches:
    """The values that user code has set, by the name of the function that returns them."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def setter(self, asked_by: str) -> Any:
        """Return a function that keeps the value that it is given."""

        def turn(value: Any) -> None:
            self.state[asked_by] = value

        return turn

    def getter(self, name: str, default: Any) -> Any:
        """Return a function that returns the value that was set, or the default."""
        return lambda: self.state.get(name, default)

    def __delattr__(self, name: str) -> None:
        # The last context deletes the attribute at its end, and the values go with it.
        object.__delattr__(self, name)
        self.state.clear()


_KEPT = _Switches()


class BackendSwitches(Shim):
    """`torch.backends.cuda.enable_*_sdp`, `sdpa_kernel`, `sdp_kernel` and
    `set_float32_matmul_precision` are settable without effect. Attention has one way to be computed
    here, and float32 products are float32.
    """

    TARGET = "torch.nn.attention.sdpa_kernel"
    REASON = "a choice of GPU kernels would leave the CPU's attention without any"
    REFERENCE = "torch.nn.functional.scaled_dot_product_attention without the switches"

    def copied(self) -> list[Any]:
        return [torch.nn.attention.sdpa_kernel]

    def replacements(self) -> list[Replacement]:
        backends = torch.backends.cuda
        table = {name: _KEPT.setter(asks) for name, asks in _SWITCHES.items()}
        table |= {asks: _KEPT.getter(asks, True) for asks in _SWITCHES.values()}
        precision = "get_float32_matmul_precision"
        matmul = {
            "set_float32_matmul_precision": _KEPT.setter(precision),
            precision: _KEPT.getter(precision, "highest"),
        }
        chooses = _context(torch.nn.attention.sdpa_kernel)
        return [
            *functions(backends, table),
            *functions(torch, matmul),
            # Recurrent layers call it to decide whether to lay out their weights for cuDNN.
            *functions(torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
            Replacement(torch.nn.attention, "sdpa_kernel", chooses),
            *copies(torch.nn.attention.sdpa_kernel, chooses, torch.nn.attention),
            Replacement(backends, "sdp_kernel", _context(backends.sdp_kernel)),
            Replacement(_KEPT, "in_force", True),
        ]


def _context(eager: Any) -> Any:
    @contextlib.contextmanager
    def sdpa_kernel(*args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        if active() is None:
            with eager(*args, **kwargs) as given:
                yield given
        else:
            yield {}

    return sdpa_kernel
