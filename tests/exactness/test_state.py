"""State that `forward` writes comes back as eager leaves it, call after call.

Contents:
    NORMS              BatchNorm1d/2d/3d/Sync, LazyBatchNorm, InstanceNorm with running statistics,
                       momentum=None, bf16
    REWEIGHTED         spectral_norm and weight_norm, the old form and the parametrization
    COUNTERS           counters, moving averages, caches and queues held in buffers
    LAZY               state made by the first call (`if self.scale is None`), then frozen
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

import tpuport
from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import (
    Scenario,
    against_torchax,
    by_tpuport,
    check_calls,
    check_gradients,
    normal,
)
from tpuport.foundation.errors import PortError, UsageError
from tpuport.training import make_train_step

FROZEN_STATISTICS = "running statistics are computed and dropped"


def _batches(*shape: int, count: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return tuple((normal(*shape, seed=i, dtype=dtype) * (i + 1) + i,) for i in range(count))


def _norm(name: str, build: Any, *shape: int, **options: Any) -> Scenario:
    options.setdefault("torchax", FROZEN_STATISTICS)
    return Scenario(name, build, _batches(*shape), eval_last=True, **options)


class Twice(nn.Module):
    """The same norm applied twice in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.norm(x)))


class HalfFrozen(nn.Module):
    """A backbone kept in evaluation mode inside a training model."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> "HalfFrozen":
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


NORMS = [
    _norm("batch_norm_1d", lambda: nn.BatchNorm1d(3), 5, 3),
    _norm("batch_norm_1d_sequence", lambda: nn.BatchNorm1d(3), 5, 3, 4),
    _norm(
        "batch_norm_2d",
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)),
        2,
        2,
        5,
        5,
        rtol=1e-4,
    ),
    _norm("batch_norm_3d", lambda: nn.BatchNorm3d(2), 2, 2, 3, 2, 2),
    _norm("momentum_none", lambda: nn.BatchNorm1d(3, momentum=None), 5, 3),
    _norm("momentum_one", lambda: nn.BatchNorm1d(3, momentum=1.0), 5, 3),
    _norm("sync_batch_norm", lambda: nn.SyncBatchNorm(3), 5, 3),
    _norm("no_affine", lambda: nn.BatchNorm1d(3, affine=False), 5, 3),
    _norm("twice", Twice, 5, 3, rtol=1e-4),
    _norm("half_frozen", HalfFrozen, 5, 3, rtol=1e-4),
    _norm(
        "instance_norm",
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        2,
        3,
        6,
    ),
    _norm("instance_norm_2d", lambda: nn.InstanceNorm2d(3, track_running_stats=True), 2, 3, 4, 4),
    _norm("bfloat16", lambda: nn.BatchNorm1d(3).bfloat16(), 8, 3),
    _norm("float32_norm_in_bfloat16", lambda: nn.BatchNorm1d(3), 8, 3),
    _norm(
        "no_running_statistics",
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        5,
        3,
        torchax=None,
    ),
]
for _index, _scenario in enumerate(NORMS):
    if "bfloat16" in _scenario.name:
        NORMS[_index] = Scenario(
            _scenario.name,
            _scenario.build,
            _batches(8, 3, dtype=torch.bfloat16),
            FROZEN_STATISTICS,
            eval_last=True,
            rtol=2e-2,
        )


class Averaged(nn.Module):
    """A moving average kept four ways."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.assigned = 0.9 * self.assigned + 0.1 * x.mean(0).detach()
        with torch.no_grad():
            self.in_place.lerp_(x.mean(0), 0.1)
        self.hidden.data.copy_(x[0])
        return (x - self.assigned + self.in_place) * self.weight / self.count


