"""Reading and writing by indices, scatters and their reductions."""

from typing import Any

import torch

from tests.model.lowering_cases.case import b, call, case, f, i, mask, t, turned

aten = torch.ops.aten
NAN = float("nan")
TABLE = f(5, 3)
ROWS = t(0, 3, 3, 1)
NONE = torch.zeros(0, dtype=torch.int64)


def at(*shape: int, size: int, seed: int = 1) -> torch.Tensor:
    """Indices below `size`, some of them equal."""
    return i(*shape, low=0, high=size, seed=seed)


READING = [
    case(aten.unsafe_split.Tensor, call(f(5, 3), 2), call(turned(TABLE), 2, 1), call(i(4), 4)),
    case(aten.unsafe_split_with_sizes.default, call(f(5, 3), [2, 0, 3]), call(b(2, 4), [1, 3], 1)),
    case(
        aten.index_select.default, call(f(), 0, t(0)), call(turned(TABLE), 1, t(2, 0, 2)),
        call(TABLE, -2, ROWS), call(TABLE, 0, torch.tensor(2)), call(TABLE, 0, NONE),
        call(b(5, 3), 0, ROWS), call(mask(5), 0, ROWS), call(i(5), 0, ROWS.int()),
    ),
    case(
        aten.gather.default, call(f(3), 0, torch.tensor(2)),
        call(turned(f(3, 4)), 1, at(2, 6, size=4)), call(f(2, 3, 4), -2, at(2, 5, 3, size=3)),
        call(f(), 0, torch.tensor(0)), call(f(3, 4), 0, at(0, 4, size=3)),
        call(b(3, 4), 0, at(2, 2, size=3)), call(i(4), 0, at(6, size=4)),
    ),
    case(
        aten.take.default, call(turned(f(3, 4)), t(0, -1, 5, 5)), call(f(3, 4), at(2, 3, size=12)),
        call(f(), t(0, 0)), call(i(4), NONE), call(b(6), t(-6, 5)),
    ),
    case(
        aten.embedding.default, call(TABLE, ROWS, 3), call(TABLE, ROWS, -1, True),
        call(TABLE, at(2, 2, size=5)), call(TABLE, torch.tensor(1)), call(TABLE, NONE),
        call(b(5, 3), ROWS, 0), call(turned(TABLE), ROWS.int()),
    ),
    case(aten.embedding.default, call(TABLE, t(4, 1), -1)),
    case(
        aten.slice_scatter.default, call(f(5, 3), f(2, 3), 0, 1, 3), call(f(5, 3), f(5, 2), -1, 1),
        call(turned(TABLE), f(2, 3), 0, -4, None, 2), call(f(5, 3), f(0, 3), 0, 4, 2),
        call(b(5, 3), b(5, 1), 1, 0, 9, 3), call(i(5), i(2), 0, 3), call(f(4), f(4)),
    ),
    case(
        aten.select_scatter.default, call(f(5, 3), f(3), 0, -1), call(turned(TABLE), f(5), 1, 2),
        call(b(5, 3), b(3), -2, 0), call(i(5), torch.tensor(7), 0, 4),
    ),
]  # fmt: skip


def _renormed(weight: torch.Tensor, index: torch.Tensor, *limits: float) -> Any:
    table = weight.clone()
    return table, aten.embedding_renorm_.default(table, index, *limits)


_BAGS = (at(7, size=5), t(0, 2, 2, 5))
_ENDED = (at(7, size=5), t(0, 2, 2, 7))

BAGS = [
    case(
        aten.embedding_renorm_.default, call(TABLE * 2, ROWS, 1.0, 2.0),
        call(TABLE, at(2, 2, size=5), 0.5, 1.0), call(b(5, 3), ROWS, 1.0, 2.0), run=_renormed,
        grad=False, bf16=8e-3,
    ),
    case(
        aten._embedding_bag.default, call(TABLE, *_BAGS, False, 0, False, f(7)),
        call(TABLE, *_BAGS, False, 1), call(TABLE, *_BAGS, False, 2),
        call(TABLE, *_ENDED, False, 0, False, None, True),
        call(TABLE, *_BAGS, False, 1, False, None, False, 3), call(b(5, 3), *_BAGS),
        run=lambda *a: aten._embedding_bag.default(*a)[0], bf16=2e-2,
    ),
    case(
        aten._embedding_bag.default, call(TABLE, *_BAGS, True, 0),
        run=lambda *a: aten._embedding_bag.default(*a)[0], grad=False,
    ),
    case(
        aten._embedding_bag_forward_only.default, call(TABLE, *_BAGS, False, 0, False, f(7)),
        call(TABLE, *_BAGS, False, 2, False, None, False, 3),
        call(TABLE, *_ENDED, False, 1, False, None, True),
        run=lambda *a: aten._embedding_bag_forward_only.default(*a)[0], grad=False,
    ),
]  # fmt: skip

