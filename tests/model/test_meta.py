"""The fast rules for a result's metadata say what torch says, or nothing.

Each rule gets operands that break its assumptions one at a time. Where it answers, sizes, strides
and dtypes are those of the real result on the CPU; where eager PyTorch refuses, it must not answer.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpuport.tracing.dispatch import meta_infer, meta_rules, meta_strides

aten = torch.ops.aten
BF16 = torch.bfloat16


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


POOL = (
    f(3, 4), turned(f(3, 4)), f(4), f(3, 1), f(), f(1), f(0, 4), f(2, 3, 4), f(2, 3, 1, 1),
    f(3, 1).expand(3, 4), f(6, 4)[::2], f(3, 4, dtype=BF16), f(dtype=BF16),
    f(3, 4, dtype=torch.float16), f(3, 4, dtype=torch.int64), f(dtype=torch.int64),
    f(3, 4, dtype=torch.int32), f(3, 4, dtype=torch.bool), f(3, 4, dtype=torch.uint8),
    f(3, 4, dtype=torch.complex64), f(2, 3, 2, 2).to(memory_format=torch.channels_last),
)  # fmt: skip
NUMBERS = (2, 2.5, True)


def described(result: Any) -> list[Any]:
    """Size, stride and dtype of each tensor of a result."""
    results = result if isinstance(result, (tuple, list)) else [result]
    return [(tuple(r.shape), r.stride(), r.dtype) for r in results]


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return made
    return [on_meta(v) for v in value] if isinstance(value, (list, tuple)) else value


def answered(rule: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Check one call; whether the rule gave an answer."""
    try:
        want = described(func(*args, **kwargs))
    except (RuntimeError, IndexError, NotImplementedError):
        want = None
    got = rule(func, tuple(on_meta(a) for a in args), {k: on_meta(v) for k, v in kwargs.items()})
    if got is None:
        return False
    shown = (
        f"{func}({[described(a) if isinstance(a, torch.Tensor) else a for a in args]}, {kwargs})"
    )
    assert want is not None, f"eager refuses {shown}"
    # Of low precision the CPU gives the statistics of a norm in another dtype than elsewhere.
    compared = 1 if "norm" in func._opname else len(want)
    assert described(got)[:compared] == want[:compared], shown
    return True


# -- pointwise -------------------------------------------------------------------------------------


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [
        op
        for op in found
        if torch.Tag.pointwise in op.tags
        and not op._schema.is_mutable
        and "Dimname" not in str(op._schema)
        and all(a.has_default_value() for a in op._schema.arguments if a.kwarg_only)
    ]


def _operands(op: Any) -> Iterator[tuple[Any, ...]]:
    """Positional arguments of every kind that the schema takes."""
    kinds = []
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.has_default_value():
            break
        kinds.append(POOL if "Tensor" in str(argument.type) else NUMBERS)
    if len(kinds) < 3:
        yield from itertools.product(*kinds)
        return
    # All pairs beside one plain operand: the third power of them adds nothing.
    for first, second in itertools.product(range(3), range(3)):
        if first < second:
            plain = [[k[0]] for k in kinds]
            plain[first], plain[second] = list(kinds[first]), list(kinds[second])
            yield from itertools.product(*plain)


POINTWISE = sorted(meta_rules.BOOLEAN | meta_rules.SAME_DTYPE | meta_rules.FLOATING)


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name):
    ops = _overloads(name)
    calls = [(op, args) for op in ops for args in _operands(op)]
    done = sum(answered(meta_rules.pointwise, op, args, {}) for op, args in calls)
    assert done > 0 or not ops or name in ("log_sigmoid_forward", "clamp")


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "plain"),
    [
        (aten.add.Tensor, (f(3, 4), f(4)), {"alpha": 2}, True),
        (aten.add.Tensor, (f(3, dtype=torch.int64), f(3, dtype=torch.int64)), {"alpha": 2}, True),
        (aten.div.Tensor_mode, (f(3, 4), f(4)), {"rounding_mode": "floor"}, True),
        (aten.div.Tensor_mode, (POOL[14], POOL[14]), {"rounding_mode": "trunc"}, False),
        (aten.gelu.default, (f(3, 4),), {"approximate": "tanh"}, True),
        (aten.addcmul.default, (f(3, 4), f(4), f(3, 1)), {"value": 2.5}, True),
        (aten.clamp.default, (f(3, 4), None, 1.5), {}, True),
        (aten.clamp.default, (POOL[14], 0, 1.5), {}, False),
        (aten.where.self, (POOL[17], f(), f(3, 4)), {}, True),
        (aten.where.self, (POOL[17], f(), f(3, 1, dtype=BF16)), {}, False),
        (aten.masked_fill.Scalar, (f(4), POOL[17], 2.5), {}, False),
        (aten.lerp.Scalar, (f(3, 4), f(4), 0.3), {}, True),
    ],
    ids=str,
)
def test_pointwise_with_options(op, args, kwargs, plain):
    assert answered(meta_rules.pointwise, op, args, kwargs) is plain


