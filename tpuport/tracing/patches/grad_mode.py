"""`torch.set_grad_enabled` of a value that depends on the program's inputs."""

from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.tensor import TracedTensor


class GradMode(Shim):
    """The mode is a branch of the program."""

    TARGET = "torch.set_grad_enabled"
    REASON = "the mode is read in C++, which takes no traced truth value"

    def replacements(self) -> list[Replacement]:
        original = torch.set_grad_enabled.__init__

        def init(self: Any, mode: Any) -> None:
            if isinstance(mode, (TracedTensor, *sym_numbers.SYMBOLIC)):
                mode = bool(mode)
            original(self, mode)

        return [Replacement(torch.set_grad_enabled, "__init__", init)]
