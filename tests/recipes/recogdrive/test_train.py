"""A run of stage 2 from a cache: its error falls, it goes on where it was, upstream's schedule."""

import json
from unittest import mock

import numpy as np
import pytest
import torch

import tpuport
from recipes.recogdrive import kinds
from recipes.recogdrive import planner as planners
from recipes.recogdrive.layouts import CacheDataset, datasets
from recipes.recogdrive.make_data import make_cache
from recipes.recogdrive.rewards import RewardPool
from recipes.recogdrive.sample import sample
from recipes.recogdrive.train import (
    TrainOptions,
    make_validation,
    run,
    train,
    warmup_cosine,
)
from recipes.recogdrive.validation import Validation
from recipes.recogdrive.weights import read_weights
from tests.recipes.recogdrive.runs import logged
from tests.recipes.recogdrive.small import CONFIG
from tpuport.foundation.errors import UsageError

OPTIONS = {
    "size": "tiny", "batch_size": 4, "epochs": 4, "lr": 3e-3, "ema_decay": 0.9,
    "save_every": 3, "evaluate_every": 100, "log_every": 1, "progress": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _smaller(monkeypatch):
    monkeypatch.setitem(planners.SIZES, "tiny", CONFIG)


def test_the_rate_is_upstreams_by_epoch():
    rate = warmup_cosine(1e-4, 1e-6, 3, 200, 10)
    assert float(rate(0)) == float(rate(9)) == pytest.approx(1e-4 / 3)
    assert float(rate(29)) == pytest.approx(1e-4)
    assert float(rate(1015)) == pytest.approx(
        1e-6 + 0.5 * 99e-6 * (1 + np.cos(np.pi * 98 / 197)), rel=1e-4
    )
    assert float(warmup_cosine(1e-4, 0.0, 0, 10, 5)(0)) == pytest.approx(1e-4)


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path):
    """Seven steps of six samples: two batches an epoch, the second filled up."""
    cache = tmp_path / "cache"
    make_cache(cache, count=6, tokens=4, width=12)
    whole = train(cache, tmp_path / "whole", TrainOptions(**OPTIONS, steps=7))
    train(cache, tmp_path / "parts", TrainOptions(**OPTIONS, steps=4))
    resumed = train(cache, tmp_path / "parts", TrainOptions(**OPTIONS, steps=7))
    assert resumed == whole
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    files = [tmp_path / run / "planner.safetensors" for run in ("whole", "parts")]
    one, other = map(read_weights, files)
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    found = sample(cache, files[0], tmp_path / "out" / "found.json")
    assert found["verified"]
    written = json.loads((tmp_path / "out" / "found.json").read_text())
    assert len(written["trajectories"]) == found["scenes"] == 6
    assert written["l1"] == pytest.approx(found["l1"])


def test_upstreams_ddpm_is_refused_as_it_cannot_be_trained(tmp_path):
    with pytest.raises(UsageError, match=r"sampler='ddpm' does not train with upstream's planner"):
        train(tmp_path, tmp_path, TrainOptions(**OPTIONS, sampler="ddpm"), checkout=tmp_path)


def test_a_validation_is_over_evenly_spaced_samples(tmp_path):
    make_cache(tmp_path, count=10, tokens=4, width=12)
    dataset = CacheDataset(tmp_path)
    batches = list(Validation(dataset, 3, "sampled", ema=False, count=4).batches())
    assert [count for _, count in batches] == [3, 1]
    found = torch.cat([batch["trajectory"][:count] for batch, count in batches])
    expected = torch.stack([dataset[i]["trajectory"] for i in (0, 2, 5, 7)])
    assert torch.equal(found, expected)
    for count in (None, 99):
        every = Validation(dataset, 3, "sampled", ema=False, count=count)
        assert every.indices == list(range(10))
    with pytest.raises(UsageError, match="val_samples=0: expected 1 or more"):
        Validation(dataset, 3, "sampled", ema=False, count=0)


def test_drives_to_validate_on_are_not_trained_on(tmp_path):
    make_cache(tmp_path, count=6, tokens=4, width=12)
    trained, validated = datasets(tmp_path, None, ["log-01"])
    assert {entry.log for entry in trained.entries} == {"log-00"}
    assert {entry.log for entry in validated.entries} == {"log-01"}
    options = TrainOptions(val_samples=2, batch_size=4, plots=True)
    made = make_validation(validated, kinds.OURS, options, tmp_path)
    assert made.indices == [0, 1]
    trained, validated = datasets(tmp_path, None, None)
    assert trained is validated


def test_rewards_of_a_validation_are_of_its_scenes(tmp_path):
    make_cache(tmp_path, count=4, tokens=4, width=12)
    dataset, scored = CacheDataset(tmp_path), []
    step = mock.Mock()
    step.load_state().sampled = lambda batch: tpuport.to_torch(batch["trajectory"])

    def score(token, trajectories, true):
        scored.append(token)
        return [1.0]

    with RewardPool(score, 0) as pool:
        validation = Validation(dataset, 2, "sampled", ema=False, count=2, pool=pool)
        assert validation(step, mock.Mock())["val_reward"] == 1.0
    assert scored == [dataset.tokens[0], dataset.tokens[2]]


@pytest.mark.parametrize("first", [False, True])
def test_a_run_validates_first_if_asked_to(tmp_path, monkeypatch, first):
    asked = []
    validation = mock.Mock(last={"val_l1": 1.0})
    validation.side_effect = lambda step, state: asked.append(0) or {"val_l1": 2.0}
    monkeypatch.setattr("recipes.recogdrive.train.fit", lambda step, *a, **k: asked.append(1))
    monkeypatch.setattr(tpuport, "save_checkpoint", lambda *a: None)
    options = TrainOptions(steps=1, validate_first=first)
    run(mock.Mock(), range(2), validation, options, tmp_path)  # type: ignore[arg-type]
    assert asked[: asked.index(1)] == [0] * first
