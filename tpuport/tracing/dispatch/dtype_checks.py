"""Errors that eager raises for the dtypes of operands, and for dims without elements.

PyTorch's kernels for the CPU make these checks. Its meta functions, which check everything else, do
not. Where an argument is int32, int32 passes for int64: the argument may be an array of JAX, which
has no int64 by default, and in a branch the error would decide the branch.
"""

from collections.abc import Callable
from typing import Any

import torch

_WHOLE = (torch.int32, torch.int64)
_LONG = (torch.int64,)
_INDICES = (torch.int64, torch.int32, torch.uint8, torch.bool)
NAMES = {
    **{torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int"},
    **{torch.int64: "Long", torch.bool: "Bool", torch.float16: "Half", torch.float32: "Float"},
    **{torch.float64: "Double", torch.bfloat16: "BFloat16"},
}


def _raised(error: type[Exception], text: str) -> Callable[[str, torch.dtype], Exception]:
    def make(name: str, dtype: torch.dtype) -> Exception:
        return error(text.format(name=name, dtype=NAMES.get(dtype, dtype)))

    return make


_long = _raised(RuntimeError, "{name}_(): Expected a long tensor for index, but got {dtype}")
_whole = _raised(RuntimeError, "{name}_(): Expected dtype int32/int64 for index but got: {dtype}")
_index = _raised(IndexError, "tensors used as indices must be long, int, byte or bool tensors")
_target = _raised(RuntimeError, "expected target dtype to be Long or Byte, but got {dtype}")
_fill = _raised(IndexError, "index_fill_(): Expected dtype int64 for index.")
_select = _raised(RuntimeError, "index_select(): Expected dtype int32 or int64 for index")
_scalar = _raised(RuntimeError, "expected scalar type Long but found {dtype}")


def _target_2d(name: str, dtype: torch.dtype) -> Exception:
    return (_scalar if dtype is torch.uint8 else _target)(name, dtype)


_no_bools = _raised(RuntimeError, "{name}(): does not support bool input")
_topk = _raised(RuntimeError, "topk does not support bool dtypes on CPU")
_spread = _raised(RuntimeError, "std and var only support floating point and complex dtypes")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOATING = (*_FLOATING, torch.complex64, torch.complex128)
_NUMBERS = (*_FLOATING, *_WHOLE, torch.uint8, torch.int8, torch.int16)

# By ATen op: its argument, the dtypes that this may have, and the error for others.
DTYPES: dict[str, tuple[str, tuple[torch.dtype, ...], Callable[[str, torch.dtype], Exception]]] = {
    "index_fill": ("index", _LONG, _fill),
    "index_copy": ("index", _LONG, _long),
    "put": ("index", _LONG, _long),
    "index_add": ("index", _WHOLE, _whole),
    "index_reduce": ("index", _WHOLE, _whole),
    "index_select": ("index", _WHOLE, _select),
    "index": ("indices", _INDICES, _index),
    "index_put": ("indices", _INDICES, _index),
    "index_put_": ("indices", _INDICES, _index),
    "_index_put_impl_": ("indices", _INDICES, _index),
    "nll_loss_forward": ("target", (*_LONG, torch.uint8), _target),
    "nll_loss2d_forward": ("target", _LONG, _target_2d),
    "multi_margin_loss": ("target", _LONG, _scalar),
    "argmax": ("self", _NUMBERS, _no_bools),
    "argmin": ("self", _NUMBERS, _no_bools),
    "topk": ("self", _NUMBERS, _topk),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), ("self", _FLOATING, _spread)),
}
# By ATen op: the places of two operands of one dtype, and the error for two dtypes.
_ALIKE = {
    "lerp": (0, 1, "expected dtype {a} for `end` but got dtype {b}"),
    "linalg_cross": (0, 1, "expected scalar type {a} but found {b}"),
    "masked_scatter": (
        *(0, 2),
        "masked_scatter: expected self and source to have same dtypes but got {a} and {b}",
    ),
    "index_put": (
        *(0, 2),
        "Index put requires the source and destination dtypes match, got {a} for the destination"
        " and {b} for the source.",
    ),
}
_ALIKE |= {f"{name}_": pair for name, pair in _ALIKE.items()}
_ALIKE["_index_put_impl_"] = _ALIKE["index_put"]
_SUBTRACT = ("sub", "sub_", "rsub")
# By ATen op: the place of the dim, and what it is by default.
_REDUCE: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("amax", "amin", "aminmax"), (1, None)),
    "kthvalue": (2, -1),
}
CHECKED = DTYPES.keys() | _ALIKE.keys() | {*_SUBTRACT, *_REDUCE}


def _check_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise eager's error for a dim without elements: the meta function has another class."""
    place, default = _REDUCE[func._opname]
    source, given = args[0], args[place] if len(args) > place else kwargs.get("dim", default)
    for dim in given if isinstance(given, (list, tuple)) else (given,):
        if dim is not None and source.dim() and not torch.Tensor.size(source)[dim]:
            name = func._opname if func._opname == "aminmax" else f"{func._opname}()"
            dim = dim % source.dim() if func._opname in ("aminmax", "kthvalue") else dim
            raise IndexError(f"{name}: Expected reduction dim {dim} to have non-zero size.")


def _check_alike(func: Any, args: tuple[Any, ...]) -> None:
    first, second, text = _ALIKE.get(func._opname, (0, 0, ""))
    if second < len(args) and all(isinstance(args[i], torch.Tensor) for i in (first, second)):
        dtypes = [args[i].dtype for i in (first, second)]
        if dtypes[0] != dtypes[1] and not _fills_a_mask(func, *args):
            a, b = (NAMES.get(dtype, dtype) for dtype in dtypes)
            raise RuntimeError(text.format(a=a, b=b))


def _fills_a_mask(func: Any, *args: Any) -> bool:
    """Return whether an op is an `index_put` that eager runs as `masked_fill`, with a cast."""
    if "index_put" not in func._opname:
        return False
    _, indices, value, *accumulate = args
    masks = [index for index in indices if index is not None]
    masked = len(masks) == 1 and masks[0].dtype in (torch.bool, torch.uint8)
    return masked and value.numel() == 1 and not any(accumulate[:1])


def _check_subtraction(args: tuple[Any, ...]) -> None:
    bools = [
        one.dtype is torch.bool if isinstance(one, torch.Tensor) else _is_bool(one)
        for one in args[:2]
    ]
    if any(bools):
        what = "two bool tensors" if all(bools) else "a bool tensor"
        raise RuntimeError(f"Subtraction, the `-` operator, with {what} is not supported.")


def _is_bool(number: Any) -> bool:
    return isinstance(number, (bool, torch.SymBool))


def check_dtypes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_int32: bool
) -> None:
    """Raise what eager raises for the dtypes of the operands of an op.

    `takes_int32` says whether an argument of the program is int32.
    """
    if func._opname in _SUBTRACT:
        _check_subtraction(args)
        return
    if func._opname in _REDUCE:
        _check_elements(func, args, kwargs)
    _check_alike(func, args)
    if func._opname not in DTYPES:
        return
    name, allowed, error = DTYPES[func._opname]
    place = [argument.name for argument in func._schema.arguments].index(name)
    given = args[place] if place < len(args) else kwargs.get(name)
    for one in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(one, torch.Tensor) and one.dtype not in allowed:
            if one.dtype is torch.int32 and takes_int32 and torch.int64 in allowed:
                continue
            raise error(func._opname, one.dtype)
