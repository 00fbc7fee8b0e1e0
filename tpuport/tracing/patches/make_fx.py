"""`make_fx` inside a trace: its graphs would hold the values of one call."""

from typing import Any

from torch.fx.experimental.proxy_tensor import _MakefxTracer

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error


class MakeFx(Shim):
    """`make_fx`, and so `torch.func.linearize`, are refused in a ported function."""

    TARGET = "torch.fx.experimental.proxy_tensor.make_fx"
    REASON = "it records operations below those that a trace sees, and folds its constants"

    def replacements(self) -> list[Replacement]:
        eager = _MakefxTracer.trace

        def trace(self: Any, *args: Any) -> Any:
            if current() is not None:
                raise port_error(
                    "make_fx, which torch.func.linearize uses, traces inside a ported function",
                    code="TPU403",
                    remedy="use torch.func.jvp(f, primals, tangents), once for each tangent",
                )
            return eager(self, *args)

        return [Replacement(_MakefxTracer, "trace", trace)]
