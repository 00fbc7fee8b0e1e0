"""Gradients that `torch.library.register_autograd` has registered for an operator."""

from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import flat
from tpuport.tracing.patches._count import count


class LibraryGradients(Shim):
    """An operator with traced tensors runs as the `torch.autograd.Function` that torch makes of
    its registered backward, as it does in eager where an argument requires a gradient.
    """

    TARGET = "torch.library.register_autograd"
    REASON = "C++ does not see that traced tensors require gradients, and would run forward alone"

    def replacements(self) -> list[Replacement]:
        # The code that torch makes of a backward asks this, and no other code does.
        asked = torch._C._any_requires_grad

        def _any_requires_grad(*args: Any, **kwargs: Any) -> bool:
            traced = (t for t in flat(args, kwargs) if isinstance(t, TracedTensor))
            if current() is None or not any(t.requires_grad for t in traced):
                return asked(*args, **kwargs)
            count(self.TARGET)
            return True

        return [Replacement(torch._C, "_any_requires_grad", _any_requires_grad)]
