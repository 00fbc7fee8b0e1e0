"""Reductions, running reductions, sorting and searching."""

import math
from typing import Any

import torch

from tests.model.lowering_cases.case import b, call, case, f, i, mask, t, turned

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
TIES = t(2.0, 5.0, 5.0, 1.0, 5.0, 1.0).reshape(2, 3)
NANS = t(2.0, NAN, 5.0, 1.0, 3.0, 4.0).reshape(2, 3)
CONSTANT = torch.full((3, 4), 0.7)
LONG = (b(4, 512) * 3 + 1).abs()
CUBE = f(2, 3, 4)
ZERO_ROW = torch.stack([torch.zeros(3), f(3)])

SUMS = [
    case(
        aten.sum.default, call(LONG), call(b(64), dtype=torch.float32), call(mask(9)), call(f()),
        call(f(0, 3)), call(i(5)),
    ),
    case(
        aten.sum.dim_IntList, call(LONG, [-1]), call(b(3, 64), [1], dtype=torch.float32),
        call(turned(CUBE), [0, -1], True), call(CUBE, []), call(CUBE, None), call(mask(2, 9), [1]),
        call(f(), [0]), call(f(0, 3), [0]), call(i(3, 4), [-2]),
    ),
    case(
        aten.mean.default, call(LONG), call(b(64), dtype=torch.float32), call(CUBE), call(f()),
        call(f(0)), call(i(5), dtype=torch.float32),
    ),
    case(
        aten.mean.dim, call(LONG, [-1]), call(b(3, 64), [1], dtype=torch.float32),
        call(turned(CUBE), [0, -1], True), call(CUBE, []), call(f(), [-1]), call(f(0, 3), [0]),
    ),
    case(
        aten.nansum.default, call(NANS), call(NANS, [1]), call(b(3, 64), [-1], True),
        call(b(8), dtype=torch.float32), call(f()), call(f(0)), call(i(5)),
    ),
    case(
        aten.prod.default, call(b(64) / 4 + 1), call(b(8), dtype=torch.float32),
        call(t(0.0, 2.0, 3.0)), call(t(0.0, 2.0, 0.0)), call(f(0)), call(i(5)), call(mask(3)),
        bf16=4e-2,
    ),
    case(
        aten.prod.dim_int, call(b(4, 64) / 4 + 1, 1), call(turned(CUBE), -2, True), call(f(), 0),
        call(f(0, 3), 0), call(i(3, 4), 0), call(mask(2, 3), 1), bf16=4e-2,
    ),
    case(
        aten.cumsum.default, call(LONG, 1), call(turned(CUBE), -2), call(f(), 0), call(f(0, 3), 0),
        call(mask(6), 0), call(b(9), 0, dtype=torch.float32), call(i(3, 4), 0),
    ),
    case(
        aten.cumprod.default, call(b(4, 64) / 4 + 1, 1), call(turned(CUBE), -2),
        call(t(2.0, 0.0, 3.0, 4.0), 0), call(f(), 0), call(f(0, 3), 0), call(i(3, 4), 0),
        call(b(9), 0, dtype=torch.float32),
    ),
    case(
        aten.logcumsumexp.default, call(turned(CUBE), -2), call(b(2, 9), 1),
        call(t(-INF, -INF, 0.0, 1.0), 0), call(f(), 0), call(f(0, 3), 0),
    ),
    case(
        aten.logsumexp.default, call(f(3, 64) - 4, [-1]), call(b(3, 64) - 4, [1], True),
        call(turned(CUBE), [0, -1]), call(TIES, [1]), call(f(), [0]), call(i(3, 4), [1]),
        bf16=2e-2,  # eager rounds each step to bfloat16, ours the result
    ),
]  # fmt: skip

_MOMENTS = (
    call(b(4, 64) + 8, [1], correction=1),
    call(turned(CUBE), [0, -1], correction=0, keepdim=True),
    call(CUBE, None),
    call(f(3, 1), [1], correction=0),
    call(f(2, 5), [-1], correction=2.5),
    call(f(), None, correction=0),
    call(torch.complex(f(5), f(5, seed=2)), [0]),
)
_NO_FREEDOM = call(f(3, 1), [1], correction=1)
_NEGATIVE_FREEDOM = call(f(2, 3), [1], correction=7)
_NO_SPREAD = call(CONSTANT, [1], correction=1)

