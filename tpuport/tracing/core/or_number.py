"""Tensors without dims in whose place eager PyTorch has a Python number on some path.

A sum that begins as `total = 0` and to which data decides whether to add a tensor is one. An
operation may give another dtype for the number, or have none: what follows the branch is then run
once for each of its outcomes.
"""

from collections.abc import Iterable
from typing import Any

import torch

# What Python does with a number and a tensor, or with two numbers.
_ARITHMETIC = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "neg", "abs"}
_ARITHMETIC |= {"pow", "remainder", "floor_divide", "where", "lt", "le", "gt", "ge", "eq", "ne"}


def check(func: Any, tensors: Iterable[Any], metas: Any) -> Any:
    """Return the mark of a result if it stands for a number as well, None if it does not.

    Args:
        func: an operation.
        tensors: its operands.
        metas: its result, as a meta tensor or several.

    Raises:
        BaseException: what the mark of an operand makes, as the operation gives something else
            for a number.
    """
    mark, others = None, []
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            found = getattr(tensor, "_unlike_number", None)
            mark = found or mark
            if found is None:
                others.append(tensor)
    if mark is None:
        return None
    if func._opname not in _ARITHMETIC:
        raise mark()
    # A number among the arguments of `where` is a tensor here.
    counted = [one for one in others if one.dim() or func._opname != "where"]
    floats = [one.dtype for one in counted if one.is_floating_point() or one.is_complex()]
    if metas.dtype is torch.bool and len(floats) == len(others):  # a comparison with floats
        return None
    if not others and metas.dtype.is_floating_point:
        return mark
    if metas.dtype not in floats:
        raise mark()
    return None


def refuse(value: Any) -> None:
    """Raise what follows where a tensor is to be made of a value, or a number of a tensor.

    Raises:
        BaseException: what its mark makes, if eager has a number of another dtype in its place.
    """
    mark = getattr(value, "_unlike_number", None)
    if mark is not None:
        raise mark()
