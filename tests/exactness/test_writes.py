"""Every sort of in-place write, and who sees it.

The caller's tensors, host tensors, and all their aliases.

Contents:
    KINDS              masked_fill_, index_put_, scatter_, copy_, slices, out=, activations
    test_caller_*      writes to arguments are seen by the caller
    test_host_*        host tensors written with traced values, through any alias
"""

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import (
    Scenario,
    against_torchax,
    assert_same,
    by_tpuport,
    check_calls,
    check_gradients,
    expect_torchax_wrong,
    normal,
)
from tpuport.foundation.errors import PortError, UsageError

Program = Callable[..., Any]
X, Y = normal(4, 6), normal(4, 6, seed=2)
LOST = "the write does not reach the base"
MIXED = "a CPU tensor meets a traced one"


def _masked_fill(b: torch.Tensor, y: torch.Tensor) -> None:
    b.masked_fill_(y > 0, -1.5)
    b.view(-1).masked_fill_(y.view(-1) < -1, 2.0)


def _masked_assign(b: torch.Tensor, y: torch.Tensor) -> None:
    b[y > 0] = 0.5
    b[1:][y[1:] < 0] = y.sum()


def _masked_update(b: torch.Tensor, y: torch.Tensor) -> None:
    b[y > 0] *= 3
    b[y < 0] += 1


def _masked_scatter(b: torch.Tensor, y: torch.Tensor) -> None:
    b.masked_scatter_(y > 0, y * 2)


def _index_put(b: torch.Tensor, y: torch.Tensor) -> None:
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([2, 3, 3])
    b.index_put_((rows, columns), y[0, :3], accumulate=True)
    b.t()[[5, 0]] = y[:2, :4] * 2


def _scatter(b: torch.Tensor, y: torch.Tensor) -> None:
    index = torch.tensor([[0, 1, 2, 0, 1, 2]])
    b.scatter_(0, index, y[:1])
    b[:, 1:].scatter_add_(1, torch.tensor([[0, 0], [4, 4], [1, 2], [3, 3]]), y[:, :2])
    b.scatter_reduce_(0, torch.zeros(1, 6, dtype=torch.int64), y[:1], reduce="amax")


def _scatter_value(b: torch.Tensor, y: torch.Tensor) -> None:
    b.t().scatter_(0, torch.tensor([[1, 0, 3, 2]]), 9.0)


def _index_ops(b: torch.Tensor, y: torch.Tensor) -> None:
    index = torch.tensor([0, 2])
    b.index_add_(0, index, y[:2], alpha=2)
    b.index_copy_(1, torch.tensor([5]), y[:, :1])
    b.index_fill_(0, torch.tensor([3]), 1.25)


def _copy(b: torch.Tensor, y: torch.Tensor) -> None:
    b.t().copy_(y[0].unsqueeze(1) * torch.ones(4))
    b[2].copy_(y[1, 0])
    b[3].copy_(torch.arange(6))


def _slices(b: torch.Tensor, y: torch.Tensor) -> None:
    b[:, 1::2] += y[:, ::2]
    b[0, ...] -= 1
    b[-1] /= 2
    b[1:3, 2:4] = y[:2, :2] @ y[:2, :2]
    b[..., 0] = 3


def _out(b: torch.Tensor, y: torch.Tensor) -> None:
    # torch refuses out= on tensors that need gradients, so this runs without.
    with torch.no_grad():
        torch.mul(y, 2, out=b)
        torch.add(y[0], 1, out=b[2])


def _arithmetic(b: torch.Tensor, y: torch.Tensor) -> None:
    b.addcmul_(y, y, value=0.5).addcdiv_(y, y * y + 1).lerp_(y, 0.25)
    b.mul_(0.5).clamp_(0.1, 4).sub_(y, alpha=2).neg_().relu_()
    b[1:].view(-1).div_(3).add_(1)


def _activations(b: torch.Tensor, y: torch.Tensor) -> None:
    F.leaky_relu_(b[0], 0.1)
    F.relu(b[1], inplace=True)
    torch.nn.SiLU(inplace=True)(b[2, 2:])
    F.hardtanh(b.t()[:, 3], -0.5, 0.5, inplace=True)
    torch.sigmoid_(b[2, :2])


def _zero_fill(b: torch.Tensor, y: torch.Tensor) -> None:
    b[0].zero_()
    b.t()[1].fill_(2.5)
    b[2].fill_(y[0, 0])
    b[3, :2] = torch.tensor(4)


