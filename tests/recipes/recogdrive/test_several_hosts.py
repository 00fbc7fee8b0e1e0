"""A stage over eight devices, of one process or of two, comes to what it comes to on one device."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from recipes import hosts
from recipes.recogdrive import finetune, grpo, sample
from recipes.recogdrive import planner as planners
from recipes.recogdrive import train as stage2
from recipes.recogdrive.finetune import FinetuneOptions, plan_batches
from recipes.recogdrive.layouts import CacheDataset, collate_alike
from recipes.recogdrive.loading import save_chat_model
from recipes.recogdrive.make_data import make_cache
from recipes.recogdrive.planner import PlannerConfig
from recipes.recogdrive.samples import PlannedRows
from tests.recipes.recogdrive.chat_data import LENGTH, Small
from tests.recipes.recogdrive.runs import command, logged
from tests.training.processes import finish, start_two
from tpuport.foundation.errors import UsageError
from tpuport.sharding import fsdp

# Wide enough that the weights of attention and of the feed-forward layers are spread.
WIDE = PlannerConfig(heads=2, head_dim=64, layers=1, output_dim=128, state_width=12, hidden=128)
# The chat model of tests is so small that else its embeddings alone would be.
MIN_SIZE = 256
# The command with these sizes.
SCRIPT = f"""
import jax
from recipes.recogdrive import planner
from recipes.recogdrive.__main__ import app
from recipes.recogdrive.planner import PlannerConfig
from tpuport.sharding import fsdp

planner.SIZES["tiny"] = {WIDE!r}
fsdp.__kwdefaults__["min_size"] = {MIN_SIZE}
app(standalone_mode=False)
print(jax.process_count(), "processes,", jax.device_count(), "devices")
"""
JOINED = "2 processes, 8 devices"
# Of float32, whose sums over devices are of another order. Adam makes steps of one size of all
# gradients, so single weights with hardly any are further off: a tensor's norm says more.
LOSSES, WEIGHTS = 1e-5, 5e-5


def spread(made: Any) -> list[str]:
    """The parameters of a step of which a device holds a part."""
    params = made.ported.params.items()
    return [name for name, value in params if not value.sharding.is_fully_replicated]


def check_logs(one: Path, others: list[Path], names: tuple[str, ...]) -> None:
    """The same steps with the same numbers."""
    for other in others:  # by the first process alone
        lines = [len((out / "log.jsonl").read_text().splitlines()) for out in (one, other)]
        assert lines[0] == lines[1]
    for name in names:
        expected = logged(one, name)
        assert len(expected) > (0 if name.startswith("evaluate/") else 2)
        for other in others:
            found = logged(other, name)
            assert found.keys() == expected.keys()
            np.testing.assert_allclose(
                list(found.values()), list(expected.values()), rtol=LOSSES, err_msg=name
            )


def check_weights(one: Path, *others: Path) -> None:
    """The same weights: how far each tensor is off, relative to its norm."""
    expected = tpuport.open_checkpoint(one)
    for other in others:
        found = tpuport.open_checkpoint(other)
        assert set(found) == set(expected)
        for name in expected:
            value, other_value = expected.read(name).double(), found.read(name).double()
            kept = value.isfinite()  # eta_logit is infinite
            assert torch.equal(other_value[~kept], value[~kept]), name
            off = (other_value[kept] - value[kept]).norm()
            assert off <= WEIGHTS * value[kept].norm(), name


# -- stage 1 ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_chat_model_trains_over_devices_and_processes_as_on_one_device(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ten rows: the last batch of an epoch has six empty ones, all rows of one of the processes."""
    save_chat_model(small.thin().model, small.tokenizer, tmp_path / "model")
    made, begun = [], finetune.make_step

    def make_step(*given: Any, **more: Any) -> Any:
        made.append(begun(*given, **more))
        return made[-1]

    monkeypatch.setattr(finetune, "make_step", make_step)
    assert fsdp.__kwdefaults__ is not None
    monkeypatch.setitem(fsdp.__kwdefaults__, "min_size", MIN_SIZE)
    flags = f"""--model_name_or_path {tmp_path / "model"} --meta_path {small.folder / "meta.json"}
        --force_image_size 56 --max_dynamic_patch 1 --max_seq_length {LENGTH}
        --num_images_expected 2 --use_packed_ds False --num_train_epochs 1.5 --warmup_ratio 0
        --learning_rate 1e-3 --bf16 False --grad_checkpoint False"""
    given = ["finetune", *flags.split()]
    one, mesh, two = (tmp_path / name for name in ("one", "mesh", "two"))
    each = ("--per_device_train_batch_size", "1")
    started = start_two("-c", SCRIPT, *given, *each, "--output_dir", str(two))
    try:
        command(
            *given, "--per_device_train_batch_size", 8, "--fsdp_devices", 1, "--output_dir", one
        )
        command(*given, *each, "--fsdp_devices", 8, "--output_dir", mesh)
    finally:
        outputs = finish(started)
    assert all(JOINED in output for output in outputs)
    assert "the model is in" in outputs[0]
    assert "the model is in" not in outputs[1]
    assert len(spread(made[1])) > 5
    check_logs(one, [mesh, two], ("loss", "grad_norm", "num_labels"))
    check_weights(*(out / "model" for out in (one, mesh, two)))


