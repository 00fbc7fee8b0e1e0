"""In-place writes reach exactly the tensors that they reach in eager PyTorch, in value and in
gradient.

Contents:
    ALIASES            writes through every view op of torch, seen by the base
    BASES              writes to the base, seen by its views; chains; overlapping views
    COPIES             results that look like views and are none: a write must not reach the base
    test_refused_*     what eager refuses is refused
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import (
    Scenario,
    against_torchax,
    by_tpuport,
    check_calls,
    check_gradients,
    check_together,
    expect_torchax_wrong,
    normal,
)

LOST = "the write does not reach the base"
Program = Callable[..., Any]


def _write(view: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    """Write through `view(base)` and give back everything that aliases."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = x * 2
        part = view(base)
        part.mul_(3)
        part += 1
        return base, part, base * part.sum()

    return program


# Name -> a view of a [4, 6] base.
ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten": lambda b: b.flatten(),
    "flatten_some": lambda b: b.view(2, 2, 6).flatten(0, 1),
    "ravel": lambda b: b.ravel(),
    "reshape": lambda b: b.reshape(-1),
    "reshape_split": lambda b: b.reshape(4, 2, 3),
    "reshape_of_slice": lambda b: b[1:3].reshape(12),
    "view": lambda b: b.view(6, 4),
    "view_as": lambda b: b.view_as(torch.empty(2, 12)),
    "unflatten": lambda b: b.unflatten(1, (2, 3)),
    "unsqueeze": lambda b: b.unsqueeze(1),
    "squeeze": lambda b: b.view(4, 1, 6).squeeze(1),
    "squeeze_all": lambda b: b.view(1, 4, 1, 6).squeeze(),
    "transpose": lambda b: b.transpose(0, 1),
    "t": lambda b: b.t(),
    "T": lambda b: b.T,
    "mT": lambda b: b.mT,
    "swapaxes": lambda b: b.swapaxes(0, 1),
    "movedim": lambda b: b.view(2, 2, 6).movedim(0, 2),
    "permute": lambda b: b.view(2, 2, 6).permute(2, 0, 1),
    "chunk": lambda b: b.chunk(3, dim=1)[1],
    "split": lambda b: b.split([1, 2, 3], dim=1)[2],
    "tensor_split": lambda b: b.tensor_split(3, dim=1)[0],
    "unbind": lambda b: b.unbind(1)[4],
    "iterate": lambda b: list(b)[2],
    "narrow": lambda b: b.narrow(1, 2, 3),
    "select": lambda b: b.select(0, -1),
    "index": lambda b: b[2],
    "index_two": lambda b: b[2, 3],
    "slice": lambda b: b[1:, ::2],
    "slice_none": lambda b: b[:, None, 1:3],
    "ellipsis": lambda b: b[..., -2:],
    "diagonal": lambda b: b.diagonal(1),
    "diagonal_low": lambda b: b.diagonal(offset=-2),
    "as_strided": lambda b: b.as_strided((3, 2), (6, 2), 1),
    "as_strided_of_slice": lambda b: b[1:].as_strided((3, 2), (6, 2)),
    "as_strided_outside_its_slice": lambda b: b[1:, 2:].as_strided((2, 2), (6, 1), 1),
    "as_strided_of_transpose": lambda b: b.t().as_strided((4, 2), (6, 1)),
    "unfold": lambda b: b.unfold(1, 2, 2),
    "hsplit": lambda b: b.hsplit(2)[1],
    "expand_of_full": lambda b: b.expand(4, 6),
    "expand_leading_one": lambda b: b.expand(1, 4, 6),
    "contiguous": lambda b: b.contiguous(),
    "to_same_dtype": lambda b: b.to(torch.float32),
    "to_same_device": lambda b: b.to(b.device),
    "float": lambda b: b.float(),
    "type_as": lambda b: b.type_as(torch.empty(1)),
    "view_dtype_back": lambda b: b.view(torch.int32).view(torch.float32),
    "transpose_view": lambda b: b.t().reshape(6, 2, 2),
    "chained": lambda b: b.view(2, 2, 6).transpose(0, 2)[1:4].squeeze(0)[..., 1].t(),
    "dropout_eval": lambda b: F.dropout(b, 0.5, training=False),
    "identity": lambda b: torch.nn.Identity()(b),
    "atleast_3d": lambda b: torch.atleast_3d(b),
    "real_of_real": lambda b: b.real,
    "broadcast_to_same": lambda b: torch.broadcast_to(b, (4, 6)),
    "expand_as": lambda b: b.expand_as(b),
    "positive": lambda b: b.positive(),
}

