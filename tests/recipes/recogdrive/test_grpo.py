"""Reinforcement: its loss is GRPO's with behaviour cloning, and a step is on policy."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from recipes.recogdrive import grpo, kinds
from recipes.recogdrive.make_data import make_cache
from recipes.recogdrive.rewards import RewardPool, SimpleScorer
from recipes.recogdrive.train import TrainOptions
from tests.recipes.recogdrive.small import scenes, small_planner
from tpuport.foundation.errors import UsageError

TRAIN = TrainOptions(epochs=1, warmup_epochs=0, min_lr=0.0, ema_decay=None)


def chained(planner, count: int = 3):
    batch = scenes(2)
    chains, _ = kinds.sampled_chains(planner, batch, count)
    batch |= {
        "chains": chains,
        "reference_chains": kinds.sampled_chains(small_planner(seed=1), batch)[0],
        "advantages": torch.randn(2, count),
        "discount": (0.6 ** torch.arange(4.0, -1, -1)).repeat(2, 1),
        "bc": torch.full((2,), 0.1),
    }
    return batch


def test_the_loss_is_likelihood_by_advantage_and_cloning():
    planner = small_planner()
    batch = chained(planner)
    loss, metrics = kinds.reinforced_loss(planner, batch)
    likely = planner.get_logprobs(*kinds.scene_of(batch), batch["chains"].flatten(0, 1))
    policy = 0.0
    for scene in range(2):
        for sample in range(3):
            for step in range(5):
                one = likely[scene * 3 + sample, step].clamp(-5, 2).mean()
                policy -= one * batch["advantages"][scene, sample] * 0.6 ** (4 - step) / 30
    reference = planner.get_logprobs(*kinds.scene_of(batch), batch["reference_chains"][:, 0])
    cloned = -reference.clamp(-5, 2).mean()
    torch.testing.assert_close(metrics["policy_loss"], policy)
    torch.testing.assert_close(metrics["bc_loss"], cloned)
    torch.testing.assert_close(loss, policy + 0.1 * cloned)


def test_padding_counts_for_nothing():
    planner = small_planner()
    batch = chained(planner)
    one = {name: value[:1] for name, value in batch.items()}
    batch["sample_mask"] = torch.tensor([True, False])
    for found, expected in zip(
        kinds.reinforced_loss(planner, batch)[1].values(),
        kinds.reinforced_loss(planner, one)[1].values(),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_likelihoods_are_those_of_the_normal_distribution():
    planner = small_planner()
    batch = scenes(2)
    chains = kinds.sampled_chains(planner, batch)[0].flatten(0, 1)
    found = planner.get_logprobs(*kinds.scene_of(batch), chains)
    context = planner.encode(*kinds.scene_of(batch))
    for index, time in enumerate(planner.sampling_times()):
        steps = torch.full((2,), time), torch.full((2,), index)
        mean, logvar, _ = planner.p_mean_variance(chains[:, index], *steps, context, False)
        normal = torch.distributions.Normal(mean, torch.exp(0.5 * logvar).clamp(min=0.1))
        torch.testing.assert_close(
            found[:, index], normal.log_prob(chains[:, index + 1]), rtol=1e-4, atol=1e-4
        )


def logged_reward(mask) -> float:
    """Of a step over two scenes whose rewards are 0 and 1; compiles nothing."""
    step = object.__new__(grpo.GrpoStep)
    step._options, step._discount = grpo.GrpoOptions(), np.ones(5, np.float32)
    rewards = np.repeat([[0.0], [1.0]], 3, axis=1)
    step.sampled = lambda state, batch: (None, None, rewards)  # type: ignore[method-assign]
    step.step = lambda state, batch: (state, {})  # type: ignore[assignment]
    state: Any = None
    return step(state, {"sample_mask": mask} if mask is not None else {})[1]["reward"]


def test_scenes_that_fill_up_a_batch_do_not_count_in_the_reward():
    assert logged_reward(None) == 0.5
    assert logged_reward(jax.numpy.array([True, True])) == 0.5
    assert logged_reward(jax.numpy.array([True, False])) == 0.0


def gradient(planner, batch, chains, reference, rewards):
    """The loss of reinforcement of a step, its parts, and the norm of its gradients, by torch."""
    given = {
        **batch,
        "chains": torch.from_numpy(np.array(chains)),
        "reference_chains": torch.from_numpy(np.array(reference)),
        "advantages": torch.from_numpy(grpo.advantages(rewards)),
        "discount": (0.6 ** torch.arange(4.0, -1, -1)).repeat(len(rewards), 1),
        "bc": torch.full((len(rewards),), 0.1),
    }
    planner.zero_grad()
    loss, parts = kinds.reinforced_loss(planner, given)
    loss.backward()
    trained = [p for p in planner.parameters() if p.requires_grad]
    return loss.item(), parts, torch.nn.utils.clip_grad_norm_(trained, 1.0).item()


def test_a_step_is_on_policy_and_its_update_is_that_of_torch():
    """The second step, at which the policy is no longer the reference."""
    planner = small_planner()
    train = dataclasses.replace(TRAIN, lr=0.05)
    options = grpo.GrpoOptions(train=train, samples=2, parts=1)
    batch = {**scenes(2), grpo.INDEX: torch.arange(2)}
    with RewardPool(SimpleScorer(), 0) as pool:
        step = grpo.make_grpo_step(planner, kinds.OURS, pool, ["a", "b"], options, 10)
        placed = step.place(batch)
        first = step.init()
        old = {name: np.array(value) for name, value in first.params.items()}
        state, _ = step(first, placed)
        new = {name: np.array(value) for name, value in state.params.items()}
        chains, reference, rewards = step.sampled(state, placed)
        np.testing.assert_array_equal(chains, step.sampled(state, placed)[0])
        key = jax.random.fold_in(state.key, state.step)
        scene = {n: placed[n] for n in ("last_hidden_state", "history_trajectory")}
        scene["status_feature"] = placed["status_feature"]

        def by(weights, fold, count):
            return step._sample(weights, jax.random.fold_in(key, fold), scene, count)[0]

        # By the new weights on policy; the reference by the old ones to the end.
        np.testing.assert_array_equal(chains, by(new, 0, 2))
        assert np.abs(chains - by(old, 0, 2)).max() > 0.01
        np.testing.assert_array_equal(reference, by(old, grpo._REFERENCE, 1))
        assert np.abs(reference - by(new, grpo._REFERENCE, 1)).max() > 0.01
        assert chains.shape == (2, 2, 6, 8, 3)
        ends = tpuport.to_torch(chains)[:, :, -1]
        assert ends.abs().max() <= 1
        assert not torch.equal(ends[:, 0], ends[:, 1])
        weights = {name: torch.from_numpy(value.copy()) for name, value in new.items()}
        planner.load_state_dict(weights, strict=False)
        loss, parts, norm = gradient(planner, scenes(2), chains, reference, rewards)
        state, metrics = step(state, placed)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-3, abs=1e-4)
    policy = parts["policy_loss"].item()
    assert float(metrics["policy_loss"]) == pytest.approx(policy, rel=1e-3, abs=1e-4)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert isinstance(next(iter(state.params.values())), jax.Array)


# Both programs run above, and test_several_hosts.py spreads a batch of scenes over devices.
@pytest.mark.slow
def test_a_mesh_leaves_the_numbers_as_they_are():
    """Each device has one scene: chains as without it, loss and gradient as torch has."""
    batch = {**scenes(8), grpo.INDEX: torch.arange(8)}
    found = []
    with RewardPool(SimpleScorer(), 0) as pool:
        for mesh in (None, {"data": -1}):
            options = grpo.GrpoOptions(train=dataclasses.replace(TRAIN, mesh=mesh), samples=2)
            planner = small_planner()
            step = grpo.make_grpo_step(planner, kinds.OURS, pool, list("abcdefgh"), options, 10)
            state, placed = step.init(), step.place(batch)
            found.append(step.sampled(state, placed))
        (chains, reference, rewards), (alone, *others) = found[1], found[0]
        assert len(placed["last_hidden_state"].sharding.device_set) == 8
        assert not placed["last_hidden_state"].sharding.is_fully_replicated
        np.testing.assert_allclose(chains, alone, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(reference, others[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(rewards, others[1], rtol=1e-3)
        loss, _, norm = gradient(planner, scenes(8), chains, reference, rewards)
        state, metrics = step(state, placed)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-3, abs=1e-4)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    assert len(next(iter(state.params.values())).sharding.device_set) == 8


def test_wrong_calls_say_what_is_expected(tmp_path, monkeypatch):
    planner = small_planner("flow")
    tpuport.save_checkpoint(tmp_path / "flow.safetensors", planner.state_dict())
    make_cache(tmp_path / "cache", count=2, tokens=4, width=12)
    with pytest.raises(UsageError, match=r"is a planner for flow, and likelihoods .* of ddim"):
        grpo.grpo(tmp_path / "cache", tmp_path / "flow.safetensors", tmp_path / "out")
    options = grpo.GrpoOptions(train=TRAIN, samples=1)
    with RewardPool(SimpleScorer(), 0) as pool:
        with pytest.raises(UsageError, match="samples=1: expected 2 or more"):
            grpo.make_grpo_step(planner, kinds.OURS, pool, [], options, 1)
        monkeypatch.setattr(jax, "process_count", lambda: 4)
        with pytest.raises(UsageError, match=r"for one process, which scores .* there are 4"):
            grpo.make_grpo_step(planner, kinds.OURS, pool, [], grpo.GrpoOptions(train=TRAIN), 1)