MOMENTS = [
    case(aten.var.correction, *_MOMENTS, _NO_FREEDOM, _NO_SPREAD, call(f(0, 3), [0])),
    case(aten.var.correction, _NEGATIVE_FREEDOM, grad=False),
    case(aten.std.correction, *_MOMENTS, _NO_SPREAD),
    case(aten.std.correction, _NEGATIVE_FREEDOM, grad=False),
    case(aten.var_mean.correction, *_MOMENTS, _NO_FREEDOM, _NO_SPREAD),
    case(aten.std_mean.correction, *_MOMENTS, _NO_SPREAD),
    case(
        aten.linalg_vector_norm.default,
        call(ZERO_ROW, 2, [1]),
        call(b(3, 64), 2, [-1], dtype=torch.float32),
        call(LONG, 2, [1]),
        call(ZERO_ROW, 1, [1]),
        call(ZERO_ROW, 0, [1]),
        call(f(2, 3), INF, [1]),
        call(f(2, 3), -INF, [1], True),
        call(ZERO_ROW, 3, [1]),
        call(f(2, 3), -1.5, [1]),
        call(turned(CUBE), 2, [0, -1]),
        call(f(), 2, None),
        call(f(0, 3), 2, [0]),
        call(torch.complex(f(5), f(5, seed=2)), 2),
    ),
]  # fmt: skip

EXTREMES = [
    case(
        aten.max.dim, call(TIES, 1), call(NANS, 1), call(turned(CUBE), -2, True), call(f(), 0),
        call(i(3, 4), 0), call(mask(2, 3), 1), call(b(3, 64), -1), call(f(0, 3), 1),
    ),
    case(
        aten.min.dim, call(TIES, 1), call(NANS, 1), call(turned(CUBE), -2, True), call(f(), 0),
        call(i(3, 4), 0), call(mask(2, 3), 1), call(b(3, 64), -1), call(f(0, 3), 1),
    ),
    case(
        aten.argmax.default, call(CUBE, None, True), call(TIES), call(NANS, 1),
        call(turned(CUBE), -2), call(f(), 0), call(i(3, 4), 0, True), call(b(64)), call(f(0, 3), 1),
        grad=False,
    ),
    case(
        aten.argmin.default, call(CUBE, None, True), call(TIES), call(NANS, 1),
        call(turned(CUBE), -2), call(f(), 0), call(i(3, 4), 0, True), call(b(64)), call(f(0, 3), 1),
        grad=False,
    ),
    case(aten.aminmax.default, call(NANS, dim=0), grad=False),
    case(
        aten.aminmax.default, call(TIES, dim=1), call(turned(CUBE), dim=-2, keepdim=True),
        call(CUBE), call(f(), dim=0), call(i(3, 4), dim=1), call(b(64)),
    ),
    case(
        aten.cummax.default, call(TIES, 1), call(NANS, 1), call(turned(CUBE), -2), call(f(), 0),
        call(f(0, 3), 0), call(i(3, 4), 1), call(b(3, 9), 1),
    ),
    case(
        aten.cummin.default, call(TIES, 1), call(NANS, 1), call(turned(CUBE), -2), call(f(), 0),
        call(f(0, 3), 0), call(i(3, 4), 1), call(b(3, 9), 1),
    ),
    case(aten.max.default, call(TIES), call(turned(CUBE)), call(b(5)), call(i(5)), call(f())),
    case(aten.min.default, call(TIES), call(turned(CUBE)), call(b(5)), call(i(5)), call(f())),
    case(aten.amax.default, call(NANS, [0]), grad=False),
    case(
        aten.amax.default, call(TIES, [1]), call(turned(CUBE), [0, -1], True), call(CUBE, []),
        call(f(), [0], True), call(i(3, 4), [1]), call(b(3, 64), [-1]), call(mask(2, 3), [1]),
    ),
    case(aten.amin.default, call(NANS, [0]), grad=False),
    case(
        aten.amin.default, call(TIES, [1]), call(turned(CUBE), [0, -1], True), call(CUBE, []),
        call(f(), [0], True), call(i(3, 4), [1]), call(b(3, 64), [-1]), call(mask(2, 3), [1]),
    ),
]  # fmt: skip