# torch lets a call that records gradients write to none of several views made by one operation.
NO_GRADIENT = {
    *("chunk", "split", "unbind", "iterate", "view_dtype_back", "chain_both_ways", "siblings"),
    *("value_kept_before_write",),
}
TORCHAX_IS_RIGHT = {
    *("index", "index_two", "slice", "slice_none", "ellipsis", "contiguous", "to_same_dtype"),
    *("to_same_device", "float", "dropout_eval", "identity", "real_of_real", "positive"),
    *("view_of_view_written_between", "self_overlap", "value_kept_before_write", "iterate"),
}
# Plain torchax fails in another way than by losing the write.
OTHER_REASON = {
    "type_as": "type_as of a CPU tensor fails",
    "swap_rows": "an index that is a list fails",
    "view_dtype_back": "view of another dtype fails",
    "data_attribute": "gradients do not ignore writes to .data",
    "set_data": ".data = is ignored",
    "written_after_use_in_no_grad": "gradients do not ignore writes under no_grad",
    "copy_to_copy": "to(copy=True) gives its operand",
}
MIXED = "a CPU tensor meets a traced one"
OTHER_REASON |= dict.fromkeys(["copy_mask_of_host", "copy_index_select", "copy_gather"], MIXED)


def _base_seen_by_views(x: torch.Tensor) -> Any:
    base = x * 2
    flat, column, upper = base.view(-1), base[:, 1], base.t()[1:4]
    base.mul_(2)
    base[1] = 7.0
    flat[3:9] += x.reshape(-1)[:6]
    return base, flat, column, upper, column * upper.sum()


def _chain_both_ways(x: torch.Tensor) -> Any:
    base = x.clone()
    rows = base.unbind(0)
    rows[0].copy_(rows[1] * 2)
    rows[1].add_(rows[0])
    base.t()[2].zero_()
    return base, *rows


def _siblings(x: torch.Tensor) -> Any:
    base = x * 1
    left, right = base.chunk(2, dim=1)
    left += right
    right *= left
    return base, left.sum() * right


def _view_of_view_written_between(x: torch.Tensor) -> Any:
    base = x * 1
    outer = base[1:]
    inner = outer[:, 2:]
    outer.mul_(2)
    before = inner * 1
    inner.add_(5)
    return base, outer, inner, before


def _value_kept_before_write(x: torch.Tensor) -> Any:
    base = x * 1
    squared = base * base
    base += 1
    return squared, base


def _self_overlap(x: torch.Tensor) -> Any:
    base = x * 1
    base[1:] = base[:-1].clone()
    base[:, 0] = base[:, 1]
    base[0] += base[3]
    return base


def _unsqueeze_in_place(x: torch.Tensor) -> Any:
    base = x * 1
    other = base.view(-1)
    base.unsqueeze_(0).transpose_(1, 2).mul_(3)
    base.squeeze_(0)
    return base, other


def _complex_pairs(x: torch.Tensor) -> Any:
    z = torch.view_as_complex(x.reshape(4, 3, 2) * 1)
    pairs = torch.view_as_real(z)
    pairs[..., 0] += 1
    z.mul_(2j)
    z.real.add_(3)
    return pairs, torch.view_as_real(z * 1)


def _swap_rows(x: torch.Tensor) -> Any:
    base = x * 1
    base[[0, 1]] = base[[1, 0]]
    return base


def _data_attribute(x: torch.Tensor) -> Any:
    base = x * 2
    kept = base * 1
    base.data.mul_(3)
    base.data[0] = 5
    return base * x, kept


def _written_after_use_in_no_grad(x: torch.Tensor) -> Any:
    base = x * 2
    with torch.no_grad():
        base[1:].mul_(5)
        base.clamp_(min=-1)
    return base * 3


def _detached_alias_written(x: torch.Tensor) -> Any:
    base = x * 2
    base.detach()[1:].mul_(3)
    return base * x, base.detach() * x


def _zeros_written_by_view_then_in_no_grad(x: torch.Tensor) -> Any:
    base = torch.zeros_like(x)
    base[1:] = x[1:] * 3
    with torch.no_grad():
        base.mul_(2)
    return base * 5


def _offsets(x: torch.Tensor) -> Any:
    base = x * 2
    inner = base[1:][1:, 2:]
    assert (inner.storage_offset(), inner.stride()) == (14, (6, 1))
    assert base.t()[1:].storage_offset() == 1
    assert not inner.is_contiguous()
    return inner * inner.storage_offset()


def _set_data(x: torch.Tensor) -> Any:
    base = x * 2
    base.data = torch.ones(4, 6) * 4
    return base * x


BASES: dict[str, Program] = {
    name.removeprefix("_"): program
    for name, program in list(globals().items())
    if name.startswith("_") and callable(program) and name != "_write"
}


