"""Rules for the sizes and dtypes of the results of common ops in the plain case.

A rule returns None where it is not sure: torch then decides.
"""

from collections.abc import Callable
from typing import Any

import torch

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.tensor import meta_of
from tpuport.tracing.dispatch.meta_strides import (
    LAST,
    as_convolved,
    broadcast,
    has_channels_last,
    pointwise_strides,
)

_Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


RULES: dict[str, _Rule] = {}


def _made(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_contiguous()


BOOLEAN = {
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor",
    "isnan", "isinf", "isfinite", "isposinf", "isneginf",
}  # fmt: skip
# Ops whose result on bools is bool in eager.
_OF_BOOLS = BOOLEAN | {
    "add", "mul", "where", "masked_fill", "fill", "bitwise_not", "bitwise_and", "bitwise_or",
    "bitwise_xor", "maximum", "minimum",
}  # fmt: skip


SAME_DTYPE = {
    "add", "sub", "rsub", "mul", "neg", "abs", "clamp", "clamp_min", "clamp_max", "maximum",
    "minimum", "pow", "where", "masked_fill", "fill", "bitwise_not", "bitwise_and", "bitwise_or",
    "bitwise_xor", "relu", "addcmul", "addcdiv", "lerp", "square", "round", "floor", "ceil",
    "trunc", "sign", "fmod", "remainder",
}  # fmt: skip


FLOATING = {
    "div", "exp", "exp2", "expm1", "log", "log1p", "log2", "sin", "cos", "tan", "tanh", "sinh",
    "cosh", "sigmoid", "sqrt", "rsqrt", "reciprocal", "erf", "erfc", "gelu", "silu", "elu",
    "softplus", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "mish", "log_sigmoid_forward",
    "celu", "selu", "relu6", "atan2",
}  # fmt: skip


# Ops for which a number is a tensor without dims.
_OF_NUMBERS = {
    "add", "sub", "rsub", "mul", "div", "fmod", "remainder", "where", "eq", "ne", "lt", "le", "gt",
    "ge", "bitwise_and", "bitwise_or", "bitwise_xor",
}  # fmt: skip


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Infer the result of a pointwise op.

    The plain case is operands of one dtype (and Python scalars that do not widen it).
    """
    name = func._opname
    if kwargs and any(
        k not in ("alpha", "rounding_mode", "approximate", "value") or isinstance(v, torch.Tensor)
        for k, v in kwargs.items()
    ):
        return None
    if name == "log_sigmoid_forward" or (
        name not in BOOLEAN and name not in SAME_DTYPE and name not in FLOATING
    ):
        return None
    operands = args
    if name in ("where", "masked_fill"):
        mask = args[0] if name == "where" else args[1]
        if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
            return None
        operands = args[1:] if name == "where" else (args[0], *args[2:])
    dtype = _common(name, operands)
    if dtype is None or not _takes(name, dtype, args):
        return None
    if name in BOOLEAN:
        dtype = torch.bool
    elif name == "div" and not dtype.is_floating_point:
        if kwargs:
            return None
        dtype = torch.get_default_dtype()
    return _pointwise_result(name, dtype, args, operands)


def _pointwise_result(
    name: str, dtype: torch.dtype, args: tuple[Any, ...], operands: tuple[Any, ...]
) -> torch.Tensor | None:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    shape = broadcast(tensors)
    if shape is None:
        return None
    if name in ("masked_fill", "fill"):  # which write to a copy
        return _made(shape, dtype) if _plain(args[0]) and shape == tuple(args[0].shape) else None
    if name == "pow" and not isinstance(args[0], torch.Tensor):  # ATen makes its result first
        return _made(shape, dtype)
    numbers = name in _OF_NUMBERS and any(not isinstance(o, torch.Tensor) for o in operands)
    strides = pointwise_strides(shape, tensors, alike=not numbers or not shape)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _takes(name: str, dtype: torch.dtype, args: tuple[Any, ...]) -> bool:
    """Return whether eager computes an op in a dtype; torch decides (and refuses) the rare ones."""
    if dtype.is_floating_point:
        taken = not name.startswith("bitwise")
    elif dtype is torch.bool:
        taken = name in _OF_BOOLS
    else:
        taken = not dtype.is_complex and name not in FLOATING - {"div"} and name != "lerp"
    if name in ("sub", "rsub"):
        return taken and not any(_is_bool(value) for value in args)
    if name == "clamp":
        return taken and any(value is not None for value in args[1:])
    return taken


# Ops that take tensors of several dtypes.
_PROMOTES = {"add", "sub", "rsub", "mul", "div", "maximum", "minimum", "pow"} | (
    BOOLEAN - {"logical_and", "logical_or", "logical_not", "logical_xor"}
)


def _is_bool(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype is torch.bool
    return isinstance(value, bool)


def _common(name: str, operands: tuple[Any, ...]) -> torch.dtype | None:
    """Return the dtype in which an op computes, None if that is not the one of all tensors."""
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    # Tensors without dims count among themselves only, if they are of no higher kind.
    dtypes = {value.dtype for value in tensors if value.dim()} or {t.dtype for t in tensors}
    highest = max(map(_kind, dtypes), default=0)
    decide = [dtype for dtype in dtypes if _kind(dtype) == highest]
    if len(decide) != 1 or not all(_keeps_dtype(value, decide[0]) for value in operands):
        return None
    others = {value.dtype for value in tensors} - set(decide)
    if others and (name not in _PROMOTES or max(map(_kind, others)) > highest):
        return None
    return decide[0]


def _kind(dtype: torch.dtype) -> int:
    """Return the place of a dtype among the kinds: booleans, integers, floats, complex numbers."""
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)


def _keeps_dtype(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, (bool, str, type(None), torch.Tensor)):
        return True
    if isinstance(value, (float, torch.SymFloat)) and not dtype.is_floating_point:
        return False
    if isinstance(value, (int, torch.SymInt)) and dtype is torch.bool:
        return False
    return isinstance(value, (int, float, *sym_numbers.SYMBOLIC))


def rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a rule for ops by name; the rule returns None to let torch decide."""

    def register(function: _Rule) -> _Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


@rule(
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "clone",
    "copy",
    "zeros_like",
    "ones_like",
    "full_like",
    "relu",
    "native_dropout",
)
def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if func._opname == "clone" and kwargs.get("memory_format") is torch.contiguous_format:
        return _made(torch.Tensor.size(source), source.dtype)
    if not _plain(source) or any(kwargs.get(k) is not None for k in ("dtype", "layout")):
        return None
    if kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    if func._opname.endswith("softmax"):
        widened = len(args) > 2 and args[2] not in (None, False)
        if not source.dtype.is_floating_point or widened:
            return None
    if func._opname == "copy" and (
        len(args) < 2 or torch.Tensor.size(args[1]) != torch.Tensor.size(source)
    ):
        return None
    if func._opname == "relu" and not _takes("relu", source.dtype, args):
        return None
    size = torch.Tensor.size(source)
    made = _made(size, source.dtype)
    if func._opname != "native_dropout":
        return made
    # For an empty tensor, torch makes the mask in the dtype of the values.
    plain = source.dtype.is_floating_point and 0 not in size
    return (made, _made(size, torch.bool)) if plain else None


@rule("_to_copy")
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not _plain(source) or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    return _made(torch.Tensor.size(source), kwargs.get("dtype") or source.dtype)


@rule("native_layer_norm")
def _layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, normalized, weight, bias = args[0], list(args[1]), args[2], args[3]
    shape = list(torch.Tensor.size(source))
    fits = shape[len(shape) - len(normalized) :] == normalized
    same = all(
        t is None or (t.dtype == source.dtype and list(torch.Tensor.size(t)) == normalized)
        for t in (weight, bias)
    )
    if not fits or not same or not source.dtype.is_floating_point:
        return None
    lead = shape[: len(shape) - len(normalized)] + [1] * len(normalized)
    stat = torch.float32 if source.dtype.itemsize < 4 else source.dtype
    return _made(shape, source.dtype), _made(lead, stat), _made(lead, stat)


@rule("native_group_norm")
def _group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, weight, bias, batch, groups = args[0], args[1], args[2], args[3], args[6]
    if not _plain(source) or any(t is not None and t.dtype != source.dtype for t in (weight, bias)):
        return None
    if source.dim() < 2 or torch.Tensor.size(source)[1] % groups or source.dtype.itemsize < 4:
        return None
    return _made(torch.Tensor.size(source), source.dtype), *(
        _made((batch, groups), source.dtype) for _ in range(2)
    )


@rule("mm", "bmm")
def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = torch.Tensor.size(args[0]), torch.Tensor.size(args[1])
    if (
        args[0].dtype != args[1].dtype
        or a[-1] != b[-2]
        or len(a) != len(b)
        or a[:-2] != b[:-2]
        or kwargs
    ):
        return None
    return _made((*a[:-1], b[-1]), args[0].dtype)


@rule("addmm")
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, a, b = args
    if not a.dtype == b.dtype == bias.dtype or torch.Tensor.size(a)[1] != torch.Tensor.size(b)[0]:
        return None
    out = (torch.Tensor.size(a)[0], torch.Tensor.size(b)[1])
    if bias.dim() > 2 or any(
        x not in (1, y)
        for x, y in zip(reversed(torch.Tensor.size(bias)), reversed(out), strict=False)
    ):
        return None
    return _made(out, a.dtype)


@rule("mean", "sum", "amax", "amin")
def _reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if (
        not _plain(source)
        or not (source.dtype.is_floating_point or func._opname == "sum")
        or source.dtype.is_complex
        or kwargs.get("dtype") not in (None, source.dtype)
    ):
        return None
    if func._overloadname not in ("dim", "dim_IntList", "default") or any(
        k not in ("dim", "keepdim", "dtype") for k in kwargs
    ):
        return None
    shape = list(torch.Tensor.size(source))
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if (
        not isinstance(dims, (list, tuple))
        or not dims
        or not shape
        or any(not -len(shape) <= d < len(shape) for d in dims)
    ):
        return None
    picked = {d % len(shape) for d in dims}
    if len(picked) != len(dims) or (func._opname in ("amax", "amin") and 0 in shape):
        return None
    kept = [1 if d in picked else s for d, s in enumerate(shape) if keep or d not in picked]
    counts = not source.dtype.is_floating_point and kwargs.get("dtype") is None
    return _made(kept, torch.int64 if counts else source.dtype)


@rule("cat")
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    first = list(torch.Tensor.size(tensors[0]))
    if (
        not first
        or not -len(first) <= dim < len(first)
        or any(t.dtype != tensors[0].dtype for t in tensors)
    ):
        return None
    dim %= len(first)
    total = 0
    for tensor in tensors:
        size = list(torch.Tensor.size(tensor))
        if (
            len(size) != len(first)
            or size[:dim] + size[dim + 1 :] != first[:dim] + first[dim + 1 :]
        ):
            return None
        total += size[dim]
    made = _made([*first[:dim], total, *first[dim + 1 :]], tensors[0].dtype)
    last = len(first) in (4, 5) and all(has_channels_last(meta_of(one)) for one in tensors)
    if not last:
        return made
    # Which of two layouts torch sees in dims of size 1 differs from op to op: it decides.
    return None if 1 in made.shape else made.contiguous(memory_format=LAST[len(first)])


@rule("stack")
def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    first = tensors[0]
    size = list(torch.Tensor.size(first))
    if not -len(size) - 1 <= dim <= len(size) or any(
        not _plain(t) or t.dtype != first.dtype or list(torch.Tensor.size(t)) != size
        for t in tensors
    ):
        return None
    dim %= len(size) + 1
    return _made([*size[:dim], len(tensors), *size[dim:]], first.dtype)


@rule("convolution")
def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    size, kernel = torch.Tensor.size(x), torch.Tensor.size(weight)
    dims = len(kernel) - 2
    if transposed or kwargs or len(size) != len(kernel) or x.dtype != weight.dtype:
        return None
    if (
        (bias is not None and bias.dtype != x.dtype)
        or size[1] != kernel[1] * groups
        or kernel[0] % groups
    ):
        return None
    steps = [v if len(v) == dims else [v[0]] * dims for v in (stride, padding, dilation)]
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size[2:], kernel[2:], *steps, strict=True)
    ]
    if any(o <= 0 for o in out):
        return None
    made = _made((size[0], kernel[0], *out), x.dtype)
    return as_convolved(made, meta_of(x), meta_of(weight))


