"""`torch.inference_mode` inside a ported function."""

from typing import Any

import torch
from torch.autograd import grad_mode

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.patches._count import count


class InferenceMode(Shim):
    """`torch.inference_mode` in a trace switches gradients off, and back on where it is left."""

    TARGET = "torch.inference_mode"
    REASON = "torch keeps no count of the writes to tensors made in it, which a trace reads"

    def replacements(self) -> list[Replacement]:
        enter, leave = (vars(grad_mode.inference_mode)[n] for n in ("__enter__", "__exit__"))
        asked = torch.is_inference_mode_enabled
        entered: list[bool] = []

        def __enter__(mode: Any) -> None:
            if current() is None:
                return enter(mode)
            count(self.TARGET)
            entered.append(mode.mode)
            mode._inference_mode_context = torch.set_grad_enabled(not mode.mode)
            return None

        def __exit__(mode: Any, *error: Any) -> None:
            held = mode._inference_mode_context
            if not isinstance(held, torch.set_grad_enabled):
                return leave(mode, *error)
            entered.pop()
            return held.__exit__(*error)

        def is_inference_mode_enabled() -> bool:
            return entered[-1] if entered else asked()

        return [
            Replacement(grad_mode.inference_mode, "__enter__", __enter__),
            Replacement(grad_mode.inference_mode, "__exit__", __exit__),
            Replacement(torch, "is_inference_mode_enabled", is_inference_mode_enabled),
        ]