class Queue(nn.Module):
    """A ring buffer with a pointer, as in momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.queue.clone().detach().T
        where = (self.pointer + torch.arange(x.shape[0])) % 6
        self.queue[where] = x.detach()
        self.pointer[0] = (self.pointer[0] + x.shape[0]) % 6
        return out


class Codebook(nn.Module):
    """A vector quantiser whose codes follow the data by an exponential moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(4, 3)
        self.codes.weight.requires_grad_(False)
        self.register_buffer("size", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        index = torch.cdist(x, self.codes.weight).argmin(1)
        hot = nn.functional.one_hot(index, 4).to(x.dtype)
        if self.training:
            self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.weight.data.lerp_(hot.T @ x, 0.1)
        quantised = self.codes(index)
        return x + (quantised - x).detach(), index


class SharedBuffer(nn.Module):
    """One buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        second.running_mean = first.running_mean
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + 1)


COUNTERS = [
    Scenario("averaged", Averaged, _batches(4, 3), "writes to a row of a buffer under .data fail"),
    Scenario("queue", Queue, _batches(4, 3), "a CPU tensor meets a traced one"),
    Scenario("codebook", Codebook, _batches(5, 3), None, eval_last=True, rtol=1e-4),
    Scenario(
        "shared_buffer", SharedBuffer, _batches(5, 3), "a shared buffer is refused", rtol=1e-4
    ),
]


def _plain_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(4, 3))


POWER = "gradients flow through the power iteration, which runs under no_grad"
SET = "parametrized modules cannot be called: aten::set_ has no lowering"
REWEIGHTED = [
    Scenario(
        "spectral_norm_old",
        lambda: old_spectral_norm(nn.Linear(4, 3)),
        _batches(2, 4),
        POWER,
        eval_last=True,
        rtol=1e-4,
    ),
    Scenario(
        "spectral_norm_old_conv",
        lambda: old_spectral_norm(nn.ConvTranspose2d(2, 3, 3)),
        _batches(1, 2, 4, 4),
        POWER,
        eval_last=True,
        rtol=1e-4,
    ),
    Scenario(
        "spectral_norm",
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3), n_power_iterations=2),
        _batches(2, 4),
        POWER,
        eval_last=True,
        rtol=1e-4,
    ),
    Scenario("weight_norm_old", _plain_weight_norm, _batches(2, 4), None, rtol=1e-4),
    Scenario(
        "weight_norm",
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        _batches(2, 4),
        SET,
        rtol=1e-4,
    ),
    Scenario(
        "orthogonal",
        lambda: parametrizations.orthogonal(nn.Linear(3, 3), use_trivialization=False),
        _batches(2, 3),
        SET,
        rtol=1e-4,
    ),
]


def test_a_weight_that_each_call_computes_needs_no_second_program():
    port = tpuport.convert(_plain_weight_norm())
    for _ in range(2):
        port(torch.ones(2, 4))
    assert not port.report.retraces


class ScaleFromFirstBatch(nn.Module):
    """`register_buffer(None)`, filled by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().std()
        return self.linear(x / self.scale)


class AttributeFromFirstBatch(nn.Module):
    """A plain attribute, filled by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.offset: torch.Tensor | None = None
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.offset is None:
            self.offset = x.detach().mean(0)
        return self.linear(x - self.offset)


class RegisteredInForward(nn.Module):
    """`hasattr` and a buffer registered inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", x.detach().amax(0))
        return self.linear(x + self.shift)


class InitialisedFlag(nn.Module):
    """A Python flag and parameters set from the first batch, as in activation normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self._initialized = False
        self.scale = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._initialized:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.bias.data = -x.mean(0)
            self._initialized = True
        return (x + self.bias) * self.scale


class InitialisedBuffer(nn.Module):
    """The flag is a tensor in a buffer, read as a Python number: a branch on state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initted", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("location", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.initted.item() == 0:
            self.location.copy_(x.mean(0))
            self.initted.fill_(1)
        return x - self.location


class DictCache(nn.Module):
    """A dict of tensors computed from host values on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in self.cache:
            self.cache[x.shape[0]] = torch.arange(x.shape[0], dtype=torch.float32)
        return self.linear(x) * self.cache[x.shape[0]][:, None]


REDONE = "what the first call computes is computed again from each batch"
LAZY = [
    Scenario("scale_from_first_batch", ScaleFromFirstBatch, _batches(4, 3), REDONE),
    Scenario("attribute_from_first_batch", AttributeFromFirstBatch, _batches(4, 3), REDONE),
    Scenario("registered_in_forward", RegisteredInForward, _batches(4, 3), REDONE),
    Scenario("initialised_flag", InitialisedFlag, _batches(4, 3), REDONE),
    Scenario("initialised_buffer", InitialisedBuffer, _batches(4, 3), REDONE),
    Scenario(
        "dict_cache",
        DictCache,
        (*_batches(4, 3), *_batches(2, 3)),
        "a CPU tensor meets a traced one",
    ),
]

SCENARIOS = [*NORMS, *COUNTERS, *REWEIGHTED, *LAZY]
# The first call changes what is a parameter or the shape of the state: only a sequence of calls
# shows it.
CALLS_ONLY = {"initialised_flag", "codebook"}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_calls_and_buffers(scenario):
    check_calls(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.name not in CALLS_ONLY], ids=str)
def test_gradients_and_buffers(scenario):
    check_gradients(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", against_torchax(SCENARIOS))
def test_calls_and_buffers_under_plain_torchax(scenario):
    check_calls(scenario, PlainTorchax)
    check_gradients(scenario, PlainTorchax)


class Views(nn.Module):
    """Two names for one memory; the call writes to one of them, or to neither.

    Args:
        take: makes the second of the first.
        registered: whether the second one is a buffer.
        writes: which of them is written to.
    """

    def __init__(self, take: Any, writes: str, *, registered: bool = True) -> None:
        super().__init__()
        self.register_buffer("whole", torch.arange(6.0).reshape(2, 3))
        self.writes = writes
        self.mean = nn.BatchNorm1d(3)
        self.listed = [take(self.whole)]
        if registered:
            self.register_buffer("part", self.listed.pop())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.listed[0] if self.listed else self.part
        if self.writes:
            (self.whole if self.writes == "whole" else part).add_(x.sum())
        return self.mean(x) + self.whole.sum() + 2 * part.sum()


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("writes", ["whole", "part"])
@pytest.mark.parametrize("take", [lambda t: t[1], lambda t: t.view(6), lambda t: t[:, ::2]])
def test_a_write_to_views_of_one_memory_is_refused(take: Any, writes: str, registered: bool):
    ported = tpuport.convert(Views(take, writes, registered=registered), verify=False)
    with pytest.raises(PortError, match=r"views of the same memory") as caught:
        ported(torch.ones(2, 3))
    assert caught.value.file == __file__


def test_views_of_one_memory_are_read_and_parts_of_one_are_written():
    shared = Scenario("read", lambda: Views(lambda t: t[1], ""), _batches(2, 3), grads=False)
    check_calls(shared, by_tpuport)

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.zeros(2, 3)
            self.register_buffer("left", both[:, :2])
            self.register_buffer("right", both[:, 2:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.left.add_(x.mean())
            self.right.mul_(2).add_(x.sum())
            return x * self.left.sum() + self.right.sum()

    check_calls(Scenario("apart", Apart, _batches(2, 3)), by_tpuport)


def test_parameters_that_share_memory_are_not_trained():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UsageError, match=r"'0.weight' and '1.weight' share memory"):
        make_train_step(tpuport.convert(model), lambda model, x: model(x).mean(), "sgd")
    model[1].weight = model[0].weight
    make_train_step(tpuport.convert(model), lambda model, x: model(x).mean(), "sgd")


def test_a_port_is_neither_pickled_nor_deep_copied():
    ported = tpuport.convert(nn.Linear(3, 3))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"neither pickled nor deep-copied.*convert"):
            copied(ported)
    x = torch.ones(2, 3)
    assert torch.equal(tpuport.to_torch(copy.copy(ported)(x)), tpuport.to_torch(ported(x)))


def _data_of_a_traced_write(weight: nn.Parameter, x: torch.Tensor) -> None:
    made = torch.empty(2, 3)
    made[:, 0], made[:, 1:] = x[0, :2], weight[:, 1:] * 2
    weight.data = made


def _data_written_later(weight: nn.Parameter, x: torch.Tensor) -> None:
    made = torch.ones(3, 2)
    weight.data = made.t()
    made[0] += x.mean()
    made[1] = 7


def _data_written_by_both_names(weight: nn.Parameter, x: torch.Tensor) -> None:
    made = torch.zeros(2, 3)
    weight.data = made
    weight += x.mean()
    weight.mul_(made.sum())


def _set_to_memory_written_later(weight: nn.Parameter, x: torch.Tensor) -> None:
    made = torch.ones(2, 3)
    weight.set_(made)
    made *= x.sum()


@pytest.mark.parametrize(
    "assign",
    [
        _data_of_a_traced_write,
        _data_written_later,
        _data_written_by_both_names,
        _set_to_memory_written_later,
    ],
)
def test_a_weight_shares_the_memory_of_a_tensor_of_the_host_that_it_is_given(
    assign: Callable[[nn.Parameter, torch.Tensor], None],
):
    class Assigning(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                assign(self.weight, input)
            return super().forward(input)

    model = Assigning(3, 2)
    ported = tpuport.convert(copy.deepcopy(model), verify=False)
    for number in range(2):
        x = normal(4, 3, seed=number)
        torch.testing.assert_close(tpuport.to_torch(ported(x)), model(x))
        weight = tpuport.to_torch(ported.params["weight"])
        torch.testing.assert_close(weight, model.weight.detach())
