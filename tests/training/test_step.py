"""A step as one program does what the same step in eager PyTorch does."""

import copy
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

import tpuport
from tests.training.small import Small, batches, loss
from tpuport.foundation.errors import PortError, UsageError
from tpuport.sharding import fsdp
from tpuport.training import TrainState, from_torch, make_train_step
from tpuport.training.state import _copies, copy_all, ema_of


def same(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    """Weights and buffers of two modules."""
    for (name, one), other in zip(
        found.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        scale = max(float(other.double().abs().max()), 1e-3)
        assert (one.double() - other.double()).abs().max() <= rtol * scale, name


@pytest.mark.parametrize("clip", [None, 0.5])
def test_twenty_steps_are_those_of_torch(clip: float | None):
    model = Small(0.0)
    eager = copy.deepcopy(model)
    theirs = torch.optim.AdamW(
        [p for p in eager.parameters() if p.requires_grad],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    step = make_train_step(
        tpuport.convert(model),
        loss,
        optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.1),
        clip_norm=clip,
        ema_decay=0.9,
    )
    averaged = torch.optim.swa_utils.AveragedModel(
        eager, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    averaged.update_parameters(eager)
    state = step.init()
    for number, batch in enumerate(batches(20)):
        state, metrics = step(state, batch)
        theirs.zero_grad()
        value, more = loss(eager, batch)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), clip or float("inf"))
        theirs.step()
        averaged.update_parameters(eager)
        assert int(state.step) == number + 1
        np.testing.assert_allclose(metrics["loss"], value.item(), rtol=1e-4)
        np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-4)
        np.testing.assert_allclose(metrics["accuracy"], more["accuracy"].item())
    assert step.retraces == 0
    same(step.load_state(state).to_torch(), eager)
    with torch.no_grad():
        for one, other in zip(averaged.module.buffers(), eager.buffers(), strict=True):
            one.copy_(other)  # torch averages these or leaves them; ours are the newest
    same(step.load_state(state, ema=True).to_torch(), averaged.module)


def after(accumulate: int, *, normed: bool = True) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Small(0.0)
    if not normed:
        model.norm = torch.nn.LayerNorm(16)  # type: ignore[assignment]
    step = make_train_step(tpuport.convert(model), loss, optax.sgd(0.1), accumulate=accumulate)
    state, metrics = step.init(), {}
    for batch in batches(3, size=8):
        state, metrics = step(state, batch)
    return step.load_state(state).to_torch(), metrics


def test_accumulated_gradients_are_those_of_the_whole_batch():
    found, metrics = after(4, normed=False)
    expected, whole = after(1, normed=False)
    same(found, expected, rtol=1e-5)
    assert metrics.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_buffers_go_from_part_to_part():
    found, _ = after(2)
    assert int(found.norm.num_batches_tracked) == 6


def test_each_part_has_random_numbers_of_its_own():
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.dropout(self.weight, 0.5, train=True) * x).sum()

    step = make_train_step(tpuport.convert(Noisy()), optimizer=optax.sgd(1.0), accumulate=2)
    state, _ = step(step.init(), torch.ones(2, 64))
    # One mask for both parts would give each weight a gradient of 0 or 2, and none of 1.
    assert {float(g) for g in -np.asarray(state.params["weight"])} == {0.0, 1.0, 2.0}