@rule("repeat")
def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, times = args
    size = torch.Tensor.size(source)
    if len(times) < len(size) or any(not isinstance(n, int) or n < 0 for n in times):
        return None
    size = [1] * (len(times) - len(size)) + list(size)
    return _made([n * k for n, k in zip(size, times, strict=True)], source.dtype)


@rule("cumsum", "cumprod")
def _cumulative(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dim = args[0], args[1]
    if not _plain(source) or not source.dim() or kwargs.keys() - {"dtype"}:
        return None
    if not -source.dim() <= dim < source.dim():
        return None
    counts = not (source.dtype.is_floating_point or source.dtype.is_complex)
    return _made(
        torch.Tensor.size(source),
        kwargs.get("dtype") or (torch.int64 if counts else source.dtype),
    )


@rule("embedding")
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, index = args[0], args[1]
    if weight.dim() != 2 or index.dtype not in (torch.int32, torch.int64):
        return None
    return _made((*torch.Tensor.size(index), torch.Tensor.size(weight)[1]), weight.dtype)


# -- functions that are lowered as one op ----------------------------------------------------------


def linear_meta(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Infer the result of `F.linear` where the operands fit."""
    size, matrix = torch.Tensor.size(x), torch.Tensor.size(weight)
    fits = len(size) >= 1 and len(matrix) == 2 and size[-1] == matrix[1] and x.dtype == weight.dtype
    if not fits or (
        bias is not None and (bias.dtype != x.dtype or torch.Tensor.size(bias) != matrix[:1])
    ):
        return None
    return _made((*size[:-1], matrix[0]), x.dtype)


def matmul_meta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Infer the result of `torch.matmul` of matrices (with batch dims) of one dtype."""
    left, right = torch.Tensor.size(a), torch.Tensor.size(b)
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2] or a.dtype != b.dtype:
        return None
    try:
        batch = torch.broadcast_shapes(left[:-2], right[:-2])
    except RuntimeError:
        return None
    return _made((*batch, left[-2], right[-1]), a.dtype)


def attention_meta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> torch.Tensor | None:
    """Infer the result of attention over [..., heads, length, width] operands of one dtype."""
    sizes = [torch.Tensor.size(t) for t in (q, k, v)]
    if any(len(s) < 3 for s in sizes) or not q.dtype == k.dtype == v.dtype:
        return None
    if grouped:  # heads of keys and values are fewer
        query, key, _ = sizes
        if any(len(s) != 4 for s in sizes) or not key[1] or query[1] % key[1]:
            return None
        lead = [s[:-2] if s is not query else (s[0], key[1]) for s in sizes]
    else:
        lead = [s[:-2] for s in sizes]
    if (
        any(tuple(one) != tuple(lead[0]) for one in lead)
        or sizes[0][-1] != sizes[1][-1]
        or sizes[1][-2] != sizes[2][-2]
    ):
        return None
    if mask is not None:
        if mask.dtype not in (torch.bool, q.dtype):
            return None
        scores = (*sizes[0][:-1], sizes[1][-2])
        if mask.dim() > len(scores) or any(
            a not in (1, b)
            for a, b in zip(reversed(torch.Tensor.size(mask)), reversed(scores), strict=False)
        ):
            return None
    return _made((*sizes[0][:-1], sizes[2][-1]), q.dtype)