def test_a_process_reads_the_images_of_its_own_rows(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = FinetuneOptions(
        *(str(small.folder / "model"), str(small.folder / "meta.json"), str(tmp_path)),
        force_image_size=56,
        max_dynamic_patch=4,
        max_seq_length=2 * LENGTH,
        row_lengths=[LENGTH],
    )
    planned = plan_batches(given, small.tokenizer, small.per_tile, num_rows=4)
    rows = PlannedRows(planned)
    assert len(rows) == 4 * len(planned)
    for number in range(len(planned)):
        made = [rows[4 * number + row] for row in range(4)]
        for name, value in planned[number].items():
            np.testing.assert_array_equal(np.stack([row[name] for row in made]), value)
    read, sample_of = [], type(planned.data).sample
    monkeypatch.setattr(
        type(planned.data), "sample", lambda self, i, *a: read.append(i) or sample_of(self, i, *a)
    )
    mine = [planned.usable.indices[i] for i in planned.plan[0][1].rows[1]]
    assert rows[1]["input_ids"].any()
    assert read == mine


# -- caching ---------------------------------------------------------------------------------------


# test_cache.py gives a process its scenes, training/test_hosts.py joins two.
@pytest.mark.slow
def test_two_processes_cache_what_one_does(small: Small, tmp_path: Path):
    """Each its own scenes, all of them together."""
    save_chat_model(small.thin().model, small.tokenizer, tmp_path / "model")
    flags = f"""--model_name_or_path {tmp_path / "model"} --scenes {small.folder / "scenes.jsonl"}
        --max_length 560 --max_dynamic_patch 1 --batch_size 2 --fp32 --no_verify
        --layout safetensors"""
    given = ["cache", *flags.split()]
    one, two = tmp_path / "one", tmp_path / "two"
    started = start_two("-m", "recipes.recogdrive", *given, "--cache_path", str(two))
    try:
        command(*given, "--cache_path", one)
    finally:
        outputs = finish(started)
    assert "5 scenes, 0 of them are there" in outputs[0]
    assert "5 written to" in outputs[0]
    assert "4 written to" in outputs[1]
    expected, found = CacheDataset(one), CacheDataset(two)
    assert found.names == expected.names
    assert len(found) == 9
    for index in range(9):
        other = found[index]
        for name, value in expected[index].items():
            if name != "token":
                torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-5)


# -- stage 2 ---------------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that trains a planner; of twelve samples an epoch's second batch is filled up."""
    monkeypatch.setitem(planners.SIZES, "tiny", WIDE)
    make_cache(tmp_path / "cache", count=12, tokens=4, width=12)
    flags = """--size tiny --batch-size 8 --epochs 2 --lr 1e-3 --warmup-epochs 0 --ema 0.5 --steps 3
        --val-samples 8 --log-every 1"""
    return ["train", str(tmp_path / "cache"), *flags.split()]