def _leave(make: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    def program(x: torch.Tensor) -> Any:
        base = x * 2
        other = make(base)
        other.mul_(3)
        return base, other

    return program


# Name -> a new tensor that torch makes from a [4, 6] base: a write to it leaves the base alone.
COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda b: b.clone(),
    "reshape_of_transpose": lambda b: b.t().reshape(-1),
    "flatten_of_transpose": lambda b: b.t().flatten(),
    "contiguous_of_transpose": lambda b: b.t().contiguous(),
    "reshape_of_columns": lambda b: b[:, :3].reshape(-1),
    "advanced_index": lambda b: b[[0, 2]],
    "mask_of_host": lambda b: b[torch.tensor([True, False, True, True])],
    "to_copy": lambda b: b.to(torch.float32, copy=True),
    "to_double_and_back": lambda b: b.to(torch.bfloat16).to(torch.float32),
    "repeat": lambda b: b.repeat(1, 1),
    "roll": lambda b: b.roll(1, 0),
    "flip": lambda b: b.flip(0),
    "index_select": lambda b: b.index_select(0, torch.tensor([1, 3])),
    "cat": lambda b: torch.cat([b]),
    "stack": lambda b: torch.stack([b])[0],
    "tile": lambda b: b.tile(1, 1),
    "deepcopy": lambda b: b.detach().clone() + b * 0,
    "contiguous_format": lambda b: b.clone(memory_format=torch.contiguous_format),
    "tensor_constructor": lambda b: torch.empty_like(b).copy_(b),
    "gather": lambda b: b.gather(1, torch.zeros(4, 6, dtype=torch.int64)),
}


X = normal(4, 6)


def _scenarios(
    table: dict[str, Any], wrap: Any, args: tuple[Any, ...], prefix: str = ""
) -> list[Scenario]:
    made = []
    for short, program in table.items():
        name = prefix + short
        right = name in TORCHAX_IS_RIGHT or (prefix == "copy_" and name not in OTHER_REASON)
        reason = None if right else OTHER_REASON.get(name, LOST)
        made.append(
            Scenario(
                name, lambda p=program: wrap(p), (args,), reason, grads=name not in NO_GRADIENT
            )
        )
    return made


SCENARIOS = [
    *_scenarios(ALIASES, _write, (X,)),
    *_scenarios(BASES, lambda p: p, (X,)),
    *_scenarios(COPIES, _leave, (X,), "copy_"),
]


def _check(scenario: Scenario, port: Any) -> None:
    (check_gradients if scenario.grads else check_calls)(scenario, port)


# Eight in a program take half the time of a program each; more in one save nothing more.
WITH_GRADIENT = [one for one in SCENARIOS if one.grads]
WITHOUT = [one for one in SCENARIOS if not one.grads]


@pytest.mark.parametrize("start", range(0, len(WITH_GRADIENT), 8))
def test_value_and_gradient(start: int):
    check_together(WITH_GRADIENT[start : start + 8], lambda one: check_gradients(one, by_tpuport))


def test_value_without_gradient():
    check_together(WITHOUT, lambda one: check_calls(one, by_tpuport))


@pytest.mark.parametrize("scenario", against_torchax(SCENARIOS))
def test_value_and_gradient_under_plain_torchax(scenario):
    _check(scenario, PlainTorchax)


# What eager refuses.

OVERLAP = "more than one element of the written-to tensor refers to a single memory location"


def test_refused_write_to_an_expanded_tensor():
    def program(x: torch.Tensor) -> torch.Tensor:
        base = x[:1] * 2
        base.expand(4, 6).mul_(2)
        return base

    with pytest.raises(RuntimeError, match=OVERLAP):
        program(X.clone())
    with pytest.raises(RuntimeError, match=OVERLAP):
        by_tpuport(program)(X)


@expect_torchax_wrong("writes to an expanded tensor are accepted")
def test_refused_write_to_an_expanded_tensor_under_plain_torchax():
    with pytest.raises(RuntimeError, match=OVERLAP):
        PlainTorchax(lambda x: (x[:1] * 2).expand(4, 6).mul_(2))(X)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda x: x.clone().t().view(-1), "view size is not compatible"),
        (lambda x: x.argmax(0).add_(0.5), "result type Float can't be cast to|Promotion of int"),
        (lambda x: x.clone().add_(torch.ones(2, 4, 6)), "doesn't match the broadcast shape"),
        (
            lambda x: x.clone().copy_(torch.ones(5)),
            "must match the size|must match the existing size",
        ),
        (lambda x: x.clone()[9].zero_(), "out of bounds"),
    ],
    ids=["view_of_transpose", "int_plus_float", "broadcast_target", "copy_shape", "select_range"],
)
def test_refused_as_in_eager(program, message):
    with pytest.raises((RuntimeError, IndexError), match=message):
        program(X.clone())
    with pytest.raises((RuntimeError, IndexError), match=message):
        by_tpuport(program)(X)
