"""Equivalence of two functions in gradients and in the storage that results share."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tpuport.testing.equivalence import Inputs, difference

Aspects = dict[str, Any]


def gradient_difference(
    before: Callable[..., Any], after: Callable[..., Any], args: Inputs, *, rtol: float = 0.0
) -> str | None:
    """Describe how two functions differ in gradients and aliasing; return None if they agree.

    Compared are: the results that require a gradient, the results that are an argument or share
    storage with one or with another result, and the gradients of the arguments from the sum of all
    results. If both raise, the exceptions are left to `equivalence.compare`.

    Args:
        before: The original function.
        after: The function that should be equivalent.
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
    # Autograd refuses to write to a leaf in place, so the function gets copies that are not leaves.
    given = tuple(x * 1 if _has_gradient(x) else x for x in leaves)
    try:
        return _observed(tree_leaves(function(*given)), given, leaves)
    except Exception:  # which exception it is, `equivalence.compare` checks
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
    """Return the gradients of leaves, or the name of the exception of the backward pass."""
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