_TRUTH = turned(mask(3, 4))
COUNTS = [
    case(
        aten.histc.default, call(f(50), 7, -1, 1), call(f(50), 5, 1, 1), call(f(50), 5),
        call(torch.full((4,), 2.0), 3), call(f(0), 4), call(t(-1.0, 0.0, 1.0, 2.0), 4, 0, 1),
        grad=False,
    ),
    case(
        aten.any.default, call(_TRUTH), call(f(3)), call(t(0.0, NAN)), call(f(0)), call(mask()),
        grad=False,
    ),
    case(
        aten.any.dim, call(_TRUTH, -1), call(i(3, 4, low=0, high=2), 0, True), call(mask(), 0),
        call(f(0, 3), 0), grad=False,
    ),
    case(
        aten.any.dims, call(_TRUTH, [0, -1]), call(mask(2, 3, 4), [0, 2], True), call(mask(), [0]),
        call(f(2, 3), []), call(f(2, 3), None), grad=False,
    ),
    case(
        aten.all.default, call(_TRUTH), call(f(3)), call(t(0.0, NAN)), call(f(0)), call(mask()),
        grad=False,
    ),
    case(
        aten.all.dim, call(_TRUTH, -1), call(i(3, 4, low=0, high=2), 0, True), call(mask(), 0),
        call(f(0, 3), 0), grad=False,
    ),
    case(
        aten.all.dims, call(_TRUTH, [0, -1]), call(mask(2, 3, 4), [0, 2], True), call(mask(), [0]),
        call(f(2, 3), []), call(f(2, 3), None), grad=False,
    ),
    case(aten._is_all_true.default, call(_TRUTH), call(mask(3) | True), call(mask(0)), grad=False),
    case(aten._is_any_true.default, call(_TRUTH), call(mask(3) & False), call(mask(0)), grad=False),
]  # fmt: skip

_MANY = t(2**24 + 1, 2**24 + 3, 2**24, 5)
_EQUAL = i(3, 12, low=0, high=3)
_RANKS = (call(f(), 0), call(turned(CUBE), -2, True), call(b(3, 9), 1), call(TIES, 1))

SORTING = [
    case(
        aten.sort.default, call(TIES, 1, True), call(TIES, 1), call(NANS, 1), call(NANS, 1, True),
        call(turned(CUBE), -2), call(f(), 0), call(mask(2, 5), 1), call(b(3, 9), -1),
        call(f(0, 3), 0),
    ),
    case(
        aten.sort.stable, call(TIES, stable=True, dim=1, descending=True),
        call(_EQUAL, stable=True), call(NANS, stable=True, dim=0),
        call(turned(CUBE), stable=True, dim=-2), call(f(), stable=True),
    ),
    case(
        aten.topk.default, call(t(3, 1, 2, 255, 0, dtype=torch.uint8), 2, 0, False),
        call(NANS, 2, 1, False), call(NANS, 2, 1), call(turned(CUBE), 2, -2), call(f(), 1),
        call(i(9, low=-99, high=99), 3), call(b(3, 9), 2, -1), call(f(3, 2), 0),
    ),
    case(
        aten.kthvalue.default, call(NANS, 3, 1), call(_EQUAL.unique().float(), 2),
        call(turned(CUBE), 3, -2, True), call(f(), 1), call(b(3, 9), 4, -1),
        call(i(9, low=-99, high=99), 3),
    ),
    case(
        aten.median.dim, call(_MANY, 0), call(NANS, 1), *_RANKS[:3], call(t(4.0, 1.0, 3.0, 2.0), 0),
    ),
    case(aten.nanmedian.dim, call(_MANY, 0), call(NANS, 1), *_RANKS[:3], call(t(NAN, NAN), 0)),
    case(aten.median.default, call(_MANY), call(NANS), call(turned(CUBE)), call(f()), call(b(9))),
    case(
        aten.nanmedian.default, call(_MANY), call(NANS), call(turned(CUBE)), call(f()), call(b(9)),
    ),
    case(
        aten.mode.default, call(_EQUAL), call(TIES, 1),
        call(turned(i(2, 3, 9, low=0, high=3)), 1, True), call(f(), 0), call(mask(2, 5), 1),
        call(t(7.0, 3.0, 7.0, 3.0), 0),
    ),
]  # fmt: skip

