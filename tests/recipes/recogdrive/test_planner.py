"""The planner as programs: the steps, gradients and samples of eager PyTorch."""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from recipes.recogdrive import kinds
from recipes.recogdrive.diffusion import SAMPLERS, denormalise, normalise
from recipes.recogdrive.train import BETAS, WEIGHT_DECAY, TrainOptions, make_optimizer
from tests.recipes.recogdrive.small import CONFIG, scenes, small_planner
from tpuport.foundation.errors import UsageError
from tpuport.training import TrainStep, make_train_step

# In training ddpm is ddim.
TRAINED = ("ddim", "flow")
RATE = TrainOptions(lr=1e-3, min_lr=1e-4, warmup_epochs=2, epochs=6)
STEPS_PER_EPOCH = 4


def make_step(planner: Any, **options: Any) -> TrainStep:
    ported = tpuport.convert(planner, methods=(kinds.sampled,), verify=False)
    return make_train_step(
        ported, kinds.imitation_loss, make_optimizer(RATE, STEPS_PER_EPOCH), **options
    )


def relative(found: Any, expected: torch.Tensor) -> float:
    found = found if isinstance(found, torch.Tensor) else torch.as_tensor(np.array(found))
    found, expected = found.double(), expected.detach().double()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def test_normalised_poses_come_back():
    poses = scenes()["trajectory"]
    torch.testing.assert_close(denormalise(normalise(poses)), poses, rtol=1e-6, atol=1e-5)
    lowest, highest = torch.tensor([-1.57, -19.68, -1.67]), torch.tensor([65.17, 22.32, 1.86])
    torch.testing.assert_close(normalise(lowest), -torch.ones(3))
    torch.testing.assert_close(normalise(highest), torch.ones(3))


def torchs_rate(epoch: int) -> float:
    """Upstream's schedule, in Python."""
    if epoch < RATE.warmup_epochs:
        return RATE.lr * (epoch + 1) / RATE.warmup_epochs
    share = (epoch - RATE.warmup_epochs) / (RATE.epochs - RATE.warmup_epochs)
    return RATE.min_lr + 0.5 * (RATE.lr - RATE.min_lr) * (1 + np.cos(np.pi * share))