def _triangles(b: torch.Tensor, y: torch.Tensor) -> None:
    b.tril_().t()[:4].triu_()
    b.fill_diagonal_(3.0)
    b[:4, :4].diagonal().add_(y[0, :4])


def _traced_position(b: torch.Tensor, y: torch.Tensor) -> None:
    where = y[0].argmax()
    b[1, where] = 9.0
    b[:, where] += 1
    b[torch.arange(4), y[:, :6].argmax(1)] = 4.0


def _baddbmm(b: torch.Tensor, y: torch.Tensor) -> None:
    b.addmm_(y[:, :4], y, beta=0.5)
    b.view(1, 4, 6).baddbmm_(y[None, :, :4], y[None])


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "masked_fill": _masked_fill, "masked_assign": _masked_assign, "masked_update": _masked_update,
    "masked_scatter": _masked_scatter, "index_put": _index_put, "scatter": _scatter,
    "scatter_value": _scatter_value, "index_ops": _index_ops, "copy": _copy, "slices": _slices,
    "out": _out, "arithmetic": _arithmetic, "activations": _activations, "zero_fill": _zero_fill,
    "triangles": _triangles, "traced_position": _traced_position, "baddbmm": _baddbmm,
}  # fmt: skip


def _kind(write: Callable[[torch.Tensor, torch.Tensor], None]) -> Program:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        base = x * 2 if write is not _out else x.detach() * 2
        flat = base.view(-1)
        write(base, y)
        return base, flat * 2

    return program


# Plain torchax fails in another way than by losing the write.
OTHER_REASON = {
    "masked_assign": "boolean mask of a traced tensor",
    "masked_update": "boolean mask of a traced tensor",
    "baddbmm": "addmm_ has no lowering",
    **dict.fromkeys(
        ("index_put", "scatter", "scatter_value", "index_ops", "copy", "traced_position"), MIXED
    ),
}
# torch records no gradient through these: they overwrite a result that it keeps.
NO_GRADIENT = {"arithmetic", "activations"}
SCENARIOS = [
    Scenario(
        name,
        lambda w=write: _kind(w),
        ((X, Y),),
        OTHER_REASON.get(name, LOST),
        grads=name not in NO_GRADIENT,
    )
    for name, write in KINDS.items()
]


