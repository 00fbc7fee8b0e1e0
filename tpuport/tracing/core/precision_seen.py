"""The precision of a result: the tolerance of its dtype, and the dtypes it was computed in."""

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

RTOL = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def tolerance(dtype: torch.dtype, rtol: float | None = None) -> float:
    """Return the accepted relative error for values of a dtype."""
    return rtol if rtol is not None else RTOL.get(dtype, 1e-4)


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def draws(func: Any) -> bool:
    """Return whether an op draws random numbers."""
    # Torch tags flash attention as random, but uses it only with dropout 0. Its backward needs
    # the logsumexp that the real kernel returns.
    return torch.Tag.nondeterministic_seeded in func.tags and func is not _FLASH


class Precision(TorchDispatchMode):
    """A dispatch mode that records the floating dtypes that eager torch computes in: `dtypes`.

    A float32 result computed in bfloat16 on the way only has bfloat16's precision. Also records
    whether an op draws from torch's own generator (`drew`), which code may set back afterwards.
    """

    # `torch.cond` and its like are run as they are; what they compute inside is not seen.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        self.drew = self.drew or (draws(func) and kwargs.get("generator") is None)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in RTOL:
            self.dtypes.add(result.dtype)
        return result
