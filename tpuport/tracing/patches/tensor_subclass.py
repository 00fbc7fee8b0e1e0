"""`Tensor.as_subclass`, by which packages make a tensor one of a class of their own."""

from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor


class TensorSubclass(Shim):
    """A tensor of a trace has one class; another one is refused with the line."""

    TARGET = "torch.Tensor.as_subclass"
    REASON = "an object that torch made for a tensor cannot become one of another class"

    def replacements(self) -> list[Replacement]:
        eager = torch.Tensor.as_subclass

        def as_subclass(self: torch.Tensor, cls: Any) -> torch.Tensor:
            trace = current()
            known = trace.alias(self) if trace is not None else None
            traced = self if isinstance(self, TracedTensor) else known
            if traced is None:
                return eager(self, cls)
            if isinstance(traced, cls):
                return traced
            raise port_error(
                f"a tensor that depends on the program's inputs is made a {cls.__name__}, a class"
                " of tensors with functions of its own",
                code="TPU106",
                remedy=(
                    "compute with plain tensors; if the line is not yours, leave the class that"
                    " calls it to eager PyTorch: `tpuport run --eager NAME`"
                ),
            )

        return [Replacement(torch.Tensor, "as_subclass", as_subclass)]
