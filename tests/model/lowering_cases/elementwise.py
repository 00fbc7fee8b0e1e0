"""Elementwise arithmetic, limits, activations and special functions."""

import math

import torch

from tests.model.lowering_cases.case import b, call, case, f, i, mask, t, turned

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
BIG = t(2**24 + 1, -(2**25) - 3, 7, -7, 0)
BYTES = t(0, 1, 7, 200, 255, dtype=torch.uint8)
EDGES = t(-INF, -2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, INF, NAN)
# An exponential overflows, and a gradient passes nan.
_FAR = t(NAN, 100.0, -100.0, 1e4, -1e4, 88.0, 0.0, 30.0, -30.0, 0.5)
_THREES = t(-4.0, -3.0, -1.0, 0.0, 2.0, 3.0, 4.0)
KINKS = t(-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
POSITIVE = f(3, 4).abs() + 0.1
BROADCAST = (f(3, 1, 4), turned(f(5, 4, seed=2)))

_ROUNDED = (b(64), b(64, seed=2))
# Here torch's CPU kernels round a Python number to bfloat16 first; its CUDA kernels do not, nor do
# the lowerings.
NUMBER = 8e-3

ARITHMETIC = [
    case(
        aten.mul.Tensor,
        call(b(64), 0.3),
        call(*BROADCAST),
        call(*_ROUNDED),
        call(BIG, t(3, 3, 3, 3, 3)),
        call(mask(4), mask(4, seed=2)),
        call(f(), i(3)),
        call(f(0, 3), f(1)),
    ),
    case(aten.mul.Scalar, call(b(64), 0.3), call(f(2, 3), 2), call(i(4), 2.5), call(mask(3), True)),
    case(
        aten.add.Tensor,
        call(*_ROUNDED, alpha=0.3),
        call(*BROADCAST, alpha=-2),
        call(BIG, BIG, alpha=3),
        call(mask(4), mask(4, seed=2)),
        call(f(), b(3)),
        call(f(0), f(2, 1)),
        call(i(3), f(3)),
        bf16=NUMBER,
    ),
    case(
        aten.add.Scalar,
        call(b(64), 0.3, 0.7),
        call(f(3), 2, 3),
        call(i(3), 1.5),
        call(BIG, 3, 5),
        bf16=NUMBER,
    ),
    case(
        aten.sub.Tensor,
        call(*_ROUNDED, alpha=0.3),
        call(*BROADCAST),
        call(BYTES, BYTES, alpha=2),
        call(f(), i(2, 1)),
        call(f(2, 0), f(2, 1)),
        bf16=NUMBER,
    ),
    case(aten.sub.Scalar, call(b(64), 0.3, 0.7), call(f(3), 2, 3), call(i(3), 1.5), bf16=NUMBER),
    case(
        aten.rsub.Tensor,
        call(*_ROUNDED, alpha=0.3),
        call(*BROADCAST, alpha=2),
        call(i(3), i(3, seed=2), alpha=3),
        call(f(0), f(1)),
        bf16=NUMBER,
    ),
    case(
        aten.rsub.Scalar,
        call(b(64), 0.3, 0.7),
        call(f(2, 3), 1),
        call(i(3), 1.5, 2),
        bf16=NUMBER,
    ),
]

_DIVISORS = (
    t(7.0, -7.0, 7.5, -0.5, 0.0, 5.0, INF, 1.0),
    t(2.0, 2.0, -2.0, 1.5, 0.0, 0.0, 3.0, -INF),
)
_INTEGERS = (BIG, t(3, 2, -2, 2, 5))

DIVISION = [
    case(
        aten.div.Tensor,
        call(*_DIVISORS),
        call(*BROADCAST),
        call(*_ROUNDED),
        call(i(4), i(4, low=1)),
        call(f(), i(3, low=1)),
        call(f(0, 3), f(3)),
    ),
    case(aten.div.Scalar, call(b(64), 0.3), call(f(2, 3), 0.0), call(i(4), 2)),
    case(
        aten.div.Tensor_mode,
        call(*_INTEGERS, rounding_mode="trunc"),
        call(*_INTEGERS, rounding_mode="floor"),
        call(*_DIVISORS, rounding_mode="trunc"),
        call(*_DIVISORS, rounding_mode="floor"),
        call(*BROADCAST, rounding_mode=None),
        call(*_ROUNDED, rounding_mode="floor"),
        call(*_ROUNDED, rounding_mode="trunc"),
        call(BYTES, t(1, 3, 7, 9, 2, dtype=torch.uint8), rounding_mode="floor"),
    ),
    case(
        aten.div.Scalar_mode,
        call(BIG, 3, rounding_mode="floor"),
        call(BIG, 3, rounding_mode="trunc"),
        call(b(64), 0.3, rounding_mode="floor"),
        call(f(2, 3), -0.7, rounding_mode="trunc"),
        call(f(3), 0.0, rounding_mode="floor"),
    ),
    case(
        aten.floor_divide.default,
        call(*_DIVISORS),
        call(*_INTEGERS),
        call(*_ROUNDED),
        call(f(3, 1), turned(f(2, 3, seed=2)).transpose(0, 1)),
        call(f(0), f(1)),
        grad=False,
    ),
    case(
        aten.floor_divide.Scalar,
        call(f(3), 0.0),
        call(BIG, 3),
        call(b(64), 0.3),
        call(f(2, 3), -0.7),
        grad=False,
    ),
    case(
        aten.fmod.Tensor,
        call(t(1e20, 7.5, -7.5, 3.0, 5.0), t(3.0, 2.0, 2.0, INF, 0.0)),
        call(*BROADCAST),
        call(*_INTEGERS),
        call(*_ROUNDED),
        call(f(), f(2)),
    ),
    case(
        aten.fmod.Scalar, call(t(1e20, 7.5, -7.5), 3.0), call(BIG, -3), call(b(64), 0.3),
        call(f(3), INF),
    ),
    case(
        aten.remainder.Tensor,
        call(*BROADCAST),
        call(*_INTEGERS),
        call(*_ROUNDED),
        call(t(7.5, -7.5, 5.0, 3.0), t(-2.0, 2.0, 0.0, INF)),
        call(f(0), f(1)),
    ),
    case(
        aten.gcd.default,
        call(t(-12, 0, 7, 6), t(18, 5, 0, 4)),
        call(BYTES, BYTES.flip(0)),
    ),
    case(aten.remainder.Scalar, call(b(64), 0.3), call(f(2, 3), -0.7), call(BIG, -3), call(BIG, 3)),
    case(
        aten.remainder.Scalar_Tensor, call(5.3, b(64)), call(2, f(2, 3)), call(7, t(-3, 2, 5, -1)),
        grad=False,
    ),
]  # fmt: skip

POWERS = [
    case(
        aten.pow.Tensor_Scalar,
        call(t(4097, -4097, 3, 0), 2),
        call(f(2, 3), 3),
        call(POSITIVE, 0.5),
        call(POSITIVE, -0.5),
        call(POSITIVE, 1.7),
        call(f(4), -2),
        call(b(64).abs(), 0.3),
        call(t(0.0, 1.0, -1.0), 0),
        call(t(0.0, 2.0), 1.0),
        call(f(0), 2),
        call(f(), 2.0),
        call(i(4), 1.5),
    ),
    case(
        aten.pow.Tensor_Tensor,
        call(t(4097, -1, 1, 2, 0), t(2, -3, -2, 5, 0)),
        call(POSITIVE, f(4)),
        call(POSITIVE[:, :1], turned(f(2, 3, 4))),
        call(b(64).abs(), b(64, seed=2)),
        call(t(0.0, 0.0, 2.0), t(0.0, 2.0, 0.0)), call(t(0.0, 2.0), t(-1.0, -2.0)),
        call(f(2, 0), f(2, 1)),
    ),
    case(
        aten.pow.Scalar, call(4097, t(0, 1, 2)), call(2.5, f(2, 3)), call(0.3, b(64)),
        call(2, t(0, 3, 30)),
    ),
    case(
        aten.rsqrt.default, call(mask(4)), call(POSITIVE), call(t(0.0, -0.0, INF, 4.0)),
        call(b(64).abs()), call(i(3, low=1)), call(f(0)),
    ),
]  # fmt: skip

LIMITS = [
    case(
        aten.clamp.default,
        call(KINKS, -1.0, 1.0),
        call(EDGES, None, 0.5),
        call(EDGES, 2.0, 1.0),
        call(i(4), -1.5, 2),
        call(b(64), 0.1, None),
        call(turned(f(3, 4)), min=-0.5),
        call(f(), 0, 1),
        call(f(0), 0, 1),
        call(BYTES, 2, 100),
    ),
    case(
        aten.clamp.Tensor,
        call(KINKS, t(-1.0), t(1.0)),
        call(f(3, 1), f(4), f(3, 4, seed=3)),
        call(f(3), None, t(0.0, NAN, 1.0)),
        call(i(4), t(-1), t(1)),
        call(b(64), b(1), None),
    ),
    case(
        aten.clamp_min.default, call(KINKS, -1.0), call(EDGES, 0), call(i(4), 2), call(b(64), 0.1),
        call(f(0), 1),
    ),
    case(
        aten.clamp_min.Tensor, call(KINKS, KINKS.clone()), call(*BROADCAST), call(EDGES, t(NAN)),
        call(i(4), i(4, seed=2)),
    ),
    case(
        aten.clamp_max.default, call(KINKS, -1.0), call(EDGES, 0), call(i(4), 2), call(b(64), 0.1),
        call(f(0), 1),
    ),
    case(
        aten.clamp_max.Tensor, call(KINKS, KINKS.clone()), call(*BROADCAST), call(EDGES, t(NAN)),
        call(i(4), i(4, seed=2)),
    ),
    case(
        aten.softshrink.default, call(KINKS), call(turned(f(3, 4)), 0.3), call(b(64)),
        call(EDGES, 0.0),
    ),
    case(
        aten.hardtanh.default, call(KINKS), call(turned(f(3, 4)), -0.5, 0.3), call(b(64)),
        call(i(4)), call(f()), call(f(0)),
    ),
    case(aten.hardsigmoid.default, call(_THREES), call(turned(f(3, 4))), call(b(64)), call(f(0))),
    case(aten.hardswish.default, call(_THREES), call(turned(f(3, 4))), call(b(64)), call(f(0))),
    case(aten.relu.default, call(_FAR), call(turned(f(3, 4))), call(b(64)), call(i(4)), call(f(0))),
    case(
        aten.elu.default, call(_FAR), call(b(64), 0.5, 1.5, 0.7), call(turned(f(3, 4)), 2),
        call(f()),
    ),
    case(aten.celu.default, call(_FAR), call(_FAR, 0.5), call(b(64)), call(f(0))),
    case(aten.softplus.default, call(_FAR), call(_FAR, 2, 1), call(b(64)), call(f())),
    case(aten.mish.default, call(_FAR), call(turned(f(3, 4))), call(b(64)), call(f(0))),
    case(
        aten.leaky_relu.default, call(KINKS), call(b(64), 0.3), call(turned(f(3, 4)), -0.5),
        call(f()), call(f(0), 0.1),
    ),
    case(
        aten.round.decimals, call(b(64), decimals=2), call(f(3) * 100, decimals=2),
        call(f(3) * 100, decimals=-2), call(t(2.5, 0.5, -0.5), decimals=0),
    ),
]  # fmt: skip

ACTIVATIONS = [
    case(
        aten.gelu.default, call(b(64)), call(b(64), approximate="tanh"), call(EDGES[1:-2]),
        call(turned(f(3, 4)), approximate="tanh"), call(f()), call(f(0)),
    ),
    case(
        aten.silu.default, call(b(64)), call(EDGES[1:-2]), call(turned(f(3, 4))), call(f()),
        call(f(0)),
    ),
    case(
        aten.glu.default, call(b(32, 4), 1), call(f(4, 3), 0), call(turned(f(2, 3, 4)), -1),
        call(f(2, 0)),
    ),
    case(
        aten._softmax.default, call(b(4, 64), -1, False), call(turned(f(3, 4)), 0, False),
        call(f(), 0, False), call(f(2, 3, 4), -2, False), call(f(0, 3), 1, False),
        call(t(-INF, 0.0, 1.0), 0, False),
    ),
    case(
        aten._log_softmax.default, call(b(4, 64), -1, False), call(turned(f(3, 4)), 0, False),
        call(f(), -1, False), call(f(2, 3, 4), -2, False), call(f(0, 3), 1, False),
        call(f(3) * 1e4, 0, False), bf16=8e-3,
    ),
    case(
        aten._safe_softmax.default, call(t(-INF, -INF, -INF), 0), call(f(2, 3, 4), -2),
        call(b(4, 64), -1), call(b(3, 4), 0, torch.float32), call(f(), 0),
    ),
    case(
        aten.logit.default, call(t(0.0, 0.1, 0.5, 0.9, 1.0), 0.1),
        call(t(0.0, 0.1, 0.9, 1.0, -0.5, 1.5)),
        call(torch.sigmoid(b(64))), call(torch.sigmoid(turned(f(3, 4)))), call(f(0)), bf16=2e-2,
    ),
]  # fmt: skip

UNARY = [
    case(
        aten.cosh.default,
        call(t(-3.0, -0.3, -1e-3, 0.0, 1e-4, 0.2, 0.25, 2.0)),
        call(torch.complex(f(3), f(3, seed=2))),
        bf16=1e-2,
    ),
    case(
        aten.log2.default, call(b(64).abs()), call(POSITIVE), call(t(0.0, 1.0, INF)),
        call(i(3, low=1)), call(f(0)), call(mask(4) | True),
    ),
    case(
        aten.log10.default, call(b(64).abs()), call(POSITIVE), call(t(0.0, 1.0, INF)),
        call(i(3, low=1)), call(f(0)), call(mask(4) | True),
    ),
    case(
        aten.sign.default, call(mask(4)), call(EDGES), call(i(4)), call(BYTES), call(b(8)),
        call(f(0)),
    ),
    case(
        aten.sgn.default, call(mask(4)), call(EDGES), call(i(4)),
        call(torch.complex(f(4), f(4, seed=2))), call(torch.zeros(2, dtype=torch.complex64)),
    ),
    case(
        aten.maximum.default, call(KINKS, KINKS.clone()), call(f(3, 1), f(4)),
        call(i(4), i(4, seed=2)), call(b(5), b(5, seed=2)), call(i(4), f(4)),
    ),
    case(
        aten.minimum.default, call(KINKS, KINKS.clone()), call(f(3, 1), f(4)),
        call(i(4), i(4, seed=2)), call(b(5), b(5, seed=2)), call(turned(f(3, 4)), t(0.5)),
    ),
    case(aten.fmax.default, call(KINKS, KINKS.clone()), call(EDGES, t(1.0)), call(f(3, 1), f(4))),
    case(aten.fmin.default, call(KINKS, KINKS.clone()), call(EDGES, t(1.0)), call(f(3, 1), f(4))),
    case(
        aten.xlogy.Tensor, call(t(0.0, 0.0, 0.0, 2.0), t(0.0, -1.0, 3.0, 0.5)),
        call(b(8), b(8, seed=2).abs()), call(i(4), i(4, low=1)), call(f(3, 1), f(4).abs()),
        bf16=8e-3,
    ),
    case(aten.xlogy.Scalar_Self, call(2.0, f(4).abs()), call(0.0, t(0.0, 2.0))),
    case(aten.xlogy.Scalar_Other, call(t(0.0, 1.0), 2.0), call(t(0.0), -1.0)),
    case(
        aten.special_xlog1py.default, call(t(0.0, 0.0, 0.0, 2.0), t(-1.0, -2.0, 3.0, 0.5)),
        call(f(3, 1), f(4).abs()), call(i(4), i(4, low=1)),
    ),
    case(aten.special_xlog1py.self_scalar, call(2.0, f(4).abs()), call(0.0, t(-1.0, 2.0))),
    case(aten.special_xlog1py.other_scalar, call(t(0.0, 1.0), 2.0), call(t(0.0), -2.0)),
    case(
        aten.copysign.Tensor, call(KINKS, -KINKS), call(KINKS, t(0.0)), call(f(3, 1), f(4)),
        call(b(8), b(8, seed=2)), call(i(4), i(4, seed=2)),
    ),
    case(aten.copysign.Scalar, call(KINKS, -2.0), call(b(8), 1), call(i(4), -1)),
    case(
        aten.abs.default, call(KINKS), call(EDGES), call(turned(f(3, 4))), call(BIG), call(BYTES),
        call(b(8)), call(f()), call(f(0)), call(torch.complex(t(3.0, 0.0), t(-4.0, 0.0))),
    ),
    case(
        aten.neg.default, call(BYTES), call(turned(f(3, 4))), call(BIG), call(b(8)), call(f()),
        call(f(0)),
    ),
]  # fmt: skip

_NEGATIVE = t(-0.3, -1.7, -5.5, -9.2, -20.6, 0.2, 3.5, 12.0)

SPECIAL = [
    case(
        aten.lgamma.default, call(t(0.0, 1.0, 2.5)), call(turned(f(3, 4)).abs()),
        call(b(8).abs() + 0.5), call(i(3, low=1)), rtol=1e-4, bf16=8e-3,
    ),
    case(
        aten.sinc.default, call(t(0.0, 1.0, -2.0)), call(turned(f(3, 4))), call(b(8)), call(i(4)),
        rtol=1e-4, bf16=8e-3,
    ),
    case(
        aten.atan2.default, call(KINKS, KINKS.flip(0)), call(t(0.0, 0.0), t(1.0, -1.0)),
        call(f(3, 1), f(4)), call(b(8), b(8, seed=2)), call(i(4), i(4, seed=2)), bf16=8e-3,
    ),
    case(
        aten.hypot.default, call(t(0.0, 3.0, -0.0), t(0.0, 4.0, 1.0)), call(f(3, 1), f(4)),
        call(b(8), b(8, seed=2)), bf16=8e-3,
    ),
    case(
        aten.special_entr.default, call(t(0.0, 1.0, 0.3, -1.0, NAN)), call(turned(f(3, 4)).abs()),
        call(i(4)), call(b(8).abs()), bf16=8e-3,
    ),
    case(
        aten.i0.default, call(t(0.0, -0.0, 1e-30, -3.0, 8.0)), call(turned(f(3, 4))), call(i(4)),
        call(f(0)),
    ),
    case(
        aten.angle.default, call(t(-2.0, -0.0, 0.0, 3.0, NAN)), call(i(4)), call(turned(f(3, 4))),
        call(torch.complex(t(1.0, 0.0, -2.0, 0.0), t(0.5, 0.0, -0.0, -1.0))),
    ),
    case(
        aten.nextafter.default, call(f(3, 1), f(4)),
        call(t(0.0, 1.0, -1.0, NAN), t(1.0, 1.0, 5.0, 0.0)),
    ),
    case(
        aten.polygamma.default, call(1, mask(4) | True), call(1, _NEGATIVE), call(2, _NEGATIVE),
        call(3, t(0.5, 2.5, 7.0)), call(0, _NEGATIVE), call(1, b(16).abs()), call(1, f(0)),
        call(2, i(3, low=1)), rtol=1e-4,
    ),
    case(
        aten.digamma.default, call(_NEGATIVE), call(t(0.0, 1.0, 5.0)), call(turned(f(3, 4)).abs()),
        call(b(16).abs() + 0.5), call(i(3, low=1)), call(f(0)), rtol=1e-4,
    ),
    case(
        aten.special_erfcx.default, call(t(50.0, 10.0, 0.0, -3.0)), call(turned(f(3, 4))),
        call(i(3)), call(f(0)), rtol=1e-4,
    ),
    case(
        aten.special_log_ndtr.default, call(t(-30.0, -8.0, 0.0, 4.0)), call(turned(f(3, 4))),
        call(i(3)), call(f(0)), rtol=1e-4,
    ),
    case(
        aten.erf.default, call(mask(4)), call(turned(f(3, 4))), call(EDGES), call(b(64)),
        call(i(3)), call(f(0)),
    ),
    case(
        aten.erfc.default, call(mask(4)), call(turned(f(3, 4))), call(EDGES), call(b(64)),
        call(i(3)), call(f(0)),
    ),
    case(
        aten.special_ndtri.default, call(mask(4)), call(t(0.001, 0.2, 0.5, 0.9)), call(t(0.0, 1.0)),
        call(i(3, low=0, high=2)), call(f(0)),
    ),
]  # fmt: skip

CASES = [*ARITHMETIC, *DIVISION, *POWERS, *LIMITS, *ACTIVATIONS, *UNARY, *SPECIAL]
