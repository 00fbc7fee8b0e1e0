"""The recipe's planner is upstream's: the same state dict, loss, gradients and samples.

Waits for a checkout: TPUPORT_UPSTREAM_RECOGDRIVE=/path/to/recogdrive (zorrofox/recogdrive at
6b4663b), and for timm, peft, omegaconf, einops, diffusers and transformers.
"""

import lzma
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import tpuport
from recipes.recogdrive import kinds, upstream
from recipes.recogdrive.diffusion import SAMPLERS
from recipes.recogdrive.grpo import GrpoOptions, advantages
from recipes.recogdrive.planner import SIZES, PlannerConfig, make_planner
from tests.upstream.recogdrive_checkout import CHECKOUT, PLANNER, needs, needs_checkout, old_timm

pytestmark = [needs_checkout, needs(PLANNER), old_timm]


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with upstream.upstream_planner(CHECKOUT) as make_theirs:
        yield make_theirs


def pair(make: Any, sampler: Any, width: int = 64) -> tuple[Any, Any]:
    """The two planners with the same random weights."""
    theirs = make("tiny", sampler, state_width=width)
    for parameter in theirs.parameters():
        if parameter.requires_grad:  # the modulation starts at zero, which would hide everything
            torch.nn.init.normal_(parameter, std=0.1)
    ours = make_planner("tiny", sampler, state_width=width, seed=1)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


def scene(batch: int = 3) -> dict[str, torch.Tensor]:
    return {
        "last_hidden_state": torch.randn(batch, 5, 64),
        "history_trajectory": torch.randn(batch, 4, 3),
        "status_feature": torch.randn(batch, 8),
        "trajectory": torch.randn(batch, 8, 3) * 3 + torch.tensor([20.0, 0, 0]),
    }