def test_parts_count_by_their_weight():
    def masked(model: torch.nn.Module, x: torch.Tensor, keep: torch.Tensor) -> Any:
        each = model(x).square().mean(-1)
        return (each * keep).sum() / keep.sum(), {"weight": keep.sum()}

    x, keep = torch.randn(8, 8), torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 1])
    losses = []
    for accumulate in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        ported = tpuport.convert(model)
        step = make_train_step(ported, masked, "sgd", accumulate=accumulate)
        _, metrics = step(step.init(), x, keep)
        assert "weight" not in metrics
        losses.append((metrics["loss"], metrics["grad_norm"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_noise_is_fresh_at_each_step_and_the_same_for_a_seed():
    (batch,) = batches(1)
    step = make_train_step(tpuport.convert(Small(0.5)), loss, optax.sgd(0.0))

    def run(seed: int) -> list[float]:
        state, found = step.init(seed), []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    first = run(0)
    assert len(set(first)) == 3
    assert run(0) == first
    assert run(1) != first
    assert step.retraces == 0


def test_a_step_without_finite_gradients_is_skipped_and_counted():
    good, bad = batches(2)
    bad["x"][0, 0] = torch.inf
    step = make_train_step(tpuport.convert(Small(0.0)), loss, ema_decay=0.9)
    state, _ = step(step.init(), good)
    before = jax.device_get((state.params, state.buffers, state.optimizer, state.ema))
    state, metrics = step(state, bad)
    assert bool(metrics["skipped"])
    now = jax.device_get((state.params, state.buffers, state.optimizer, state.ema))
    jax.tree.map(np.testing.assert_array_equal, now, before)
    assert (int(state.step), int(state.skipped)) == (2, 1)
    state, metrics = step(state, good)
    assert not bool(metrics["skipped"])
    assert np.isfinite(metrics["loss"])

    heedless = make_train_step(tpuport.convert(Small(0.0)), loss, skip_nonfinite=False)
    state, metrics = heedless(heedless.init(), bad)
    assert np.isnan(state.params["last.weight"]).any()


def test_the_old_state_is_overwritten_and_the_model_is_not():
    ported = tpuport.convert(Small(0.0))
    before = jax.device_get(ported.params)
    step = make_train_step(ported, loss)
    first = step.init()
    second, _ = step(first, batches(1)[0])
    assert isinstance(second, TrainState)
    assert all(value.is_deleted() for value in first.params.values())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ported.params), before)
    step.load_state(second)
    step(second, batches(1)[0])
    assert not any(value.is_deleted() for value in ported.params.values())

    taken = step.init(copy=False)
    step(taken, batches(1)[0])
    assert all(value.is_deleted() for value in ported.params.values())


def test_a_state_is_copied_by_a_program_for_each_spread():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    arrays = {str(n): jax.numpy.arange(n / 1).astype("bfloat16") for n in (8, 16, 24)}
    arrays["16"] = jax.device_put(arrays["16"], spread)
    before = _copies._cache_size()
    copied, averages = copy_all({**arrays, "again": arrays["8"]}), ema_of(arrays)
    assert _copies._cache_size() == before + 4  # two spreads, in two dtypes
    arrays["again"] = arrays["8"]
    assert copied["again"] is not copied["8"]
    for name, array in arrays.items():
        made = copied[name]
        assert (made.sharding, made.committed) == (array.sharding, array.committed)
        np.testing.assert_array_equal(made, array)
        assert averages.get(name, made).dtype == (made.dtype if name == "again" else np.float32)
    for array in arrays.values():
        array.delete()
    assert float(sum(value.sum() for value in averages.values())) == 28 + 120 + 276
    assert float(copied["again"][7]) == 7


def test_frozen_parameters_never_meet_the_optimizer():
    step = make_train_step(tpuport.convert(Small(0.0)), loss)
    state = step.init()
    assert set(state.frozen) == {"frozen.weight", "frozen.bias"}
    assert not set(state.params) & set(state.frozen)
    moments = jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
    assert not any("frozen" in jax.tree_util.keystr(path) for path, _ in moments)


def refuse_to_read(array: Any) -> None:
    """In place of what fetches an array's value."""
    raise AssertionError(f"read {array.shape}")


def test_nothing_waits_for_the_device(monkeypatch):
    step = make_train_step(tpuport.convert(Small(0.1)), loss, clip_norm=1.0, ema_decay=0.9)
    (batch,) = batches(1)
    state, _ = step(step.init(), batch)
    (compiled,) = step._programs.values()
    text = str(compiled.run.jaxpr)
    assert "callback" not in text
    # Arguments go to the device; nothing comes back.
    monkeypatch.setattr(type(state.step), "_value", property(refuse_to_read))
    with pytest.raises(AssertionError, match="read"):
        float(state.step)
    _, metrics = step(state, batch)
    assert all(isinstance(value, jax.Array) for value in metrics.values())


def places(state: TrainState) -> dict[str, Any]:
    """Where each array of a state lies."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf.sharding for path, leaf in leaves}


def test_a_spread_state_stays_where_it_was_and_gives_what_one_device_gives():
    found: list[tuple[TrainState, list[float]]] = []
    for spread in (False, True):
        torch.manual_seed(0)
        ported = tpuport.convert(Small(0.0, width=64))
        if spread:
            tpuport.shard(ported, {"fsdp": 8}, fsdp(ported, {"fsdp": 8}, min_size=64))
        step = make_train_step(ported, loss, optax.adamw(1e-2), clip_norm=1.0, ema_decay=0.9)
        state, losses = step.init(), []
        before = places(state)
        for batch in batches(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            assert places(state) == before
        found.append((state, losses))
    (alone, expected), (state, losses) = found
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, value in alone.params.items():
        np.testing.assert_allclose(state.params[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    moments = state.optimizer[0].mu["first.weight"]
    for one in (state.params["first.weight"], state.ema["first.weight"], moments):
        assert {shard.data.shape for shard in one.addressable_shards} == {(8, 8)}


class WithLoss(torch.nn.Module):
    """One that gives its own loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"loss": y.square().mean(), "logits": y, "largest": y.max()}

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """As Lightning calls it."""
        return self.layer(batch).abs().mean() + number


