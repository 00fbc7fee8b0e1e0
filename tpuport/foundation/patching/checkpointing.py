"""The replacement of `torch.utils.checkpoint.checkpoint`, whoever holds it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from tpuport.foundation.patching.shim import Replacement


def checkpoint_replaced(make: Callable[[Any], Any]) -> list[Replacement]:
    """Return the replacement of torch's `checkpoint` by what `make` gives.

    Objects hold the function where no search through modules finds it: transformers keeps
    `functools.partial(checkpoint, use_reentrant=...)` in an attribute of each layer. All of them
    hold a wrapper that asks its function's attribute `__dynamo_disable` what to call
    (`torch/_compile.py`), so that attribute is what is replaced.

    Args:
        make: gets the function that was called until now, and returns the one to call.
    """
    inner: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)
    return [
        Replacement(inner, "__dynamo_disable", make(vars(inner).get("__dynamo_disable", inner)))
    ]
