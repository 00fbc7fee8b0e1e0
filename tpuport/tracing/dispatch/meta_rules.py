"""Rules for the sizes and dtypes of the results of common ops in the plain case.

A rule returns None where it is not sure: torch then decides.
"""

from collections.abc import Callable
from typing import Any

import torch

from tpuport.tracing.core import sym_numbers

_Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


RULES: dict[str, _Rule] = {}


def _made(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_contiguous()


def _is_row_major(tensor: Any) -> bool:
    """Return whether strides are those of a new tensor, in dims of size 1, too.

    By the strides of those, a convolution tells channels last from contiguous.
    """
    if not _plain(tensor):
        return False
    return tensor.stride() == _made(torch.Tensor.size(tensor), tensor.dtype).stride()


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


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Infer the result of a pointwise op.

    The plain case is operands of one dtype (and Python scalars that do not widen it), one of them
    of the full size, contiguous.
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
    dtype = _common(operands)
    if dtype is None or not _takes(name, dtype, args):
        return None
    shape = _full_shape([a for a in args if isinstance(a, torch.Tensor)])
    if shape is None or (name in ("masked_fill", "fill") and shape != torch.Tensor.size(args[0])):
        return None
    return _made(shape, torch.bool if name in BOOLEAN else dtype)


def _takes(name: str, dtype: torch.dtype, args: tuple[Any, ...]) -> bool:
    """Return whether eager computes an op in a dtype; torch decides (and refuses) the rare ones."""
    if dtype.is_floating_point:
        taken = not name.startswith("bitwise")
    elif dtype is torch.bool:
        taken = name in _OF_BOOLS
    else:
        taken = not dtype.is_complex and name not in FLOATING and name != "lerp"
    if name in ("sub", "rsub"):
        return taken and not any(isinstance(value, bool) for value in args)
    if name == "clamp":
        return taken and any(value is not None for value in args[1:])
    return taken


def _common(operands: tuple[Any, ...]) -> torch.dtype | None:
    """Return the dtype of all tensor operands, None if they differ or a scalar would change it."""
    dtype: torch.dtype | None = None
    for value in operands:
        if isinstance(value, torch.Tensor):
            if (
                value.dim() == 0
                and len(operands) > 1
                and dtype is not None
                and value.dtype == dtype
            ):
                continue
            if dtype is not None and value.dtype != dtype:
                return None
            dtype = value.dtype
    if dtype is None or not all(_keeps_dtype(value, dtype) for value in operands):
        return None
    return dtype


def _keeps_dtype(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, (bool, str, type(None), torch.Tensor)):
        return True
    if isinstance(value, (float, torch.SymFloat)) and not dtype.is_floating_point:
        return False
    if isinstance(value, (int, torch.SymInt)) and dtype is torch.bool:
        return False
    return isinstance(value, (int, float, *sym_numbers.SYMBOLIC))


def _full_shape(tensors: list[torch.Tensor]) -> torch.Size | None:
    """Return the size of the largest operand if the others broadcast to it, else None.

    None too if an operand of several elements is not contiguous.
    """
    largest = max(tensors, key=lambda t: (t.dim(), torch.Tensor.numel(t)))
    shape = torch.Tensor.size(largest)
    for tensor in tensors:
        if not tensor.is_contiguous() and torch.Tensor.numel(tensor) > 1:
            return None
        size = torch.Tensor.size(tensor)
        for a, b in zip(reversed(size), reversed(shape), strict=False):
            if a not in (b, 1):
                return None
    return shape


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
    if not _plain(source) or any(kwargs.get(k) is not None for k in ("dtype", "layout")):
        return None
    if kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    if func._opname.endswith("softmax") and (not source.dtype.is_floating_point or args[2]):
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
        or not source.dtype.is_floating_point
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
    return _made(kept, source.dtype)


@rule("cat")
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    first = list(torch.Tensor.size(tensors[0]))
    if (
        not first
        or not -len(first) <= dim < len(first)
        or any(not _plain(t) or t.dtype != tensors[0].dtype for t in tensors)
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
    return _made([*first[:dim], total, *first[dim + 1 :]], tensors[0].dtype)


@rule("convolution")
def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    size, kernel = torch.Tensor.size(x), torch.Tensor.size(weight)
    dims = len(kernel) - 2
    if (
        transposed
        or kwargs
        or not _is_row_major(x)
        or not _is_row_major(weight)
        or len(size) != len(kernel)
        or x.dtype != weight.dtype
    ):
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
    return None if any(o <= 0 for o in out) else _made((size[0], kernel[0], *out), x.dtype)


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
    if grouped or any(len(s) < 3 for s in sizes) or not q.dtype == k.dtype == v.dtype:
        return None
    if (
        any(s[:-2] != sizes[0][:-2] for s in sizes)
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
