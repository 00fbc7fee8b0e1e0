"""Convolutions, pooling, resizing and sampling of images."""

from typing import Any

import torch

from tests.model.lowering_cases.case import b, call, case, f, i, t, turned

aten = torch.ops.aten
NAN = float("nan")
IMAGE = f(2, 4, 5, 6)


def _conv(
    x: torch.Tensor, w: torch.Tensor, bias: Any, transposed: bool = False, **options: Any
) -> Any:
    """Arguments of `convolution`, with the options that differ from a plain one."""
    plain = {"stride": [1], "padding": [0], "dilation": [1], "output_padding": [0], "groups": 1}
    o = plain | options
    rank = w.dim() - 2
    spread = {k: v if k == "groups" else (v * rank if len(v) == 1 else v) for k, v in o.items()}
    before = (spread["stride"], spread["padding"], spread["dilation"])
    return call(x, w, bias, *before, transposed, spread["output_padding"], spread["groups"])


CONVOLUTION = [
    case(
        aten.convolution.default,
        _conv(f(2, 4, 5), f(4, 3, 3), f(6), True, groups=2, stride=[2], output_padding=[1]),
        _conv(IMAGE, f(6, 2, 3, 2), f(6), groups=2, padding=[1, 0], dilation=[2, 1]),
        _conv(turned(IMAGE), f(3, 4, 2, 2), None, stride=[2, 1]),
        _conv(IMAGE, f(4, 3, 3, 2), f(3), True, stride=[2, 3], padding=[1, 0], dilation=[1, 2]),
        _conv(f(1, 2, 3, 4, 3), f(2, 2, 2, 2, 2), None, padding=[1]),
        _conv(f(1, 2, 3, 4, 3), f(2, 1, 2, 2, 2), f(1), True, stride=[2]),
        _conv(b(2, 4, 9), b(3, 4, 3), b(3)),
        _conv(f(0, 4, 5), f(3, 4, 3), f(3)),
        bf16=8e-3,
    ),
]  # fmt: skip

_HOLES = torch.where(IMAGE > 1.2, NAN, IMAGE)
_EQUAL = i(2, 4, 5, 6, low=0, high=2).float()
_POOLED, _WHERE = aten.max_pool2d_with_indices.default(IMAGE, [2, 2])
VOLUME = f(1, 2, 4, 5, 4)
_POOLED3, _WHERE3 = aten.max_pool3d_with_indices.default(VOLUME, [2, 2, 2])
_OVERLAP = aten.max_pool2d_with_indices.default(IMAGE, [3, 3], [1, 1])
_OVERLAP3 = aten.max_pool3d_with_indices.default(VOLUME, [3, 3, 3], [1, 1, 1])

_DRAWN = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0))
_DRAWN3 = torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(0))


def _fractional(op: Any) -> Any:
    """The random samples have no gradient."""
    return lambda x, kernel, size, samples: op(x, kernel, size, samples.detach())


