"""The cumulative average of batch norm's statistics: `1.0 / float(self.num_batches_tracked)`."""

from typing import Any

import torch
from torch.nn.modules import batchnorm

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.tensor import TracedTensor, item


class CumulativeAverage(Shim):
    """`float` of a traced tensor in the code of batch norm gives a traced number."""

    TARGET = "torch.nn.modules.batchnorm._BatchNorm.forward"
    REASON = "Python's float needs the number of batches, which is other at each call"

    def replacements(self) -> list[Replacement]:
        def number(value: Any) -> Any:
            is_traced = isinstance(value, TracedTensor)
            return torch.sym_float(item(value)) if is_traced else float(value)

        return [Replacement(batchnorm, "float", number)]
