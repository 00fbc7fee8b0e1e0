"""Functions and methods of TorchScript: its interpreter calls `detach` for autograd of its own."""

from typing import Any

import torch
from torch.jit._recursive import wrap_cpp_module

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.patches._count import count


class TorchScript(Shim):
    """A scripted function is the Python function; in a scripted method, `detach` keeps gradients.

    After some calls with gradients, the interpreter detaches the operands of a part of the graph
    and gives the results gradients by itself, of which a trace sees the first half only.
    """

    TARGET = "torch.jit.ScriptFunction.__call__"
    REASON = "TorchScript's own autograd hides from a trace that results have gradients"

    def replacements(self) -> list[Replacement]:
        return [
            Replacement(kind, "__call__", _call_of(kind))
            for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod)
        ]


def _call_of(kind: Any) -> Any:
    eager = kind.__call__

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is None:
            return eager(self, *args, **kwargs)
        count(TorchScript.TARGET)
        source = getattr(self, "_torchdynamo_inline", None)
        if source is not None:
            return source(*args, **kwargs)
        _refuse_unseen(self)
        before, trace.in_script = trace.in_script, True
        try:
            return eager(self, *args, **kwargs)
        finally:
            trace.in_script = before

    return call


def _refuse_unseen(compiled: Any) -> None:
    """Refuse what TorchScript does where a trace does not see it.

    Raises:
        PortError: it reads parameters of its own, or calls `detach` itself.
    """
    owner = getattr(compiled, "owner", None)
    weights = () if owner is None else wrap_cpp_module(owner).parameters()
    problem = None
    if any(weight.requires_grad for weight in weights):
        problem = "reads parameters, which TorchScript keeps where they get no gradient here"
    elif "aten::detach" in str(compiled.inlined_graph):
        problem = "calls detach, which cannot be told from the calls of TorchScript's own autograd"
    if problem is not None:
        raise port_error(
            f"{compiled.name}, compiled by TorchScript, {problem}",
            code="TPU403",
            remedy="convert the module from before torch.jit.script or torch.jit.trace",
        )