POOLING = [
    case(
        aten.max_pool2d_with_indices.default, call(IMAGE, [2, 2], [1, 1], 0, [2, 2]),
        call(_EQUAL, [2, 3]), call(IMAGE, [3, 3], [2, 2], 1, 1, True),
        call(turned(f(4, 5, 6)), [2, 2]), call(b(2, 4, 5, 6), [2, 2]), call(f(0, 4, 5, 6), [2, 2]),
        outputs=1,
    ),
    case(
        aten.max_pool2d_with_indices.default, call(i(2, 4, 5, 6), [2, 2], [1, 1]),
        call(_HOLES, [3, 3], [1, 2]), grad=False,
    ),
    case(
        aten.max_pool3d_with_indices.default, call(VOLUME, [2, 2, 2], [1, 1, 1], 0, [2, 1, 1]),
        call(VOLUME, [3, 3, 3], [2, 2, 2], 1, 1, True), call(turned(f(2, 4, 5, 4)), [2, 2, 2]),
        outputs=1,
    ),
    case(
        aten.max_pool2d_with_indices_backward.default,
        call(f(2, 4, 3, 4), IMAGE, [3, 3], [1, 1], [0, 0], [1, 1], False, _OVERLAP[1]), grad=False,
    ),
    case(
        aten.max_pool3d_with_indices_backward.default,
        call(
            f(1, 2, 2, 3, 2), VOLUME, [3, 3, 3], [1, 1, 1], [0, 0, 0], [1, 1, 1], False,
            _OVERLAP3[1],
        ),
        grad=False,
    ),
    case(
        aten.max_unpool2d.default, call(_POOLED, _WHERE, [5, 6]),
        call(_POOLED[0], _WHERE[0], [5, 6]),
    ),
    case(aten.max_unpool3d.default, call(_POOLED3, _WHERE3, [4, 5, 4], [2, 2, 2], [0, 0, 0])),
    case(
        aten.avg_pool2d.default, call(b(2, 4, 15, 16), [5, 6]),
        call(IMAGE, [3, 3], [2, 2], 1, True, True), call(IMAGE, [3, 3], [2, 2], 1, True, False),
        call(turned(IMAGE), [2, 3], [1, 2], 0, False, True, 5), call(f(4, 5, 6), [2, 2]),
    ),
    case(aten.avg_pool2d.default, call(i(2, 4, 5, 6, low=-50, high=50), [2, 2]), grad=False),
    case(
        aten.avg_pool3d.default, call(VOLUME, [2, 3, 2], [1, 2, 2], [1, 1, 0], True, False),
        call(VOLUME, [2, 2, 2], [2, 2, 2], 0, False, True, 3),
    ),
    case(
        aten._adaptive_avg_pool2d.default, call(f(4, 5, 6), [3, 4]), call(turned(IMAGE), [5, 2]),
        call(IMAGE, [7, 9]), call(b(2, 4, 15, 16), [3, 3]), call(IMAGE, [1, 1]), bf16=8e-3,
    ),
    case(
        aten._adaptive_avg_pool3d.default, call(f(2, 4, 5, 4), [3, 2, 4]),
        call(turned(VOLUME), [2, 3, 1]), call(b(1, 2, 4, 5, 4), [2, 2, 2]), bf16=8e-3,
    ),
    case(
        aten.adaptive_max_pool2d.default, call(f(4, 5, 6), [3, 4]), call(turned(IMAGE), [2, 3]),
        call(_EQUAL, [2, 4]), call(_HOLES, [1, 2]), call(b(2, 4, 5, 6), [2, 2]), outputs=1,
    ),
    case(
        aten.adaptive_max_pool3d.default, call(f(2, 4, 5, 4), [3, 2, 4]), call(VOLUME, [2, 3, 1]),
        outputs=1,
    ),
    case(
        aten.fractional_max_pool2d.default, call(IMAGE, [2, 3], [3, 2], _DRAWN),
        call(f(4, 5, 6), [2, 2], [1, 4], _DRAWN[:1]),
        run=_fractional(aten.fractional_max_pool2d.default), outputs=1,
    ),
    case(
        aten.fractional_max_pool3d.default, call(VOLUME, [2, 2, 2], [2, 3, 2], _DRAWN3),
        run=_fractional(aten.fractional_max_pool3d.default), outputs=1,
    ),
]  # fmt: skip