def check_planners(one: Path, other: Path) -> None:
    """The same training of a planner."""
    names = ("loss", "grad_norm", "evaluate/val_l1", "evaluate/val_displacement")
    check_logs(one, [other], names)
    check_weights(*(out / "planner.safetensors" for out in (one, other)))


def test_the_planner_trains_over_devices_as_on_one_device(
    planned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made, begun = [], stage2.make_step

    def make_step(*given: Any) -> Any:
        made.append(begun(*given))
        return made[-1]

    monkeypatch.setattr(stage2, "make_step", make_step)
    one, mesh = tmp_path / "one", tmp_path / "mesh"
    command(*planned, "--out", one)
    command(*planned, "--out", mesh, "--mesh", "fsdp=8")
    assert len(spread(made[1])) > 5
    check_planners(one, mesh)


# The sibling above trains over a mesh; training/test_hosts.py joins two processes.
@pytest.mark.slow
def test_the_planner_trains_over_processes_as_on_one_device(planned: list[str], tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    started = start_two("-c", SCRIPT, *planned, "--mesh", "fsdp=-1", "--out", str(two))
    try:
        command(*planned, "--out", one)
    finally:
        outputs = finish(started)
    assert all(JOINED in output for output in outputs)
    check_planners(one, two)


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture
def _two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one of two processes, with eight devices together."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)


@pytest.mark.usefixtures("_two")
def test_what_does_not_span_all_processes_is_refused(small: Small, tmp_path: Path):
    make_cache(tmp_path / "cache", count=2, tokens=4, width=12)
    with pytest.raises(UsageError, match=r"no mesh: there are 2 .* What to do: --mesh fsdp=-1"):
        stage2.train(tmp_path / "cache", tmp_path)
    for count in (1, 4):
        given = FinetuneOptions("m", "d", str(tmp_path), fsdp_devices=count)
        message = rf"--fsdp_devices {count}: there are 2 processes with 8 devices.*leave it out"
        with pytest.raises(UsageError, match=message):
            finetune.run(given)
    with pytest.raises(UsageError, match=r"sampling is for one process, .* there are 2. What"):
        sample.sample(tmp_path / "cache", tmp_path / "none", tmp_path / "found.json")
    with pytest.raises(UsageError, match=r"reinforcement is for one process, .* there are 2"):
        grpo.grpo(tmp_path / "cache", tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_two")
def test_processes_with_other_data_or_flags_are_refused(monkeypatch: pytest.MonkeyPatch):
    def gathered(mine: np.ndarray) -> np.ndarray:
        """What this process says and the other one, which was given other flags."""
        other = mine.copy()
        other[0] += 1
        return np.stack([mine, other])

    monkeypatch.setattr(hosts, "process_allgather", gathered)
    with pytest.raises(UsageError, match=r"^flags are not the same on all 2 processes. What to do"):
        hosts.check_same({"flags": {"a": 1}, "samples": ["x"]})
    monkeypatch.setattr(hosts, "process_allgather", lambda mine: np.stack([mine, mine]))
    hosts.check_same({"flags": {"a": 1}, "samples": ["x"]})


def test_hidden_states_of_other_lengths_are_refused_where_each_process_pads_its_own(tmp_path: Path):
    make_cache(tmp_path, count=2, tokens=4, width=12)
    dataset = CacheDataset(tmp_path)
    together, rows = collate_alike(dataset), [dataset[0], dataset[1]]
    assert together(rows)["last_hidden_state"].shape == (2, 4, 12)
    rows[1]["last_hidden_state"] = torch.zeros(5, 12)
    message = rf"{rows[1]['token']} has 5 hidden states and {dataset.names[0]} 4: several processes"
    with pytest.raises(UsageError, match=message):
        together(rows)
