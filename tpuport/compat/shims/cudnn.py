"""cuDNN: recurrent layers ask it to pack their weights when they are on CUDA."""

from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim


class CudnnAcceptable(Shim):
    """No tensor is acceptable to cuDNN, so that recurrent layers leave their weights unpacked."""

    TARGET = "torch.backends.cudnn.is_acceptable"
    REASON = "a tensor says that it is on CUDA, but nothing of cuDNN is there"
    REFERENCE = "torch.backends.cudnn.is_acceptable of a CPU tensor: False"

    def replacements(self) -> list[Replacement]:
        def is_acceptable(tensor: Any) -> bool:
            del tensor
            return False

        return [Replacement(torch.backends.cudnn, "is_acceptable", is_acceptable)]
