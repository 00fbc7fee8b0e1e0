"""`torch_xla.utils.checkpoint`, by torch's own."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and compute it again in the backward pass."""
    return torch.utils.checkpoint.checkpoint(function, *args, **{"use_reentrant": True, **kwargs})
