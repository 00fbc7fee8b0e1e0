"""Normalisation, losses, expert products, and what creates, copies and compares tensors."""

import math
from typing import Any

import torch

from tests.model.lowering_cases.case import BF16, b, call, case, f, i, mask, t, turned

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
X = f(2, 4, 3, 5)
SCALE, SHIFT = f(4, seed=2), f(4, seed=3)
MEAN, VARIANCE = f(4, seed=4), f(4, seed=5).abs() + 0.5


def _batch_norm(op: Any) -> Any:
    """The output and the running statistics after the call."""

    def run(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Any:
        kept = [None if s is None else s.detach().clone() for s in (mean, variance)]
        out = op(x, weight, bias, *kept, *rest)[0]
        return (out, *(s for s in kept if s is not None))

    return run


_STATISTICS = (
    call(X, SCALE, SHIFT, MEAN, VARIANCE, True, 0.1, 1e-5),
    call(X, SCALE, SHIFT, MEAN, VARIANCE, False, 0.1, 1e-5),
    call(turned(X), None, None, MEAN, VARIANCE, True, 0.3, 1e-5),
    call(f(5, 4), SCALE, None, MEAN, VARIANCE, False, 0.1, 1e-3),
)


def _wide_statistics(*args: Any) -> Any:
    """Of bfloat16 the CPU kernel, alone, gives the statistics in bfloat16."""
    out, *statistics = aten.native_layer_norm.default(*args)
    return out, *(s for s in statistics if out.dtype is torch.float32)


def _layer_norm_backward(grad: Any, x: Any, shape: Any, weight: Any, bias: Any, wanted: Any) -> Any:
    """The wanted gradients, by the statistics of the forward."""
    _, mean, inverse = aten.native_layer_norm.default(x, shape, weight, bias, 1e-5)
    found = aten.native_layer_norm_backward.default(
        grad, x, shape, mean, inverse, weight, bias, wanted
    )
    return tuple(g for g, flag in zip(found, wanted, strict=True) if flag)


NORMALIZATION = [
    case(
        aten.native_batch_norm.default, *_STATISTICS,
        call(X, SCALE, SHIFT, None, None, True, 0.1, 1e-5),
        call(b(2, 4, 3), b(4), b(4), b(4), b(4).abs(), True, 0.1, 1e-5),
        run=_batch_norm(aten.native_batch_norm.default), outputs=1, bf16=8e-3,
    ),
    case(
        aten._native_batch_norm_legit.default, *_STATISTICS,
        run=_batch_norm(aten._native_batch_norm_legit.default), outputs=1,
    ),
    case(
        aten.native_batch_norm.default, call(X, SCALE, SHIFT, None, None, True, 0.1, 1e-5),
    ),
    case(
        aten._batch_norm_with_update.default, call(X, SCALE, SHIFT, MEAN, VARIANCE, 0.1, 1e-5),
        call(f(5, 4), SCALE, None, MEAN, VARIANCE, 0.3, 1e-5),
        run=_batch_norm(aten._batch_norm_with_update.default), outputs=1,
    ),
    case(
        aten._native_batch_norm_legit.no_stats, call(X, SCALE, SHIFT, True, 0.1, 1e-5),
        call(turned(X), None, None, True, 0.1, 1e-5),
        run=lambda *a: aten._native_batch_norm_legit.no_stats(*a)[0],
    ),
    case(
        aten.native_layer_norm.default, call(b(4, 64) + 4, [64], b(64), b(64, seed=2), 1e-5),
        call(f(3, 4, 5), [4, 5], f(4, 5), f(4, 5, seed=2), 1e-5),
        call(turned(f(3, 4)), [4], None, f(4), 1e-5), call(f(3, 4), [4], f(4), None, 1e-5),
        call(f(0, 4), [4], None, None, 1e-5), run=_wide_statistics, bf16=8e-3,
    ),
    case(
        aten.native_layer_norm_backward.default,
        call(f(3, 4, 5), f(3, 4, 5, seed=2), [4, 5], f(4, 5), f(4, 5), [True, True, True]),
        call(turned(f(3, 4)), f(3, 4, seed=2), [4], None, None, [True, False, False]),
        call(f(2, 3, 4), f(2, 3, 4, seed=2), [4], f(4), None, [False, True, False]),
        run=_layer_norm_backward,
    ),
    case(
        aten.native_group_norm.default, call(b(2, 4, 64) + 4, b(4), b(4), 2, 4, 64, 2, 1e-5),
        call(X, SCALE, SHIFT, 2, 4, 15, 2, 1e-5), call(X, None, None, 2, 4, 15, 4, 1e-5),
        call(f(2, 4), SCALE, None, 2, 4, 1, 1, 1e-5), outputs=1, bf16=8e-3,
    ),
    case(
        aten.rrelu_with_noise.default, call(t(-2.0, 0.0, 3.0), torch.zeros(3)),
        call(turned(f(3, 4)), torch.zeros(3, 4), 0.1, 0.4, False),
        call(b(8), torch.zeros(8, dtype=BF16)),
        run=lambda x, n, *a: aten.rrelu_with_noise.default(x, n.detach(), *a), bf16=8e-3,
    ),
    case(
        aten.rrelu_with_noise_.default, call(t(-2.0, 0.0, 3.0), torch.zeros(3)),
        call(f(3, 4), torch.zeros(3, 4), 0.1, 0.4, False),
        run=lambda x, n, *a: aten.rrelu_with_noise_.default(x * 1, n.detach(), *a),
    ),
]  # fmt: skip

_LOGS = torch.log_softmax(f(4, 3), 1)
_CLASSES = t(0, 2, -100, 1)
_WEIGHTS = (None, t(0.5, 1.0, 2.0))
_PLANES = torch.log_softmax(f(2, 3, 2, 4), 1)
_PLANE_CLASSES = i(2, 2, 4, low=0, high=3)
_STEPS = torch.log_softmax(f(7, 3, 5), 2)
_TARGETS = t(1, 2, 2, 3, 3, 4, 1, 1, 2).reshape(3, 3)
_LENGTHS = ([7, 5, 7], [3, 3, 1])


def _weighted(op: Any) -> Any:
    """Weights of classes have no gradient."""
    return lambda x, y, w, *rest: op(x, y, None if w is None else w.detach(), *rest)


_SHARES, _SIDES = t(0.0, 1.0, 1.0, 0.0, 0.25, 0.6), t(0.0, 1.0, 0.0, 1.0, 0.5, 1.0)
_TIES = t(2.0, 1.0, 0.5, 0.0, 1.0, 0.0, 3.0, 2.0, 1.0).reshape(3, 3)
_LABELS = t(0, -1, 2, 2, 0, -1, 1, 1, -1).reshape(3, 3)


def _of_probabilities(x: Any, target: Any, weight: Any, reduction: int) -> Any:
    weight = None if weight is None else weight.detach()
    return aten.binary_cross_entropy.default(x, target.detach(), weight, reduction)


LOSSES = [
    case(
        aten.binary_cross_entropy.default,
        *(call(_SHARES, _SIDES, w, how) for w in (None, f(6)) for how in (0, 1, 2)),
        call(torch.sigmoid(f(3, 4)), torch.sigmoid(f(3, 4, seed=2)), None, 1),
        run=_of_probabilities, rtol=1e-4,
    ),
    case(
        aten.multi_margin_loss.default,
        *(call(_TIES, t(0, 1, 2), 1, 1.0, w, how) for w in _WEIGHTS for how in (0, 1, 2)),
        call(f(4, 3), t(0, 2, 1, 1), 2, 0.5), call(f(3), torch.tensor(1)),
        call(f(), torch.tensor(0)),
        run=lambda x, y, p=1, m=1.0, w=None, how=1: aten.multi_margin_loss.default(
            x, y, p, m, None if w is None else w.detach(), how
        ),
    ),
    case(
        aten.multilabel_margin_loss_forward.default,
        *(call(x, _LABELS, how) for x in (_TIES, f(3, 3)) for how in (0, 1, 2)),
        call(f(3), t(1, 0, -1), 1), call(f(3), t(-1, 1, 2), 1), call(f(3), t(0, 1, 2), 1),
        call(f(), torch.tensor(0), 1),
        outputs=1,
    ),
    case(
        aten.nll_loss_forward.default,
        *(call(_LOGS, _CLASSES, weight, how, -100) for weight in _WEIGHTS for how in (0, 1, 2)),
        call(f(3), torch.tensor(1), None, 1, -100), call(_LOGS, _CLASSES.abs() % 3, None, 1, 2),
        call(torch.log_softmax(b(4, 3), 1), _CLASSES, None, 1, -100),
        run=_weighted(aten.nll_loss_forward.default), outputs=1, bf16=8e-3,
    ),
    case(
        aten.nll_loss2d_forward.default,
        *(call(_PLANES, _PLANE_CLASSES, w, how, 1) for w in _WEIGHTS for how in (0, 1, 2)),
        run=_weighted(aten.nll_loss2d_forward.default), outputs=1,
    ),
    case(
        aten._ctc_loss.default, call(_STEPS, _TARGETS, *_LENGTHS),
        call(_STEPS, _TARGETS.reshape(-1)[:7], *_LENGTHS),
        call(_STEPS, _TARGETS, [3, 5, 7], [3, 3, 0], 0, True),
        call(_STEPS, _TARGETS.clamp(max=3), *_LENGTHS, 4),
        run=lambda *a: aten._ctc_loss.default(*a)[0], rtol=1e-4,
    ),
    case(
        aten._ctc_loss.Tensor, call(_STEPS, _TARGETS, t(7, 5, 7), t(3, 3, 1)),
        call(_STEPS, _TARGETS.reshape(-1), t(7, 7, 6), t(3, 3, 3)),
        run=lambda *a: aten._ctc_loss.Tensor(*a)[0], rtol=1e-4,
    ),
    case(
        aten._grouped_mm.default, call(b(8, 16), b(3, 16, 8), t(2, 2, 8, dtype=torch.int32)),
        call(b(3, 8, 16), b(3, 16, 8)), bf16=8e-3,
    ),
]  # fmt: skip


_FLOATS = t(-1.5, 2.7, 3e9, -0.0, 300.0)
COPIES = [
    case(
        aten.copy.default, call(f(2, 3), f(3)), call(i(3), t(1.7, -1.7, 2.0)),
        call(f(2, 3), turned(f(2, 3))), call(mask(3), t(0.5, 0.0, -1.0)), call(f(3), b(3)),
        call(f(0, 3), f(1)), grad=False,
    ),
    case(
        aten._to_copy.default, call(_FLOATS[:2], dtype=torch.int64), call(f(3), dtype=BF16),
        call(t(-1.0, 257.0, 3.9), dtype=torch.int8), call(t(0.5, 0.0, NAN), dtype=torch.bool),
        call(turned(f(2, 3))), call(i(3), dtype=torch.float32), call(b(3), dtype=torch.uint8),
        call(mask(3), dtype=torch.float32),
    ),
    case(
        aten.clone.default, call(turned(f(2, 3))),
        call(f(1, 2, 2, 2), memory_format=torch.channels_last), call(i(3)), call(f()),
    ),
    case(
        torch.ops.prims.convert_element_type.default, call(f(3), BF16),
        call(t(1.7, -1.7), torch.int32), call(i(3), torch.float32), call(t(0.5, 0.0), torch.bool),
        grad=False,
    ),
    case(
        aten.fill.Scalar, call(i(2, 3), 2.7), call(turned(f(2, 3)), 2), call(mask(3), 2),
        call(f(), 1.5), call(b(3), 0.3),
    ),
    case(aten.fill.Tensor, call(f(2, 3), f()), call(b(3), torch.tensor(0.3))),
    case(aten.fill.Tensor, call(i(2, 3), torch.tensor(2.7)), grad=False),
    case(aten.zero.default, call(f(2, 3)), call(i(3)), call(mask(3)), grad=False),
    case(
        aten.zeros_like.default, call(f(2, 3), dtype=torch.int64), call(turned(f(2, 3))),
        call(mask(3)), grad=False,
    ),
    case(
        aten.ones_like.default, call(f(2, 3), dtype=torch.int64), call(turned(f(2, 3))),
        call(mask(3)), grad=False,
    ),
    case(
        aten.full_like.default, call(i(3), 2.7), call(f(2, 3), 2, dtype=torch.bool),
        call(turned(f(2, 3)), INF), call(b(3), 0.3), grad=False,
    ),
    case(
        aten.cat.default, call([f(0), f(2, 3), f(1, 3)], 0), call([f(2, 3), turned(f(2, 1))], -1),
        call([i(2), f(3)]), call([f(0), f(0)]), call([b(2), f(2)]),
    ),
]  # fmt: skip


def _filled(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """A tensor of a size and of a value that is read from a traced one."""
    return aten.full.default([2, 3], x.sum().item(), **options)


def _scalar(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return aten.scalar_tensor.default(x.sum().item(), **options)


def _sizes(op: Any) -> Any:
    """What is made besides values that nothing defines: all of it zeroed, with its strides."""

    def run(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        made = op(x, *args, **options)
        return torch.zeros_like(made) + torch.tensor(made.stride()).sum(), x * 2

    return run


CREATION = [
    case(
        aten.full.default, call(t(2.0, 3.0)), call(t(2, 3)), call(t(2.7), dtype=torch.int64),
        run=_filled, grad=False,
    ),
    case(
        aten.scalar_tensor.default, call(t(2.0, 3.0)), call(t(2, 3)),
        call(t(2.7), dtype=torch.int64), run=_scalar, grad=False,
    ),
    case(
        aten.empty_like.default, call(f(2, 3), dtype=torch.int64), call(turned(f(2, 3))),
        run=_sizes(aten.empty_like.default), grad=False,
    ),
    case(
        aten.new_empty.default, call(f(2, 3), [4, 1]), call(i(3), [2], dtype=torch.float32),
        run=_sizes(aten.new_empty.default), grad=False,
    ),
    case(
        aten.new_empty_strided.default, call(f(2, 3), [2, 3], [1, 2]),
        run=_sizes(aten.new_empty_strided.default), grad=False,
    ),
    case(
        aten.new_zeros.default, call(f(2, 3), [4, 1]), call(i(3), [2], dtype=torch.float32),
        grad=False,
    ),
    case(
        aten.new_ones.default, call(f(2, 3), [4, 1]), call(i(3), [2], dtype=torch.bool), grad=False,
    ),
    case(aten.new_full.default, call(f(2, 3), [4, 1], 0.3), call(i(3), [2], 2.7), grad=False),
    case(
        aten.set_.source_Tensor, call(f(2, 3), f(4)),
        run=lambda x, y: aten.set_.source_Tensor(x.clone(), y), grad=False,
    ),
]  # fmt: skip


def _chosen(test: Any) -> Any:
    """A branch on what the op decides."""

    def run(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return x + 1.0 if test(x, *args, **options) else x - 1.0

    return run


DECISIONS = [
    case(
        aten._local_scalar_dense.default, call(i(1)), call(mask(1)),
        run=lambda x: x + 2 if aten._local_scalar_dense.default(x) > 0 else x, grad=False,
    ),
    case(
        aten.equal.default, call(f(3), f(3)), call(f(3), f(3, seed=2)), call(f(3), f(2)),
        run=_chosen(aten.equal.default),
    ),
    case(
        aten.allclose.default, call(f(3), f(3) * 1.1), call(f(3), f(3) * 1.1, rtol=0.2),
        run=_chosen(aten.allclose.default),
    ),
    case(
        aten.allclose.default, call(t(NAN), t(NAN), equal_nan=True),
        run=_chosen(aten.allclose.default),
    ),
    case(
        aten.is_same_size.default, call(f(3), f(3)), call(f(3), f(1, 3)),
        run=_chosen(aten.is_same_size.default),
    ),
]  # fmt: skip

CASES = [*NORMALIZATION, *LOSSES, *COPIES, *CREATION, *DECISIONS]