WRITING = [
    case(
        aten.index_add.default, call(TABLE, 0, ROWS, f(4, 3, seed=2), alpha=0.5),
        call(f(), 0, t(0), f()), call(turned(TABLE), -1, t(2, 0), f(5, 2)),
        call(i(5), 0, ROWS, i(4), alpha=2), call(mask(5), 0, ROWS, mask(4, seed=2)),
        call(TABLE, 0, NONE, f(0, 3)), call(b(5, 3), 0, t(4, 0), b(2, 3)),
    ),
    case(
        aten.index_copy.default, call(TABLE, 0, t(3, 0), f(2, 3)),
        call(turned(TABLE), -1, t(2, 0), f(5, 2)), call(f(3), 0, t(1), f(1)),
        call(f(), 0, t(0), f()), call(i(5), 0, t(2), i(1)), call(TABLE, 0, NONE, f(0, 3)),
        call(TABLE, 0, t(1), f(1, 3)),
    ),
    case(
        aten.index_fill.int_Scalar, call(TABLE, 0, ROWS, 0.5), call(turned(TABLE), -1, t(2), 7),
        call(f(), 0, t(0), 1.0), call(i(5), 0, ROWS, 2), call(TABLE, 0, NONE, 1.0),
        call(b(5), 0, t(1), 0.3), call(mask(5), 0, t(1), True),
    ),
    case(
        aten.index_fill.int_Tensor, call(TABLE, 0, ROWS, torch.tensor(0.5)),
        call(turned(TABLE), -1, t(2), f()), call(i(5), 0, ROWS, torch.tensor(2)),
    ),
    case(
        aten.as_strided_scatter.default, call(f(3, 3), f(2, 2), [2, 2], [3, 1], 1),
        call(f(3, 3), f(2, 2), [2, 2], [1, 1], 0), call(f(1), f(), [], [], 0),
        call(i(4), i(2), [2], [2]),
    ),
    case(
        aten.put.default, call(f(3, 4), t(0, 5, 5), f(3), True),
        call(turned(f(3, 4)), t(1, -1), f(2)), call(mask(6), t(1, 1), mask(2), True),
        call(i(6), t(1, 1, 2), i(3), True), call(f(3), NONE, f(0)), call(b(6), t(5), b(1)),
    ),
    *(
        case(
            op, call(f(3, 4), [t(1, 1), None], f(2, 4)), call(f(3, 4), [t(1, 1), t(2, 2)], f(2)),
            call(f(2, 3, 4), [t(1, 1), None, t(2, 2)], f(2, 3)), call(f(3), [t(1, 1)], f(2), True),
            call(b(6), [t(5)], b(1)), call(i(5), [t(1, 2)], i(2)), call(f(3), [NONE], f(0)),
        )
        for op in (aten.index_put.default, aten._unsafe_index_put.default)
    ),
]  # fmt: skip

_INDEX = at(2, 3, size=4)
_REPEATED = t(0, 0, 2, 0)
_X, _SRC = f(4, 3), f(2, 3, seed=2)
_WITH_ZERO = t(2.0, 0.0, 3.0, 0.5)

SCATTERING = [
    case(
        aten.scatter.src, call(_X, 0, t(1, 0).reshape(1, 2), f(1, 2)),
        call(turned(_X), -1, t(2, 0, 1, 0).reshape(4, 1), f(4, 1)),
        call(f(), 0, torch.tensor(0), f()), call(_X, 0, NONE.reshape(0, 3), f(0, 3)),
        call(b(4), 0, t(1, 2), b(2)), call(i(4), 0, t(3), i(1)),
    ),
    case(aten.scatter.src, call(_X, 0, t(1, 0).reshape(1, 2), f(2, 3)), grad=False),
    case(
        aten.scatter.value, call(_X, 0, _INDEX, 0.5),
        call(turned(_X), -1, t(2, 0, 1, 0).reshape(4, 1), 2), call(f(), 0, torch.tensor(0), 1.5),
        call(i(4), 0, t(3), 7), call(b(4), 0, t(1, 2), 0.3), call(mask(4), 0, t(1), True),
    ),
    case(
        aten.scatter.reduce, call(i(4), 0, _REPEATED, i(4, seed=2), reduce="multiply"),
        call(_X, 0, _INDEX, _SRC, reduce="add"), call(_X, 0, _INDEX, _SRC, reduce="multiply"),
        call(b(4), 0, t(1, 2), b(2), reduce="multiply"), grad=False,
    ),
    case(
        aten.scatter.value_reduce, call(i(4), 0, _REPEATED, 2, reduce="multiply"),
        call(_X, 0, _INDEX, 0.5, reduce="add"),
        call(_X, 1, t(0, 2).reshape(2, 1), 0.5, reduce="multiply"), grad=False,
    ),
    case(
        aten.scatter_add.default, call(f(), 0, torch.tensor(0), f()), call(_X, 0, _INDEX, _SRC),
        call(turned(_X), -1, t(2, 0, 1, 0).reshape(4, 1), f(4, 1)), call(i(4), 0, _REPEATED, i(4)),
        call(_X, 0, NONE.reshape(0, 3), f(0, 3)), call(b(4), 0, t(1, 2), b(2)),
    ),
    case(
        aten.scatter_reduce.two,
        *(
            call(f(4), 0, _REPEATED, f(4, seed=2), how, include_self=own)
            for how in ("sum", "mean", "amax", "amin") for own in (True, False)
        ),
        call(_WITH_ZERO, 0, _REPEATED, _WITH_ZERO.flip(0), "prod"),
        call(f(4), 0, _REPEATED, _WITH_ZERO, "prod", include_self=False),
        call(t(1.0, 2.0, 0.0, 0.0), 0, _REPEATED, t(1.0, 1.0, 0.0, 0.5), "amax"),
        call(i(4), 0, _REPEATED, i(4, seed=2), "amax", include_self=False),
        call(i(4), 0, _REPEATED, i(4, seed=2), "mean"),
        call(turned(_X), -1, t(2, 0, 2, 0).reshape(4, 1), f(4, 1), "amin"),
    ),
    case(
        aten.index_reduce.default,
        *(
            call(TABLE, 0, ROWS, f(4, 3, seed=2), how, include_self=own)
            for how in ("mean", "amax", "amin", "prod") for own in (True, False)
        ),
        call(turned(TABLE), -1, t(2, 0, 2), f(5, 3), "amax"),
        call(i(5), 0, ROWS, i(4), "amin"),
    ),
]  # fmt: skip

CASES = [*READING, *BAGS, *WRITING, *SCATTERING]
