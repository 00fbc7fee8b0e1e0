"""Policies with integer weights: what is quantized, its errors, and serving it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tpuport
from recipes.openpi.dataset import Demonstrations, LeRobot
from recipes.openpi.inputs import Preparation, stacked
from recipes.openpi.policy import PolicyOptions, freeze_policy, load_policy
from recipes.openpi.quantize import SCHEMES, calibration_of, quantize_policy, read_quantized
from recipes.openpi.robots import robot_of
from recipes.openpi.statistics import read_stats
from recipes.openpi.tokens import read_prompts
from recipes.openpi.weights import read_weights
from tests.recipes.openpi.small import observation
from tpuport.foundation.errors import CheckpointError, UsageError


def calibration(made: Path, kind: str = "pi0"):
    policy = read_weights(made / kind)
    config, robot = policy.config, robot_of("libero")
    found = Demonstrations(LeRobot(made / "data"), robot, config.action_horizon)
    folder = made / kind
    preparation = Preparation(config, robot, read_stats(folder), read_prompts(folder, config))
    return policy, calibration_of(found, preparation, batches=1, batch_size=2)


@pytest.mark.parametrize("scheme", ["w8a8", pytest.param("w4a16", marks=pytest.mark.slow)])
def test_both_transformers_are_quantized_and_actions_stay_close(scheme: str, made: Path):
    policy, batches = calibration(made)
    made_ = quantize_policy(policy, scheme, batches, num_steps=1)
    layers = {name for name, module in made_.policy.named_modules() if hasattr(module, "codes")}
    assert len(layers) == 2 * 3 * 7  # two transformers of three layers
    assert all("language_model.layers" in name or "gemma_expert" in name for name in layers)
    batch, noise = batches[0]
    with torch.no_grad():
        wanted = policy.sample_actions(batch, noise, 2)
        found = made_.policy.sample_actions(batch, noise, 2)
    error = ((found - wanted).norm() / wanted.norm()).item()
    assert 0 < error < (0.05 if scheme == "w8a8" else 0.3)
    # The port with the loop computes what eager PyTorch of the integers does.
    ported = tpuport.convert(made_.policy, methods=("sample_actions",), verify=False)
    steps = torch.tensor(2, dtype=torch.int32)
    again = tpuport.to_torch(ported.sample_actions(batch, noise, steps))
    assert ((again - found).norm() / found.norm()).item() < 1e-2
    # The policy that was given is as it was.
    assert not any(hasattr(module, "codes") for module in policy.modules())


@pytest.mark.slow
def test_a_served_policy_may_be_quantized(made: Path):
    options = PolicyOptions(batch_sizes=(1,), num_steps=2, scheme="w8a8", data=made / "data")
    noise = np.random.default_rng(0).standard_normal((1, 4, 8), np.float32)
    quantized = load_policy(made / "pi05", options)
    plain = load_policy(made / "pi05", PolicyOptions(batch_sizes=(1,), num_steps=2))
    found, wanted = (one.act([one.prepare(observation())], noise)[0] for one in (quantized, plain))
    assert 0 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    assert quantized.metadata["scheme"] == "w8a8"
    with pytest.raises(UsageError, match="scheme='w2': expected one of w8a8"):
        load_policy(made / "pi0", PolicyOptions(scheme="w2", data=made / "data"))
    with pytest.raises(UsageError, match="--data"):
        PolicyOptions(scheme="w8a8")
    assert "duquant-w4a8" in SCHEMES


@pytest.fixture(scope="module")
def frozen(made: Path, tmp_path_factory: pytest.TempPathFactory):
    """A folder with a quantized policy, and the report of its quantization."""
    folder = tmp_path_factory.mktemp("quantized") / "frozen"
    options = PolicyOptions(scheme="duquant-w4a8", data=made / "data")
    return folder, freeze_policy(made / "pi0", options, folder, batches=1)


def test_a_frozen_policy_is_served_from_its_files(frozen):
    # A server that starts again has to read integers only: no data, and no float weights.
    folder, report = frozen
    served = load_policy(folder, PolicyOptions(batch_sizes=(1,), num_steps=2))
    assert served.metadata["scheme"] == "duquant-w4a8"
    again = read_quantized(folder)
    assert again is not None
    assert again.report == report
    assert 0 < report.outputs.relative < 0.5
    prepared = served.prepare(observation())
    noise = np.random.default_rng(0).standard_normal((1, 4, 8), np.float32)
    (found,) = served.act([prepared], noise)
    batch = stacked([prepared], served.config.max_token_len)
    with torch.no_grad():
        actions = again.policy.sample_actions(batch, torch.from_numpy(noise), 2)[0].numpy()
    wanted = served.preparation.actions_out(actions, prepared.raw_state)
    # An input that lies between two codes may become either in another order of sums.
    np.testing.assert_allclose(found, wanted, atol=1e-2 * np.abs(wanted).max())


def test_what_takes_no_frozen_policy_says_so(made: Path, frozen, tmp_path: Path):
    folder, data = frozen[0], made / "data"
    options = PolicyOptions(scheme="w8a8", data=data)
    for one in (options, PolicyOptions(bf16=True)):
        with pytest.raises(UsageError, match="quantized already: leave the scheme and bfloat16"):
            load_policy(folder, one)
    with pytest.raises(UsageError, match="quantized already, which only `serve` takes"):
        freeze_policy(folder, options, tmp_path / "twice")
    with pytest.raises(UsageError, match="is the folder of the float policy"):
        freeze_policy(made / "pi0", options, made / "pi0")
    with pytest.raises(UsageError, match="scheme='w8a8' and bf16"):
        PolicyOptions(scheme="w8a8", data=data, bf16=True)
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_policy(damaged, PolicyOptions())