def inputs(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    history = batch["history_trajectory"].flatten(1)
    return batch["last_hidden_state"], history, batch["status_feature"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_state_dicts_load_either_way(make, sampler):
    ours, theirs = pair(make, sampler)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    fresh = make_planner("tiny", sampler, seed=2).state_dict()
    for name, value in theirs.named_buffers():
        if name in fresh:  # computed here, not loaded
            assert torch.equal(fresh[name], value), name
    trained = {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("size", ["small", "large"])
def test_the_sizes_are_upstreams(make, size):
    config = SIZES[size]
    assert isinstance(config, PlannerConfig)
    with torch.device("meta"):
        theirs = {n: v.shape for n, v in make(size).state_dict().items()}
        ours = {n: v.shape for n, v in make_planner(size).state_dict().items()}
    assert ours == theirs


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_loss_and_gradients_agree(make, sampler):
    ours, theirs = pair(make, sampler)
    batch, noise = scene(), torch.randn(3, 8, 3)
    times = torch.tensor([0.1, 0.5, 0.9]) if sampler == "flow" else torch.tensor([0, 42, 99])
    with (
        mock.patch.object(torch, "randn_like", return_value=noise),
        mock.patch.object(theirs, "sample_time", return_value=times),
    ):
        expected = upstream.imitation_loss(theirs, batch)
    expected.backward()
    loss = ours.loss(*inputs(batch), batch["trajectory"], noise, times).mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert len(grads) > 80
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
@torch.no_grad()
def test_sampled_trajectories_agree(make, sampler, deterministic):
    ours, theirs = pair(make, sampler)
    batch, init, noise = scene(), torch.randn(3, 8, 3), torch.randn(5, 3, 8, 3)
    with mock.patch.object(torch, "randn_like", side_effect=list(noise.clone())):
        expected = theirs.get_action(
            batch["last_hidden_state"],
            upstream.action_input(batch),
            init_actions=init.clone(),
            deterministic=deterministic,
        ).pred_traj
    got = ours.get_action(*inputs(batch), init, noise, deterministic)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_noise_of_a_batch_is_that_of_upstreams_program(make, sampler):
    ours, theirs = pair(make, sampler)
    noise = {"init": torch.randn(3, 8, 3), "step_noise": torch.randn(5, 3, 8, 3) * 2}
    batch = {**scene(), **noise}
    before, draw = batch["step_noise"].clone(), torch.randn_like
    ported = tpuport.convert(theirs, methods=(upstream.sampled,), verify=False)
    found = [tpuport.to_torch(ported.sampled(batch)) for _ in range(2)]
    assert torch.equal(*found)
    with torch.no_grad():
        expected = ours.get_action(*inputs(batch), noise["init"], noise["step_noise"])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(batch["step_noise"], before)
    assert torch.randn_like is draw


@torch.no_grad()
def test_chains_and_their_likelihoods_agree(make):
    ours, theirs = pair(make, "ddim")
    batch, init, noise = scene(), torch.randn(3, 8, 3), torch.randn(5, 3, 8, 3) * 4
    with (
        mock.patch.object(torch, "randn_like", side_effect=list(noise.clone())),
        mock.patch.object(torch, "randn", return_value=init.clone()),
    ):
        expected = theirs.sample_chain(*inputs(batch))
    got = ours.sample_chain(*inputs(batch), init=init, noise=noise)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    likelihoods = theirs.get_logprobs(*inputs(batch), expected[0]).unflatten(0, (3, 5))
    found = ours.get_logprobs(*inputs(batch), expected[0])
    torch.testing.assert_close(found, likelihoods, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_several_chains_of_a_scene_are_those_of_the_scene_repeated(make):
    ours, theirs = pair(make, "ddim")
    given, init, noise = inputs(scene(2)), torch.randn(6, 8, 3), torch.randn(5, 6, 8, 3)
    repeated = [part.repeat_interleave(3, 0) for part in given]
    with (
        mock.patch.object(torch, "randn_like", side_effect=list(noise.clone())),
        mock.patch.object(torch, "randn", return_value=init.clone()),
    ):
        expected = theirs.sample_chain(*repeated)
    chains, trajectories = ours.sample_chain(*given, 3, init, noise)
    torch.testing.assert_close(chains, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trajectories, expected[1], rtol=1e-5, atol=1e-5)
    likelihoods = theirs.get_logprobs(*repeated, chains)
    found = ours.get_logprobs(*given, chains).flatten(0, 1)
    torch.testing.assert_close(found, likelihoods, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_the_loss_of_reinforcement_and_its_gradients_agree(make, tmp_path, kind):
    """With `forward_grpo` on the same noise and rewards, by our loss of either planner."""
    ours, theirs = pair(make, "ddim")
    reference, theirs.old_policy = pair(make, "ddim")
    theirs.old_policy.requires_grad_(False)
    batch, count, tokens = scene(2), 8, ["a", "b"]
    init, noise = torch.randn(2 * count, 8, 3), torch.randn(5, 2 * count, 8, 3)
    clone_init, clone_noise = torch.randn(2, 8, 3), torch.randn(5, 2, 8, 3)
    rewards = torch.rand(2, count)
    for token in tokens:
        with lzma.open(tmp_path / token, "wb") as file:
            pickle.dump(token, file)
    theirs.metric_cache_loader = mock.Mock(metric_cache_paths={t: tmp_path / t for t in tokens})
    theirs.reward_fn = mock.Mock(return_value=rewards.flatten())
    with (
        mock.patch.object(torch, "randn", side_effect=[init.clone(), clone_init.clone()]),
        mock.patch.object(torch, "randn_like", side_effect=[*noise.clone(), *clone_noise.clone()]),
    ):
        expected = theirs.forward_grpo(
            batch["last_hidden_state"], upstream.action_input(batch), tokens
        )
    chains, ends = ours.sample_chain(*inputs(batch), count, init, noise)
    scored, names, _ = theirs.reward_fn.call_args.args
    torch.testing.assert_close(ends, scored, rtol=1e-5, atol=1e-5)
    assert names == ["a"] * count + ["b"] * count
    cloned, _ = reference.sample_chain(*inputs(batch), 1, clone_init, clone_noise)
    options = GrpoOptions()
    powers = torch.arange(chains.shape[1] - 2, -1, -1)
    given = batch | {
        "chains": chains.unflatten(0, (2, count)),
        "reference_chains": cloned.unsqueeze(1),
        "advantages": torch.from_numpy(advantages(rewards.numpy())),
        "discount": (options.gamma**powers).repeat(2, 1),
        "bc": torch.full((2,), options.bc),
    }
    expected.loss.backward()
    trained = [name for name, p in ours.named_parameters() if p.requires_grad]
    wanted = {name: theirs.get_parameter(name).grad for name in trained}
    planner = ours
    if kind == "theirs":
        planner = theirs
        planner.zero_grad()
        loss, metrics = kinds.upstream_reinforced_loss(planner, given)
    else:
        loss, metrics = kinds.reinforced_loss(planner, given)
    loss.backward()
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=1e-5)
    for name in ("policy_loss", "bc_loss"):
        torch.testing.assert_close(metrics[name], expected[name], rtol=1e-4, atol=1e-5)
    largest = max(grad.abs().max() for grad in wanted.values())
    assert largest > 0.01
    for name in trained:
        found = planner.get_parameter(name).grad
        torch.testing.assert_close(found, wanted[name], rtol=1e-3, atol=1e-4 * float(largest))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@torch.no_grad()
def test_the_mean_and_variance_of_each_step_agree(make, sampler, deterministic):
    ours, theirs = pair(make, sampler)
    context, x = ours.encode(*inputs(scene())), torch.randn(3, 8, 3)
    for index, time in enumerate(ours.sampling_times()):
        steps = torch.full((3,), time), torch.full((3,), index)
        expected = theirs.p_mean_variance(x.clone(), *steps, *context, deterministic)
        got = ours.p_mean_variance(x, *steps, context, deterministic)
        assert torch.equal(got[1], expected[1])
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