@pytest.mark.parametrize("sampler", TRAINED)
def test_twenty_steps_are_those_of_torch(sampler):
    planner = small_planner(sampler)
    eager = copy.deepcopy(planner)
    trained = [p for p in eager.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW(trained, lr=1e-3, weight_decay=WEIGHT_DECAY, betas=BETAS)
    step = make_step(planner, clip_norm=1.0)
    state = step.init()
    for number in range(20):
        batch = scenes(seed=number, noise=True, sampler=sampler)
        for group in theirs.param_groups:
            group["lr"] = torchs_rate(number // STEPS_PER_EPOCH)
        theirs.zero_grad()
        loss, _ = kinds.imitation_loss(eager, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        theirs.step()
        state, metrics = step(state, batch)
        assert relative(metrics["loss"], loss) < 1e-4
        assert relative(metrics["grad_norm"], norm) < 1e-4
    expected = dict(eager.named_parameters())
    for name, value in state.params.items():
        assert relative(value, expected[name]) < 1e-4, name
    for name, value in eager.named_buffers():
        assert relative(state.buffers[name], value) == 0, name
    assert step.retraces == 0


# test_twenty_steps_are_those_of_torch has the other sampler's.
@pytest.mark.parametrize("sampler", ["ddim", pytest.param("flow", marks=pytest.mark.slow)])
def test_every_gradient_is_that_of_torch(sampler):
    """Of two blocks, one after the other."""
    planner = small_planner(sampler, config=dataclasses.replace(CONFIG, layers=2))
    batch = scenes(noise=True, sampler=sampler)
    ported = tpuport.convert(planner, methods=(kinds.imitation_loss,), verify=False)

    def loss(params: Any) -> Any:
        out, _ = ported.apply(params, ported.buffers, None, batch, method="imitation_loss")
        return out[0]

    found = jax.jit(jax.grad(loss))(ported.params)
    kinds.imitation_loss(planner, batch)[0].backward()
    grads = {n: p.grad for n, p in planner.named_parameters() if p.requires_grad}
    assert found.keys() == grads.keys()
    for name, value in found.items():
        expected = grads[name]
        assert expected is not None
        assert relative(value, expected) < 1e-4, name


# test_vlm.py adds up the gradients of parts, by the same step; the planner's loss is above.
@pytest.mark.slow
def test_four_parts_of_two_are_a_batch_of_eight():
    states = []
    for parts in (1, 4):
        step = make_step(small_planner(), accumulate=parts, clip_norm=1.0)
        state = step.init()
        for number in range(3):
            state, _ = step(state, scenes(8, number, noise=True))
        states.append(state.params)
    for name, value in states[0].items():
        assert relative(states[1][name], torch.from_numpy(np.array(value))) < 1e-5, name


def test_padding_counts_for_nothing():
    batch = scenes(6, noise=True)
    short = {name: value[:4] for name, value in batch.items()}
    batch["sample_mask"] = torch.arange(6) < 4
    planner = small_planner()
    loss, metrics = kinds.imitation_loss(planner, batch)
    torch.testing.assert_close(loss, kinds.imitation_loss(planner, short)[0])
    assert metrics["weight"].item() == 4


def test_noise_differs_at_each_step_and_not_by_run():
    losses = []
    ported = tpuport.convert(small_planner(), methods=(kinds.sampled,), verify=False)
    optimizer = make_optimizer(TrainOptions(lr=0.0, min_lr=0.0), 1)
    step = make_train_step(ported, kinds.imitation_loss, optimizer)
    for _ in range(2):
        state, run = step.init(seed=3), []
        for _ in range(3):
            state, metrics = step(state, scenes())
            run.append(float(metrics["loss"]))
        losses.append(run)
    assert len(set(losses[0])) == 3
    assert losses[0] == losses[1]


def test_the_infinite_eta_is_not_trained_and_actions_stay_finite():
    """Weight decay of an infinite parameter is NaN, which the loss would not show."""
    step = make_step(small_planner())
    state = step.init()
    assert "eta.eta_logit" not in state.params
    assert "eta.eta_logit" not in str(jax.tree_util.tree_flatten_with_path(state.optimizer)[0])
    for number in range(2):
        state, _ = step(state, scenes(seed=number))
    assert np.isinf(state.frozen["eta.eta_logit"]).all()
    ported = step.load_state(state)
    first, second = (tpuport.to_torch(ported.sampled(scenes())) for _ in range(2))
    assert first.isfinite().all()
    assert not torch.equal(first, second)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampled_trajectories_are_those_of_eager(sampler):
    planner, batch = small_planner(sampler), scenes()
    batch["init"], batch["step_noise"] = torch.randn(4, 8, 3), torch.randn(5, 4, 8, 3)
    ported = tpuport.convert(planner, methods=(kinds.sampled,), verify=False)
    with torch.no_grad():
        expected = kinds.sampled(planner, batch)
    assert relative(tpuport.to_torch(ported.sampled(batch)), expected) < 1e-4
    assert expected[..., 0].min() >= -1.58
    assert expected[..., 0].max() <= 65.18


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_step_back_is_that_of_eager(deterministic):
    planner, batch = small_planner(), scenes()
    context = planner.encode(*kinds.scene_of(batch))
    ported = tpuport.convert(planner, methods=("p_mean_variance",), verify=False)
    x, logvar = torch.randn(4, 8, 3), torch.zeros(())
    for index, time in enumerate(planner.sampling_times()):
        given = (x, torch.full((4,), time), torch.full((4,), index), context, deterministic)
        with torch.no_grad():
            expected = planner.p_mean_variance(*given)
        found, logvar = ported.p_mean_variance(*given), expected[1]
        for one, other in zip(found, expected, strict=True):
            assert relative(tpuport.to_torch(one), other) < 1e-5
    # Sigma is cut off at 1e-10 before it is squared; without that it would be -46.05.
    assert logvar.max().item() == pytest.approx(-45.3586, abs=1e-3)


def test_wrong_sizes_and_samplers_are_named():
    from recipes.recogdrive.planner import make_planner

    with pytest.raises(UsageError, match="size='huge': expected one of tiny, small, large"):
        make_planner("huge")
    with pytest.raises(UsageError, match="sampler='euler': expected one of ddim, ddpm, flow"):
        make_planner("tiny", "euler")  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@torch.no_grad()
def test_only_ddim_cuts_the_noise_of_evaluation_off(sampler):
    planner, given = small_planner(sampler), kinds.scene_of(scenes())
    init, noise = scenes(noise=True)["noise"], torch.full((5, 4, 8, 3), 1.5)
    found = planner.get_action(*given, init, noise)
    cut = planner.get_action(*given, init, noise.clamp(max=1.0))
    assert torch.equal(found, cut) == (sampler == "ddim")
