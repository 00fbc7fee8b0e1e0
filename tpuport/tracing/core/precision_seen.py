"""The precision of a result: the tolerance of its dtype, and the dtypes it was computed in."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RTOL = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def tolerance(dtype: torch.dtype, rtol: float | None = None) -> float:
    """Return the accepted relative error for values of a dtype."""
    return rtol if rtol is not None else RTOL.get(dtype, 1e-4)


class Precision(TorchDispatchMode):
    """A dispatch mode that records the floating dtypes that eager torch computes in: `dtypes`.

    A float32 result computed in bfloat16 on the way only has bfloat16's precision.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in RTOL:
            self.dtypes.add(result.dtype)
        return result
