"""Dispatch of ops on tensors of data-dependent size: to a handler, a general rule, or a refusal."""

from typing import Any

import torch

from tpuport.tracing.dynamic_shapes import (  # noqa: F401 - they register themselves
    composed,
    convolutions,
    creation,
    joining,
    ordering,
    reductions,
    scattering,
    selection,
    statistics,
    suppression,
    uniques,
    views,
)
from tpuport.tracing.dynamic_shapes.extents import extents_of, refuse
from tpuport.tracing.dynamic_shapes.handlers import HANDLERS, tensors_of
from tpuport.tracing.dynamic_shapes.pointwise import pointwise
from tpuport.tracing.dynamic_shapes.rowwise import rowwise

_POINTWISE = {
    "floor_divide",
    "remainder",
    "fmod",
    "where",
    "clone",
    "_to_copy",
    "copy",
    "masked_fill",
    "fill",
    "zero",
    "zeros_like",
    "ones_like",
    "full_like",
}


_POINTWISE |= {
    "rand_like",
    "randn_like",
    *("uniform", "normal_functional", "exponential", "random", "log_normal", "cauchy", "geometric"),
    "bernoulli",
    "native_dropout",
    "lift_fresh",
    "detach",
    "alias",
    "contiguous",
    "complex",
    "_prelu_kernel",
    "__and__",
    "__or__",
    "__xor__",
    "empty_like",
}


_ROWWISE = {
    "native_layer_norm", "_fused_rms_norm", "embedding", "cumsum", "cumprod", "_softmax",
    "_log_softmax", "mm", "bmm", "addmm", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "select", "unbind", "split", "split_with_sizes", "glu", "topk", "sort", "argsort",
    "gather", "stack", "flip", "one_hot", "repeat",
    "median", "nanmedian", "kthvalue", "mode", "cummax", "cummin", "logcumsumexp",
    "unfold", "linalg_cross",
    "convolution", "avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d",
    "upsample_nearest2d", "upsample_bilinear2d", "baddbmm", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    "view_as_real", "view_as_complex", "_conj", "roi_align",
}  # fmt: skip


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on tensors of data-dependent size.

    Return NotImplemented if the ordinary dispatch is right.

    Raises:
        PortError: The op is not known to keep the real elements exact.
    """
    handler = HANDLERS.get(func._opname)
    if handler is not None:
        return handler(func, args, kwargs)
    has_extents = any(extents_of(t) for t in tensors_of(args, kwargs))
    if not has_extents:
        return NotImplemented
    if func is torch.ops.aten.empty_like.default:
        func = torch.ops.aten.zeros_like.default  # what memory held before is no value
    if torch.Tag.pointwise in func.tags or func._opname in _POINTWISE:
        return pointwise(func, args, kwargs)
    if func._opname in _ROWWISE:
        return rowwise(func, args, kwargs)
    raise refuse(func)