def _check(scenario: Scenario, port: Any) -> None:
    (check_gradients if scenario.grads else check_calls)(scenario, port)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_kind_of_write(scenario):
    _check(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", against_torchax(SCENARIOS))
def test_kind_of_write_under_plain_torchax(scenario):
    _check(scenario, PlainTorchax)


# What the caller sees.


def _write_arguments(x: torch.Tensor, state: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    x[1:].view(-1)[:3] += 5
    state["cache"][0].t()[0] = x[0, 0]
    return x.sum()


def test_caller_sees_writes_to_its_arguments():
    want_x, want_cache = X.clone(), Y.clone()
    _write_arguments(want_x, {"cache": [want_cache]})
    x, cache = X.clone(), Y.clone()
    storage = x.data_ptr()
    by_tpuport(_write_arguments)(x, {"cache": [cache]})
    assert_same(x, want_x, "argument")
    assert_same(cache, want_cache, "tensor inside an argument")
    assert x.data_ptr() == storage


def test_caller_sees_writes_through_its_own_views():
    x = X.clone()
    row = x[2]
    by_tpuport(lambda t: t.mul_(2).sum())(x)
    assert_same(row, X[2] * 2, "the caller's view")


def test_caller_passes_overlapping_tensors():
    def program(upper: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        upper.add_(10)
        return other * 2

    x = X.clone()
    with pytest.raises(UsageError, match=r"shares memory .* pass .* as a \.clone\(\)"):
        by_tpuport(program)(x[:2], x)
    assert torch.equal(x, X)
    assert_same(by_tpuport(program)(x[:2], x[2:]), X[2:] * 2, "halves of one tensor")
    assert_same(x[:2], X[:2] + 10, "argument")


def test_caller_passes_columns_that_lie_between_each_other():
    def program(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left.mul_(10)
        return right * 2

    x = X.clone()
    assert_same(by_tpuport(program)(x[:, :1], x[:, 1:]), X[:, 1:] * 2, "the other columns")
    assert_same(x[:, :1], X[:, :1] * 10, "argument")
    with pytest.raises(UsageError, match="shares memory"):
        by_tpuport(program)(x[:, :2], x[:, 1:])
    with pytest.raises(UsageError, match="shares memory"):
        by_tpuport(program)(x[::2], x[2:])


def test_caller_keeps_arguments_that_are_only_read():
    x = X.clone()
    version = x._version
    by_tpuport(lambda t: (t * 1).mul_(2))(x)
    assert x._version == version


def test_caller_feeds_an_output_back_and_writes_to_it():
    port = by_tpuport(lambda t: t.mul_(2)[1:])
    first = port(X.clone())
    kept = tpuport.to_torch(first).clone()
    second = port(first)
    assert_same(second, kept[1:] * 2, "output")
    assert_same(first, kept * 2, "the tensor that was passed")


@expect_torchax_wrong("writes to arguments stay inside the jit")
def test_caller_sees_writes_to_its_arguments_under_plain_torchax():
    x = X.clone()
    PlainTorchax(lambda t: t.mul_(2).sum())(x)
    assert_same(x, X * 2, "argument")


# Host tensors.


def _host_scenario(name: str, program: Program, torchax: str | None = MIXED) -> Scenario:
    return Scenario(name, lambda: program, ((X,),), torchax)


def _host_zeros(x: torch.Tensor) -> Any:
    made = torch.zeros(3, 6)
    made[0] = x[0]
    made.view(-1)[6:12].copy_(x[1] * 2)
    return made, made.sum() * x


def _host_alias_made_before(x: torch.Tensor) -> Any:
    made = torch.ones(4, 6)
    flat, rows, columns = made.view(-1), made[1:3], made.t()
    made.mul_(x)
    flat[0] += 1
    return made, flat, rows, columns.sum(1)


def _host_alias_written(x: torch.Tensor) -> Any:
    made = torch.zeros(4, 6)
    made.t()[2].add_(x[:, 2])
    other = made[:, 2]
    made[0] = 1
    return made, other * x[:, 0]


def _host_from_python(x: torch.Tensor) -> Any:
    made = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    made[:, 0] = x[0, :2]
    return made @ made


def _host_fills(x: torch.Tensor) -> Any:
    made = torch.full((4, 6), float("-inf"))
    made[x > 0] = 0.0
    made.fill_diagonal_(1.0)
    return made


def _host_rows_in_a_loop(x: torch.Tensor) -> Any:
    made = torch.empty(4, 6)
    for index, row in enumerate(x):
        made[index] = row * index
    return made


def _host_linspace(x: torch.Tensor) -> Any:
    steps = torch.linspace(0, 1, 6)
    half = steps[:3]
    steps.mul_(2)
    half += x[0, :3]
    return steps, half


def _host_dtype_kept(x: torch.Tensor) -> Any:
    count = torch.zeros(4, dtype=torch.int64)
    count += (x > 0).sum(1)
    flags = torch.zeros(4, 6, dtype=torch.bool)
    flags |= x > 0
    return count, flags, x * flags


def _host_scalars(x: torch.Tensor) -> Any:
    """A host tensor without dims is written to by a program, not while it is traced."""
    made, scalar = torch.zeros(2, 2), torch.tensor(3.0)
    number = x.sum().item()
    made[0, 0] = x[0, 0]
    made[0, 1].add_(number)
    made[1, 0].fill_(number)
    scalar.sub_(x[0, 1])
    scalar.mul_(number)
    return made, scalar, made.sum() * x


HOST = [
    _host_scenario(name.removeprefix("_"), program)
    for name, program in list(globals().items())
    if name.startswith("_host_") and program is not _host_scenario
]


@pytest.mark.parametrize("scenario", HOST, ids=str)
def test_host_tensor_written_with_traced_values(scenario):
    check_gradients(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", against_torchax(HOST))
def test_host_tensor_written_with_traced_values_under_plain_torchax(scenario):
    check_gradients(scenario, PlainTorchax)


def test_host_tensor_outside_the_function_is_left_alone():
    outside = torch.zeros(4, 6)

    def program(x: torch.Tensor) -> torch.Tensor:
        made = outside + 0
        made += x
        return made

    port = by_tpuport(program)
    assert_same(port(X), X, "first call")
    assert_same(port(X), X, "second call")
    assert torch.equal(outside, torch.zeros(4, 6))


def _copies(seed: int) -> list[tuple[int, int, int, int, int, float]]:
    """Draw copies between rows: target row, start, source row, start, length, factor."""
    draw = random.Random(seed)
    made = []
    for _ in range(draw.randint(2, 4)):
        length = draw.choice([4, 3, 2])
        made.append(
            (
                *(draw.randint(0, 1), draw.randint(0, 4 - length)),
                *(draw.randint(0, 1), draw.randint(0, 4 - length)),
                *(length, draw.choice([1.0, 1.0, 2.0])),
            )
        )
    return made


ROWS = torch.tensor([1.0, -2.0, 3.0, 0.5])
PROGRAMS = [_copies(seed) for seed in range(60)]


def test_parts_of_rows_are_copied_one_after_the_other():
    """XLA for the CPU gives 3 of 100 such programs another row if an update is inside an update."""

    def copied(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for program in PROGRAMS:
            rows = torch.stack([x, x * 2])
            for target, at, source, start, length, factor in program:
                row = rows[target]
                row[at : at + length] = rows[source][start : start + length] * factor
            found.append(rows)
        return found

    ported = tpuport.convert(copied, verify=False)
    for given in (ROWS, ROWS * 3 - 1):
        for number, (ours, theirs) in enumerate(zip(ported(given), copied(given), strict=True)):
            assert torch.equal(ours.torch(), theirs), PROGRAMS[number]


@pytest.mark.xfail(strict=True, reason="jax 0.10.2: then `apart` in core/view_steps.py can go")
def test_xla_for_the_cpu_computes_an_update_inside_an_update():
    def shifted(x: jax.Array) -> jax.Array:
        rows = jnp.stack([x, x * 2])
        row = jax.lax.dynamic_update_slice(rows[0], rows[1, :-1], (1,))
        rows = jax.lax.dynamic_update_slice(rows, row[None], (0, 0))
        return jax.lax.dynamic_update_slice(rows, rows[0][None], (1, 0))

    rows = jax.jit(shifted)(jnp.asarray(ROWS.numpy()))
    assert rows.tolist() == [[1, 2, -4, 6]] * 2


@pytest.mark.xfail(strict=True, reason="jax 0.10.2: then `was_read` in core/view_steps.py can go")
def test_xla_for_the_cpu_updates_a_reshaped_array_in_place():
    def shifted(x: jax.Array) -> jax.Array:
        rows = (x @ jnp.eye(12)).reshape(3, 4)
        return jax.lax.dynamic_update_slice(rows, rows[:2], (1, 0))

    found = jax.jit(shifted)(jnp.arange(12.0))
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]


# What gives a vector, its shape afterwards, and how its rows are shifted.
FIRST: dict[str, Any] = {
    "written": lambda x: x.clone().index_put_((torch.tensor([1]),), torch.tensor([7.0])),
    "computed": lambda x: torch.where(x == 2, 7.0, x),
    "joined": lambda x: torch.cat([x[:1], x[1:2] * 2, x[2:]]),
    "multiplied": lambda x: x @ torch.eye(12),
    "set": lambda x: torch.select_scatter(x, torch.tensor(7.0), 0, 1),
}
SHAPES: dict[str, Any] = {
    "rows": lambda x: x.view(3, 4),
    "parts": lambda x: x.view(3, 2, 2).flatten(1),
    "turned": lambda x: x.view(4, 3).t(),
}


def _by_copy(rows: torch.Tensor) -> torch.Tensor:
    rows[1:] = rows[:-1].clone()
    return rows


def _of_a_copy(rows: torch.Tensor) -> torch.Tensor:
    copied = rows.clone()
    copied[1:] = rows[:-1]
    copied[0] = rows[1] * 2
    return copied


def _rolled(rows: torch.Tensor) -> torch.Tensor:
    rows[1:] = rows.roll(1, 0)[1:]
    return rows


SHIFTS: dict[str, Any] = {
    "by copy": _by_copy,
    "of a copy": _of_a_copy,
    "rolled": _rolled,
    "by slice_scatter": lambda rows: torch.slice_scatter(rows, rows[:-1] * 2, 0, 1),
    "by select_scatter": lambda rows: torch.select_scatter(rows, rows[0], 0, -1),
    "spread": lambda rows: torch.slice_scatter(rows, rows[:2], 0, 0, None, 2),
}


@pytest.mark.parametrize("first", FIRST)
def test_rows_of_a_reshaped_result_are_shifted(first: str):
    def shifted(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            shift(shape(FIRST[first](x * 1)))
            for shape in SHAPES.values()
            for shift in SHIFTS.values()
        ]

    x = torch.arange(12.0)
    ported = tpuport.convert(shifted, verify=False)
    for ours, theirs in zip(tpuport.to_torch(ported(x)), shifted(x), strict=True):
        assert torch.equal(ours, theirs)


def _written_flat(x: torch.Tensor) -> torch.Tensor:
    rows = x.clone()
    rows.reshape(-1)[1] = 1
    rows[1:] = rows[:-1].clone()
    return rows


def test_rows_are_shifted_after_a_write_in_another_shape():
    x = torch.arange(12.0).view(3, 4)
    ported = tpuport.convert(_written_flat, verify=False)
    assert torch.equal(tpuport.to_torch(ported(x)), _written_flat(x))


TURN = torch.tensor([2, 0, 1, 3])
# Eager refuses the first ones: they read what they write, in another order.
SHARED_MEMORY = {
    "index_put": lambda v: v.__setitem__(TURN, v),
    "index_copy": lambda v: v.index_copy_(0, TURN, v),
    "scatter_add": lambda v: v.scatter_add_(0, TURN, v),
    "gather": lambda v: torch.gather(v, 0, TURN, out=v),
    "shift": lambda v: v.__setitem__(slice(1, None), v[:-1]),
    "add": lambda v: v[1:].add_(v[:-1]),
    "transposed": lambda v: v.view(2, 2).add_(v.view(2, 2).t()),
    "one for all": lambda v: v.add_(v[0]),
    "chosen": lambda v: torch.where(v[:-1] > 0, v[:-1], v[1:], out=v[1:]),
    "itself": lambda v: v.__setitem__(slice(None), v),
    "twice": lambda v: v.add_(v),
    "apart": lambda v: v[1:].add_(v[0]),
    "filled": lambda v: v.masked_fill_(v > 0, v[0]),
}


@pytest.mark.parametrize("name", SHARED_MEMORY)
def test_memory_that_is_read_and_written(name: str):
    def run(x: torch.Tensor) -> torch.Tensor:
        v = x * 1
        SHARED_MEMORY[name](v)
        return v

    x = torch.tensor([3.0, 1.0, 2.0, -1.0])
    expected = None
    with contextlib.suppress(RuntimeError):
        expected = run(x)
    ported = tpuport.convert(run, verify=False)
    if expected is None:
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            ported(x)
    else:
        assert torch.equal(tpuport.to_torch(ported(x)), expected)


# Eager goes through views with gaps in the order of memory: what it reads behind is overwritten.
GAPPED = {
    "right": lambda v: v[:, 1:].copy_(v[:, :-1]),
    "down": lambda v: v[1:, :2].copy_(v[:-1, :2]),
    "added": lambda v: v[:, 1:].add_(v[:, :-1]),
    "of channels": lambda v: v.t()[1:, :2].copy_(v.t()[:-1, :2]),
    "by more than it is long": lambda v: v[:, 2:].copy_(v[:, :2]),
    "left": lambda v: v[:, :-1].copy_(v[:, 1:]),
    "up": lambda v: v[:-1, :2].mul_(v[1:, :2]),
    "odd from even": lambda v: v[:, 1::2].copy_(v[:, ::2]),
    "from a copy": lambda v: v[:, 1:].copy_(v[:, :-1].clone()),
    "in place": lambda v: v[:, 1:].mul_(v[:, 1:]),
}


@pytest.mark.parametrize("name", GAPPED)
def test_a_shift_that_reads_what_it_overwrites_is_refused(name: str):
    def run(x: torch.Tensor) -> torch.Tensor:
        v = x * 1
        GAPPED[name](v)
        return v

    x = torch.arange(16.0).view(4, 4) + 1
    ported = tpuport.convert(run, verify=False)
    if name in ("right", "down", "added", "of channels"):
        with pytest.raises(PortError, match=r"TPU202(.|\n)*read from a copy"):
            ported(x)
    else:
        assert torch.equal(tpuport.to_torch(ported(x)), run(x))


@pytest.mark.parametrize("shape", [(5, 3), (0,)])
def test_an_out_tensor_that_eager_would_resize_is_refused(shape: tuple[int, ...]):
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(shape)
        torch.sum(x, 0, out=out)
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager deprecates it
        with pytest.raises(PortError, match="would be resized"):
            tpuport.convert(model)(torch.ones(2, 3))
