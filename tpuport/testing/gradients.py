"""Whether two functions give the same gradients, and results that share as much memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tpuport.testing.equivalence import Inputs, difference

Aspects = dict[str, Any]


def gradient_difference(
    before: Callable[..., Any], after: Callable[..., Any], args: Inputs, *, rtol: float = 0.0
) -> str | None:
    """How two functions differ in what values do not show, or None.

    That is: which results need a gradient, which are an argument or share its memory or that of
    another result, and what gradient the arguments get from the sum of all results. Where both
    raise, `equivalence.compare` says whether they raise the same.

    Args:
        before: A function.
        after: What should do the same.
        args: Arguments; those of floating point get a gradient.
        rtol: Largest error of a gradient relative to its largest magnitude.
    """
    expected, got = _aspects(before, args), _aspects(after, args)
    if expected is None or got is None:
        return None if expected is got else "only one of them raises where arguments need gradients"
    for name in expected:
        found = difference(expected[name], got[name], rtol=rtol if name == "gradients" else 0.0)
        if found is not None:
            return f"{name}: {found}"
    return None


def _aspects(function: Callable[..., Any], args: Inputs) -> Aspects | None:
    leaves = tuple(_leaf(arg) for arg in args)
    # What is written in place has to be no leaf.
    given = tuple(x * 1 if _has_gradient(x) else x for x in leaves)
    try:
        return _observed(tree_leaves(function(*given)), given, leaves)
    except Exception:  # any exception is the same here: what it is, is compared elsewhere
        return None


def _observed(results: list[Any], given: Inputs, leaves: Inputs) -> Aspects:
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    sources = [*(arg for arg in given if isinstance(arg, torch.Tensor)), *tensors]
    total = sum((x.double().nan_to_num().sum() for x in tensors if _has_gradient(x)), 0.0)
    return {
        "needs a gradient": [x.requires_grad for x in tensors],
        "is the same object": [[x is y for y in sources] for x in tensors],
        "shares memory": [[_memory(x) == _memory(y) for y in sources] for x in tensors],
        "gradients": _gradients(total, leaves),
    }


def _gradients(total: Any, leaves: Inputs) -> Any:
    """The gradients of leaves; the name of the exception where there are none."""
    try:
        if isinstance(total, torch.Tensor):
            total.backward()  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:  # what the backward pass needs was overwritten
        return type(error).__name__
    return [x.grad for x in leaves if _has_gradient(x)]


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