def drawn_operand(draw: random.Random, shape: list[int]) -> torch.Tensor:
    """A tensor that broadcasts to a size, with dims in some order, gaps, or repeated elements."""
    size = [draw.choice((n, n, 1)) for n in shape[draw.choice((0, 0, 0, len(shape) // 2)) :]]
    order = draw.sample(range(len(size)), len(size))
    gaps = [draw.choice((1, 1, 1, 2)) for _ in size]
    made = f(*(size[dim] * gaps[dim] for dim in order))
    made = made.permute(tuple(order.index(dim) for dim in range(len(size))))
    made = made[tuple(slice(None, None, gap) for gap in gaps)]
    if draw.random() < 0.2:
        made = made[..., None].expand(*made.shape, 1).squeeze(-1)
    if draw.random() < 0.2 and made.dim() and made.shape[0] == 1:
        made = made.expand(shape[-made.dim()], *made.shape[1:])
    return made


@pytest.mark.parametrize("seed", range(4))
def test_pointwise_has_the_strides_of_eager(seed):
    draw, done = random.Random(seed), 0
    for _ in range(400):
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(0, 5))]
        a, b, c = (drawn_operand(draw, shape) for _ in range(3))
        calls = [
            (aten.neg.default, (a,)),
            (aten.mul.Tensor, (a, 2.0)),
            (aten.add.Tensor, (a, b)),
            (aten.lt.Tensor, (a, b)),
            (aten.where.self, (a > 0, b, c)),
            (aten.addcmul.default, (a, b, c)),
        ]
        done += sum(answered(meta_rules.pointwise, op, args, {}) for op, args in calls)
    assert done == 2400


# -- rules by name ---------------------------------------------------------------------------------

X, T = f(3, 4), turned(f(3, 4))
IMAGE = f(2, 4, 5, 6)
LAST = {"memory_format": torch.channels_last}
_CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def _cumulative(op: Any) -> list[Any]:
    numbers = ({}, {"dtype": torch.float64}, {"dtype": torch.int32})
    return [(op, (x, dim), kwargs) for x in POOL for dim in (0, -1, 2) for kwargs in numbers]


VOLUME = f(2, 3, 2, 1, 2)
IMAGES = (f(2, 3, 2, 2), f(1, 3, 1, 1), f(2, 1, 3, 3))
TURNED = (
    *(turned(f(2, 3, 4)), f(6, 4)[::2], IMAGES[0].transpose(2, 3), *IMAGES),
    *(image.to(memory_format=torch.channels_last) for image in IMAGES),
    *(VOLUME, VOLUME.to(memory_format=torch.channels_last_3d), VOLUME.transpose(1, 2)),
)
RULES: dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "_softmax": [(aten._softmax.default, (x, -1, False), {}) for x in POOL],
    "_log_softmax": [(aten._log_softmax.default, (x, 0, False), {}) for x in POOL],
    "_safe_softmax": [
        (aten._safe_softmax.default, (x, 0, dtype), {})
        for x in POOL
        for dtype in (None, torch.float64)
    ],
    "clone": [(aten.clone.default, (x,), {}) for x in POOL]
    + [(aten.clone.default, (x,), {"memory_format": torch.contiguous_format}) for x in POOL]
    + [(aten.clone.default, (IMAGE,), LAST)],
    "copy": [(aten.copy.default, (x, y), {}) for x in POOL for y in POOL],
    "zeros_like": [(aten.zeros_like.default, (x,), k) for x in POOL for k in ({}, {"dtype": BF16})],
    "ones_like": [(aten.ones_like.default, (x,), k) for x in POOL for k in ({}, {"dtype": BF16})],
    "full_like": [(aten.full_like.default, (x, 2.5), {}) for x in POOL]
    + [(aten.full_like.default, (IMAGE, 1), LAST)],
    "relu": [(aten.relu.default, (x,), {}) for x in POOL],
    "native_dropout": [(aten.native_dropout.default, (x, 0.5, True), {}) for x in POOL],
    "_to_copy": [
        (aten._to_copy.default, (x,), k)
        for x in POOL
        for k in ({}, {"dtype": BF16}, {"dtype": torch.int64})
    ]
    + [(aten._to_copy.default, (IMAGE,), LAST)],
    "native_layer_norm": [
        (aten.native_layer_norm.default, (x, [4], w, w, 1e-5), {})
        for x in POOL
        for w in (None, f(4), f(4, dtype=BF16), f(3))
    ]
    + [(aten.native_layer_norm.default, (f(2, 3, 4), [3, 4], f(3, 4), None, 1e-5), {})],
    "native_group_norm": [
        (
            aten.native_group_norm.default,
            (x, w, w, x.shape[0], x.shape[1], x[0, 0].numel(), g, 1e-5),
            {},
        )
        for x in (IMAGE, X, IMAGE.bfloat16(), turned(IMAGE))
        for w in (None, f(4), f(4, dtype=BF16))
        for g in (2, 3)
    ],
    "mm": [
        (aten.mm.default, (a, b), {})
        for a in (X, T, f(3, 5), f(0, 4), X.bfloat16(), X.long())
        for b in (f(4, 5), turned(f(4, 5)), f(4, 0), f(4, 5, dtype=BF16), POOL[14].mT)
    ],
    "bmm": [
        (aten.bmm.default, (a, b), {})
        for a in (f(2, 3, 4), turned(f(2, 3, 4)), f(1, 3, 4))
        for b in (f(2, 4, 5), f(2, 4, 5, dtype=BF16), f(4, 5)[None])
    ],
    "addmm": [
        (aten.addmm.default, (c, a, b), {})
        for c in (f(5), f(3, 1), f(), f(3, 5), f(4), f(5, dtype=BF16), f(1, 3, 5))
        for a in (X, T)
        for b in (f(4, 5), f(3, 5))
    ],
    "mean": [
        (aten.mean.dim, (x, d, k), {})
        for x in POOL
        for d in ([0], [-1], [0, 1], [], None, [2])
        for k in (False, True)
    ]
    + [(aten.mean.dim, (X, [0]), {"dtype": BF16})],
    "sum": [
        (aten.sum.dim_IntList, (x, d, k), {})
        for x in POOL
        for d in ([0], [-1], [0, 1], [], None, [2], [0, 0], [-1, 1])
        for k in (False, True)
    ]
    + [(aten.sum.default, (x,), {}) for x in POOL],
    "amax": [
        (aten.amax.default, (x, d, k), {})
        for x in POOL
        for d in ([0], [-1], [0, 1], [])
        for k in (False, True)
    ],
    "amin": [
        (aten.amin.default, (x, d, k), {})
        for x in POOL
        for d in ([0], [-1], [0, 1], [])
        for k in (False, True)
    ],
    "cat": [(aten.cat.default, ([x, y], d), {}) for x in POOL for y in POOL for d in (0, -1, 1)]
    + [(aten.cat.default, ([x, x, x], d), {}) for x in TURNED for d in (0, 1, -1)]
    + [(aten.cat.default, ([f(0), f(2, 3)], 0), {}), (aten.cat.default, ([f(0), f(0)],), {})],
    "stack": [
        (aten.stack.default, ([x, y], d), {}) for x in POOL for y in POOL for d in (0, -1, 1, 3)
    ],
    "convolution": [
        (aten.convolution.default, (x, w, c, *_CONV), {})
        for x in (
            IMAGE,
            turned(IMAGE),
            IMAGE.to(memory_format=torch.channels_last),
            IMAGE[0],
            IMAGE.bfloat16(),
            f(0, 4, 5, 6),
        )
        for w in (f(6, 4, 3, 2), f(6, 3, 3, 2), f(6, 4, 9, 9), f(6, 4, 3, 2, dtype=BF16))
        for c in (None, f(6), f(6, dtype=BF16))
    ]
    + [
        (
            aten.convolution.default,
            (IMAGE, f(6, 2, 3, 2), None, [2], [1, 0], [1], False, [0], 2),
            {},
        ),
        (
            aten.convolution.default,
            (IMAGE, f(4, 3, 3, 2), None, [2, 1], [0, 0], [1, 1], True, [0, 0], 1),
            {},
        ),
    ],
    "cumsum": _cumulative(aten.cumsum.default),
    "repeat": [
        (aten.repeat.default, (x, times), {})
        for x in POOL
        for times in ([2, 3], [1, 1], [2, 0, 1], [3], [], [2, -1], [1, 2, 1, 2])
    ],
    "cumprod": _cumulative(aten.cumprod.default),
    "embedding": [
        (aten.embedding.default, (w, i), {})
        for w in (f(5, 3), turned(f(5, 3)), f(5, 3, dtype=BF16), f(5))
        for i in (POOL[14], POOL[15], f(0, dtype=torch.int32), f(2), POOL[18])
    ],
}


def test_channels_last_is_told_as_torch_tells_it():
    shapes = itertools.product((1, 2), (1, 3), (1, 4), (1, 5))
    found = set()
    for shape, order in itertools.product(shapes, itertools.permutations(range(4))):
        x = f(*(shape[dim] for dim in order)).permute(*(order.index(dim) for dim in range(4)))
        want = torch._prims_common.suggest_memory_format(x) is torch.channels_last
        assert meta_strides.has_channels_last(x) is want, (x.shape, x.stride())
        found.add(want)
    assert found == {True, False}


def test_every_rule_has_calls():
    assert set(RULES) == set(meta_rules.RULES)


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    done = [answered(meta_rules.RULES[name], *one) for one in RULES[name]]
    assert any(done), "the rule never answers"


# -- functions lowered whole -----------------------------------------------------------------------


def _agrees(found: Any, function: Callable[[], torch.Tensor]) -> bool:
    if found is None:
        return False
    try:
        want = function()
    except RuntimeError as error:
        raise AssertionError("eager refuses it") from error
    assert described(found) == described(want)
    return True


def test_linear():
    weights = (f(5, 4), turned(f(5, 4)), f(5, 3), f(4), f(5, 4, dtype=BF16))
    done = 0
    for x, w, b in itertools.product(POOL, weights, (None, f(5), f(1), f(), f(5, dtype=BF16))):
        found = meta_rules.linear_meta(on_meta(x), on_meta(w), on_meta(b))
        done += _agrees(found, lambda x=x, w=w, b=b: F.linear(x, w, b))
    assert done > 10


def test_matmul():
    others = (f(4, 5), turned(f(4, 5)), f(2, 4, 5), f(2, 1, 4, 5), f(3, 4, 5), f(4), f(4, 0))
    done = 0
    for a, b in itertools.product(POOL, (*others, f(4, 5, dtype=BF16))):
        found = meta_rules.matmul_meta(on_meta(a), on_meta(b))
        done += _agrees(found, lambda a=a, b=b: torch.matmul(a, b))
    assert done > 10


def test_attention():
    queries = (
        f(2, 4, 4, 8),
        f(2, 3, 4, 8),
        f(3, 4, 8),
        f(4, 8),
        f(1, 3, 4, 8),
        f(2, 3, 4, 8, dtype=BF16),
    )
    keys = (f(2, 2, 5, 8), f(2, 3, 5, 8), f(3, 5, 8), f(2, 3, 5, 6), f(2, 1, 5, 8))
    masks = (None, f(4, 5, dtype=torch.bool), f(2, 3, 4, 5), f(1, 5), f(3, 3), f(4, 5, dtype=BF16))
    done = 0
    for q, k, mask, grouped in itertools.product(queries, keys, masks, (False, True)):
        v = torch.ones(*k.shape[:-1], 7, dtype=k.dtype)
        operands = map(on_meta, (q, k, v, mask))
        found = meta_rules.attention_meta(*operands, grouped)
        attend = functools.partial(F.scaled_dot_product_attention, q, k, v, mask)
        done += _agrees(found, functools.partial(attend, enable_gqa=grouped))
    assert done > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_convolution_has_the_strides_of_eager(dims, dtype):
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    seen = set()
    # On one thread PyTorch convolves volumes by kernels of one element otherwise.
    sizes = ((1, 1), (6, 1), (6, 3)) if dims == 2 else ((6, 3), (5, 2))
    for (size, kernel), channels in itertools.product(sizes, (1, 4)):
        for turned_x, turned_weight, dilation, transposed in itertools.product(
            (False, True), (False, True), (1, 2), (False, True)
        ):
            x, weight = f(2, 4, *[size] * dims), f(channels, 4, *[kernel] * dims)
            weight = weight.transpose(0, 1).contiguous() if transposed else weight
            x = x.to(dtype, memory_format=last if turned_x else torch.contiguous_format)
            weight = weight.to(
                dtype, memory_format=last if turned_weight else torch.contiguous_format
            )
            args = (x, weight, None, [1], [0], [dilation], transposed, [0], 1)
            want = aten.convolution.default(*args)
            got = meta_infer.infer(aten.convolution.default, tuple(map(on_meta, args)), {})
            assert got.shape == want.shape
            if dtype is BF16 and dims == 3 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                # A CPU without instructions for bfloat16 has another kernel, other than devices.
                last_channels = torch.channels_last_3d in map(
                    torch._prims_common.suggest_memory_format, (x, weight)
                )
                want = want.contiguous(memory_format=last) if last_channels else want
            # The stride of a dim of size 1 places no element.
            placed = [dim for dim, n in enumerate(want.shape) if n > 1]
            strides = [[t.stride(dim) for dim in placed] for t in (got, want)]
            assert strides[0] == strides[1], (args[2:], x.stride(), weight.stride())
            seen.add(want.is_contiguous())
    assert seen == {True, False} or (dtype is torch.float64 and dims == 3)