LINE = f(2, 3, 5)
_BYTES = i(1, 2, 5, 6, low=0, high=256).to(torch.uint8)
RESIZING = [
    case(
        aten.upsample_linear1d.default, call(LINE, [8], False), call(LINE, [3], True),
        call(turned(LINE), [7], False, 1.4), call(b(2, 3, 5), [8], False), call(LINE, [1], True),
    ),
    case(
        aten.upsample_bilinear2d.default, call(IMAGE, [8, 3], False), call(IMAGE, [8, 3], True),
        call(turned(IMAGE), [7, 9], False, 1.4, 1.5), call(b(2, 4, 5, 6), [8, 9], False),
        call(IMAGE, [5, 9], False, 1.1, 1.5), call(IMAGE, [5, 6], False, 1.1, 1.1),
    ),
    case(aten.upsample_bilinear2d.default, call(_BYTES, [7, 4], False), grad=False),
    case(
        aten.upsample_trilinear3d.default, call(VOLUME, [5, 3, 4], False),
        call(VOLUME, [2, 7, 3], True),
    ),
    case(
        aten.upsample_bicubic2d.default, call(IMAGE, [8, 3], False), call(IMAGE, [8, 3], True),
        call(turned(IMAGE), [7, 9], False, 1.4, 1.5), call(b(2, 4, 5, 6), [8, 9], False), bf16=8e-3,
    ),
    case(
        aten._upsample_bilinear2d_aa.default, call(IMAGE, [3, 2], False), call(IMAGE, [8, 3], True),
        call(turned(IMAGE), [2, 9], False, 0.5, 1.5),
    ),
    case(aten._upsample_bilinear2d_aa.default, call(_BYTES, [3, 4], False), grad=False),
    case(
        aten._upsample_bicubic2d_aa.default, call(IMAGE, [3, 2], False), call(IMAGE, [8, 3], True),
        call(turned(IMAGE), [2, 9], False, 0.5, 1.5),
    ),
    case(
        aten.upsample_nearest1d.default, call(LINE, [10]), call(LINE, [3]),
        call(turned(LINE), [7], 1.4), call(b(2, 3, 5), [8]),
    ),
    case(
        aten.upsample_nearest2d.default, call(IMAGE, [10, 12]), call(IMAGE, [3, 4]),
        call(turned(IMAGE), [7, 9], 1.4, 1.5), call(b(2, 4, 5, 6), [8, 9]),
        call(IMAGE, [5, 12], 1.1, 2.1), call(IMAGE, [5, 6], 1.1, 1.1),
    ),
    case(aten.upsample_nearest2d.default, call(_BYTES, [8, 4]), grad=False),
    case(
        aten.upsample_nearest3d.default, call(VOLUME, [8, 3, 5]),
        call(VOLUME, [5, 6, 3], 1.3, 1.2, 0.8),
    ),
    case(
        aten._upsample_nearest_exact1d.default, call(LINE, [10]), call(LINE, [3]),
        call(turned(LINE), [7], 1.4), call(b(2, 3, 5), [8]),
    ),
    case(
        aten._upsample_nearest_exact2d.default, call(IMAGE, [10, 12]), call(IMAGE, [3, 4]),
        call(turned(IMAGE), [7, 9], 1.4, 1.5),
    ),
    case(
        aten._upsample_nearest_exact3d.default, call(VOLUME, [8, 3, 5]),
        call(VOLUME, [5, 6, 3], 1.3, 1.2, 0.8),
    ),
]  # fmt: skip

_GRID = f(2, 3, 2, 2, seed=2)
_GRID3 = f(1, 2, 3, 2, 3, seed=2)
_SMALL = f(2, 2, 3, 4)
_CORNERS = (
    t(-1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 0.0, 0.0).reshape(1, 2, 2, 2).expand(2, 2, 2, 2).clone()
)
SAMPLING = [
    case(
        aten.grid_sampler_2d.default, call(_SMALL, _GRID, 0, 0, False),
        call(turned(_SMALL), _GRID, 0, 2, True), call(_SMALL, _CORNERS, 1, 1, True),
        call(_SMALL, _GRID, 2, 2, False),
    ),
    case(
        aten.grid_sampler_2d.default, call(_SMALL, _GRID, 0, 1, True),
        call(_SMALL, _GRID, 1, 2, False), call(_SMALL, _GRID, 2, 0, True),
        call(b(2, 2, 3, 4), b(2, 3, 2, 2, seed=2), 0, 0, False), grad=False, bf16=4e-2,
    ),
    case(
        aten.grid_sampler_3d.default, call(VOLUME, _GRID3, 0, 2, True),
        call(VOLUME, _GRID3, 1, 1, False),
    ),
]  # fmt: skip

LINE = f(2, 3, 6)
PADDING = [
    case(
        op, call(LINE, [2, 1]), call(LINE[0], [0, 4]), call(LINE, [-2, 3]), call(LINE, [1, -3]),
        call(b(2, 9), [3, 3]), bf16=8e-3,
    )
    for op in (aten.replication_pad1d.default, aten.reflection_pad1d.default)
] + [
    case(op, call(IMAGE, [1, 2, 3, 0]), call(turned(IMAGE)[0], [0, 1, -2, 1]))
    for op in (aten.replication_pad2d.default, aten.reflection_pad2d.default)
] + [
    case(op, call(VOLUME, [1, 1, 2, 2, 2, 0]), call(VOLUME[0], [0, 3, 1, -2, -1, 0]))
    for op in (aten.replication_pad3d.default, aten.reflection_pad3d.default)
] + [
    # Further out than the image is large.
    case(aten.replication_pad3d.default, call(VOLUME, [9, 0, 0, 6, 7, 8])),
]  # fmt: skip

CASES = [*CONVOLUTION, *POOLING, *RESIZING, *SAMPLING, *PADDING]