def test_a_method_or_the_output_may_give_the_loss():
    x = torch.randn(4, 4)
    ported = tpuport.convert(WithLoss(), methods=("forward", "training_step"))
    step = make_train_step(ported)
    _, metrics = step(step.init(), x)
    assert set(metrics) == {"loss", "largest", "grad_norm", "skipped"}
    step = make_train_step(ported, "training_step")
    _, metrics = step(step.init(), x, 3)
    assert float(metrics["loss"]) > 3


def test_two_losses_of_one_model_are_two_steps():
    ported, x = tpuport.convert(torch.nn.Linear(4, 2)), torch.randn(4, 4)

    def first(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def second(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).abs().mean() + 10

    one, two = make_train_step(ported, first), make_train_step(ported, second)
    large = two(two.init(), x)[1]["loss"]
    small = one(one.init(), x)[1]["loss"]
    with torch.no_grad():
        np.testing.assert_allclose(small, first(ported.to_torch(), x).item(), rtol=1e-5)
        np.testing.assert_allclose(large, second(ported.to_torch(), x).item(), rtol=1e-5)


def test_a_part_that_counts_for_nothing_does_no_harm():
    def masked(model: Any, x: torch.Tensor, keep: torch.Tensor) -> Any:
        each = model(x).square().mean(-1)
        return (each * keep).sum() / keep.sum(), {"weight": keep.sum()}

    x, keep = torch.randn(8, 8), torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 0])
    ported = tpuport.convert(torch.nn.Linear(8, 4))
    found = []
    for accumulate in (1, 2):
        step = make_train_step(ported, masked, "sgd", accumulate=accumulate)
        _, metrics = step(step.init(), x, keep)
        found.append((metrics["loss"], metrics["grad_norm"], metrics["skipped"]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_a_size_is_not_read_from_the_whole_batch_for_a_part_of_it():
    def ragged(model: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        n = int(lengths.max())
        return model(x).square().mean() + torch.ones(n, 2).sum()

    ported = tpuport.convert(torch.nn.Linear(8, 4))
    step = make_train_step(ported, ragged, "sgd", accumulate=4)
    with pytest.raises(PortError):
        step(step.init(), torch.randn(8, 8), torch.tensor([1, 1, 1, 1, 2, 2, 4, 4]))


class Counting(torch.nn.Module):
    """One that counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (x * self.weight).sum() / self.calls


REFUSED = {
    "no loss": (lambda m, x: {"y": m(x)}, {}, "a dict has no loss: expected a scalar"),
    "no scalar": (
        lambda m, x: m(x),
        {},
        r"shape \[6, 4\] and dtype float32: expected",
    ),
    "metric": (
        lambda m, x: (m(x).sum(), {"all": m(x)}),
        {},
        r"metric 'all' is a .* of shape \[6, 4\]: expected a number",
    ),
    "parts": (lambda m, x: m(x).sum(), {"accumulate": 4}, "batch of 6 cannot be cut into 4 equal"),
    "none": (lambda m, x: m(x).sum(), {"accumulate": 0}, "accumulate=0: expected the number"),
    "decay": (lambda m, x: m(x).sum(), {"ema_decay": 1.0}, "ema_decay=1.0: expected a rate"),
    "clip": (lambda m, x: m(x).sum(), {"clip_norm": 0.0}, "clip_norm=0.0: expected the largest"),
    "method": ("trainig_step", {}, "loss='trainig_step': Linear has no method of that name"),
    "reserved": (
        lambda m, x: (m(x).sum(), {"loss": x.sum()}),
        {},
        "returns a metric 'loss', which a step reports itself",
    ),
    "optimizer": (lambda m, x: m(x).sum(), {"optimizer": "adamx"}, "one of adamw, adam"),
}


@pytest.mark.parametrize(("loss", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused(loss: Any, options: dict[str, Any], message: str):
    def run() -> None:
        step = make_train_step(tpuport.convert(torch.nn.Linear(8, 4)), loss, **options)
        step(step.init(), torch.randn(6, 8))

    with pytest.raises(UsageError, match=message):
        run()


def test_python_state_that_changes_at_each_step_is_refused():
    step = make_train_step(tpuport.convert(Counting()))
    with pytest.raises(UsageError, match=r"changes 'calls', which is Python state.*as a buffer"):
        step(step.init(), torch.randn(4))


def test_a_model_without_trainable_parameters_is_refused():
    ported = tpuport.convert(torch.nn.Linear(8, 4).requires_grad_(False))
    with pytest.raises(UsageError, match="no parameter with requires_grad=True"):
        make_train_step(ported, loss)


class HookedAtFirst(torch.nn.Module):
    """Sets something up at its first call, by which that call is as all others or is not."""

    def __init__(self, *, differs: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.ready, self.differs = False, differs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.layer.register_forward_hook(lambda module, args, out: out * 3)
            self.ready = True
            x = x * 2 if self.differs else x
        return self.layer(x).square().mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_the_first_call_sets_up_is_there_at_each_step(accumulate: int):
    model = HookedAtFirst(differs=False)
    eager = copy.deepcopy(model)
    step = make_train_step(tpuport.convert(model), optimizer=optax.sgd(0.1), accumulate=accumulate)
    optimizer, state = torch.optim.SGD(eager.parameters(), lr=0.1), step.init()
    for i in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
        state, metrics = step(state, x)
        optimizer.zero_grad()
        want = eager(x)
        want.backward()
        optimizer.step()
        torch.testing.assert_close(float(metrics["loss"]), want.item(), rtol=1e-5, atol=0)
    torch.testing.assert_close(step.load_state(state).to_torch().state_dict(), eager.state_dict())
    assert step.retraces == 0


def test_a_first_call_that_is_not_as_the_others_is_refused():
    step = make_train_step(tpuport.convert(HookedAtFirst(differs=True)))
    with pytest.raises(UsageError, match=r"changes 'ready', 'hooks of layer', .* set up lazily"):
        step(step.init(), torch.randn(6, 4))
    assert not step.ported.module.ready


class Trainer:
    """Owns its loss, as scripts do: what the loss reads of it may change between steps."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.weight, self.scale, self.sizes = 1.0, torch.ones(3), {"k": 2}
        self.loss_fn = torch.nn.CrossEntropyLoss()

    def loss(self, model, x, y):
        return self.loss_fn(model(x) * self.scale * self.sizes["k"], y) * self.weight


CHANGES = {
    1: lambda one: setattr(one, "weight", 3.0),
    3: lambda one: setattr(one, "scale", torch.tensor([1.0, 2.0, 3.0])),
    5: lambda one: one.sizes.update(k=5),
    7: lambda one: setattr(one, "loss_fn", torch.nn.CrossEntropyLoss(label_smoothing=0.3)),
}


def test_a_loss_sees_changes_of_the_object_that_it_belongs_to():
    eager, one = Trainer(), Trainer()
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    ported = tpuport.convert(one.model)
    step = make_train_step(ported, one.loss, from_torch(ported, one.optimizer))
    state = step.init()
    for number in range(9):
        for trainer in (eager, one):
            CHANGES.get(number, lambda one: None)(trainer)
        eager.optimizer.zero_grad()
        expected = eager.loss(eager.model, x, y)
        expected.backward()
        eager.optimizer.step()
        state, metrics = step(state, x, y)
        np.testing.assert_allclose(float(metrics["loss"]), expected.item(), rtol=1e-4)
    assert step.retraces == len(CHANGES)