_EDGES = t(1.0, 2.0, 2.0, 4.0)
_ROWS = f(2, 3, 6).sort(-1).values
_ORDER = f(2, 6, seed=3).argsort(-1)
SEARCHING = [
    case(
        aten.searchsorted.Tensor, call(_EDGES, t(2.0, 0.0, 9.0), right=True),
        call(_ROWS, f(2, 3, 4)), call(f(2, 6, seed=3), f(2, 4), sorter=_ORDER),
        call(_EDGES, turned(f(3, 4)), side="right"), call(_EDGES, t(2.0), out_int32=True),
        call(t(1, 3, 5), t(3, 4)), call(_ROWS, f(2, 3, 0)), call(_EDGES, f()), grad=False,
    ),
    case(
        aten.searchsorted.Scalar, call(_EDGES, 2.0, right=True), call(_EDGES, 2.0),
        call(t(1, 3, 5), 4), grad=False,
    ),
    case(
        aten.bucketize.Tensor, call(t(0.5, 1.5, 2.5), t(1, 2, 3)),
        call(turned(f(3, 4)), _EDGES, right=True), call(f(), _EDGES), call(f(0), _EDGES),
        call(t(2.0, 4.0), _EDGES, out_int32=True), call(i(4), t(-2, 0, 3)), grad=False,
    ),
    case(
        aten.bucketize.Scalar, call(1.5, t(1, 2, 3)), call(2.0, _EDGES, right=True),
        call(2.0, _EDGES), grad=False,
    ),
]  # fmt: skip

_MIXED, _SHARES = t(3.0, 1.0, 2.0, 1.0, 3.0, 3.0, -4.0, 9.0), f(8, seed=2).abs()
_SEGMENTS = f(5, 3)
_LENGTHS, _OFFSETS = t(2, 0, 3), t(0, 2, 2, 5)


def _segments(data: Any, how: str, lengths: Any, offsets: Any, axis: int, initial: Any) -> Any:
    return aten.segment_reduce.default(
        data, how, lengths=lengths, offsets=offsets, axis=axis, initial=initial
    )


HISTOGRAMS = [
    case(
        aten.histogram.bin_ct, call(_MIXED, 4), call(_MIXED.reshape(2, 4), 3, range=[0.0, 3.0]),
        call(_MIXED, 4, weight=_SHARES, density=True), call(torch.ones(3), 2), call(f(0), 2),
        grad=False,
    ),
    case(
        aten.histogram.bins_tensor, call(_MIXED, t(0.0, 1.0, 2.5, 3.0)),
        call(_MIXED, t(0.0, 1.0, 9.0), weight=_SHARES, density=True), grad=False,
    ),
    case(
        aten._histogramdd_bin_edges.default, call(_MIXED.reshape(4, 2), [2, 3]), grad=False,
    ),
    case(
        aten._histogramdd_from_bin_cts.default, call(_MIXED.reshape(4, 2), [2, 3]),
        call(_MIXED.reshape(4, 2), [2, 3], range=[0.0, 3.0, 0.0, 3.0], density=True), grad=False,
    ),
    case(
        aten._histogramdd_from_bin_tensors.default,
        call(_MIXED.reshape(4, 2), [t(0.0, 2.0, 3.0), t(0.0, 1.0, 5.0)], weight=_SHARES[:4]),
        grad=False,
    ),
    case(
        aten.nonzero_static.default, call(TIES, size=3), call(t(0, 1, 0, 2), size=5),
        call(t(0, 1, 0, 2), size=3, fill_value=7), call(f(), size=2), grad=False,
    ),
    case(
        aten.repeat_interleave.Tensor, call(t(1, 0, 3), output_size=4), call(t(0), output_size=0),
        grad=False,
    ),
    case(
        aten.segment_reduce.default,
        *(
            call(_SEGMENTS, how, _LENGTHS, None, 0, initial)
            for how in ("sum", "mean", "max", "min", "prod") for initial in (None, 2.0)
        ),
        call(f(2, 5), "sum", torch.stack([_LENGTHS, t(1, 1, 3)]), None, 1, None),
        call(t(1.0, 2.0, 0.5), "max", None, t(0, 3), 0, None),
        call(_SEGMENTS, "mean", None, _OFFSETS, 0, None), run=_segments,
    ),
]  # fmt: skip

CASES = [*HISTOGRAMS, *SUMS, *MOMENTS, *EXTREMES, *COUNTS, *SORTING, *SEARCHING]
