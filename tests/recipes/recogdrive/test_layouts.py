"""Caches of hidden states: both layouts, whole or not at all, and no code from a file."""

import gzip
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from recipes.recogdrive import layouts
from tpuport.foundation.errors import CheckpointError, UsageError

LAYOUTS = ("upstream", "safetensors")


def sample(seed: int = 0, tokens: int = 6):
    torch.manual_seed(seed)
    features = {
        "history_trajectory": torch.randn(4, 3),
        "high_command_one_hot": torch.eye(4)[seed % 4],
        "status_feature": torch.randn(8),
        "last_hidden_state": torch.randn(tokens, 16).bfloat16().float(),
    }
    return features, {"trajectory": torch.randn(8, 3, dtype=torch.float64)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_comes_back_to_the_bit(tmp_path, layout):
    features, targets = sample()
    features["last_hidden_state"][0, :3] = torch.tensor([-0.0, float("nan"), float("inf")])
    features["view"] = torch.arange(12.0).reshape(3, 4)[:, 1]
    entry = layouts.write_token(tmp_path, "log", "token", features, targets, layout)
    for given, found in zip((features, targets), layouts.read_entry(entry), strict=True):
        assert found.keys() == given.keys()
        for name, tensor in given.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes(), name


def test_states_of_a_bfloat16_model_take_half_the_bytes(tmp_path):
    features, targets = sample(tokens=2000)
    size = layouts.write_token(tmp_path, "l", "a", features, targets, "safetensors").path.stat()
    features["last_hidden_state"] += 1e-6
    exact = layouts.write_token(tmp_path, "l", "b", features, targets, "safetensors").path.stat()
    assert 1.9 < exact.st_size / size.st_size < 2.0


def test_the_files_are_those_that_plain_pickle_reads(tmp_path):
    features, targets = sample()
    layouts.write_token(tmp_path, "log", "token", features, targets)
    with gzip.open(tmp_path / "log" / "token" / "internvl_feature.gz") as file:
        found = pickle.load(file)
    assert all(torch.equal(found[name], value) for name, value in features.items())
    with gzip.open(tmp_path / "log" / "token" / "trajectory_target.gz") as file:
        assert pickle.load(file)["trajectory"].dtype == torch.float64


@pytest.mark.parametrize(
    ("value", "named"),
    [(os.system, "posix.system"), (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear")],
)
def test_what_is_no_tensor_is_refused(tmp_path, value, named):
    entry = layouts.write_token(tmp_path, "log", "token", *sample())
    with gzip.open(entry.path / layouts.FEATURE_FILE, "wb") as file:
        pickle.dump({"last_hidden_state": value}, file)
    with pytest.raises(CheckpointError, match=rf"{named}, and a cache holds tensors alone"):
        layouts.read_entry(entry)


def test_code_within_a_tensor_is_refused(tmp_path):
    """`_load_from_bytes` of torch unpickles the bytes that it is given."""

    class Evil:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (pickle.dumps(Shell(), protocol=2),)

    class Shell:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    entry = layouts.write_token(tmp_path, "log", "token", *sample())
    with gzip.open(entry.path / layouts.FEATURE_FILE, "wb") as file:
        pickle.dump({"x": Evil()}, file)
    with pytest.raises(CheckpointError, match="was not read"):
        layouts.read_entry(entry)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_file_is_named(tmp_path, layout):
    entry = layouts.write_token(tmp_path, "log", "token", *sample(), layout)
    path = entry.path if layout == "safetensors" else entry.path / layouts.FEATURE_FILE
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=rf"{path.name} was not read: .*What to do: delete"):
        layouts.read_entry(entry)


def test_the_dataset_reads_either_layout_alike(tmp_path):
    for seed in range(4):
        for layout in LAYOUTS:
            root = tmp_path / layout
            layouts.write_token(root, f"log{seed % 2}", f"token{seed}", *sample(seed), layout)
    (tmp_path / "upstream" / "log0" / "half").mkdir()
    (tmp_path / "upstream" / "log0" / "half" / layouts.FEATURE_FILE).touch()
    (tmp_path / "safetensors" / "log0" / ".left.safetensors.tmp-1").touch()
    one, other = (layouts.CacheDataset(tmp_path / layout) for layout in LAYOUTS)
    assert one.tokens == other.tokens == ["token0", "token2", "token1", "token3"]
    for a, b in zip(one, other, strict=True):  # pyright: ignore[reportArgumentType]
        assert a.pop("token") == b.pop("token")
        assert a["trajectory"].dtype == torch.float32
        assert all(torch.equal(a[name], b[name]) for name in a | b)
    assert layouts.CacheDataset(tmp_path / "upstream", logs=["log1"]).tokens == ["token1", "token3"]


def test_a_batch_is_padded_at_its_end_with_zeros(tmp_path):
    for seed in range(2):
        layouts.write_token(tmp_path, "log", f"{seed}", *sample(seed, tokens=5 + seed))
    dataset = layouts.CacheDataset(tmp_path)
    batch = layouts.collate([dataset[0], dataset[1]])
    assert batch["last_hidden_state"].shape == (2, 6, 16)
    assert not batch["last_hidden_state"][0, 5].any()
    assert batch["trajectory"].shape == (2, 8, 3)
    assert "token" not in batch


def test_wrong_calls_say_what_is_expected(tmp_path):
    with pytest.raises(UsageError, match=r"is no folder\. What to do"):
        layouts.CacheDataset(tmp_path / "none")
    with pytest.raises(UsageError, match=r"has no cached token: expected LOG/TOKEN/internvl"):
        layouts.CacheDataset(tmp_path)
    with pytest.raises(UsageError, match="has no log 'x'"):
        layouts.CacheDataset(tmp_path, logs=["x"])
    with pytest.raises(UsageError, match="token='a/b': expected a name without slashes"):
        layouts.write_token(tmp_path, "log", "a/b", *sample())
    with pytest.raises(UsageError, match="layout='zip': expected 'upstream' or 'safetensors'"):
        layouts.write_token(tmp_path, "log", "a", *sample(), "zip")  # type: ignore[arg-type]


WRITE_FOREVER = """
    import sys, torch
    from recipes.recogdrive import layouts
    features = {"last_hidden_state": torch.zeros(200, 64), "number": torch.zeros(())}
    number = 0
    while True:
        number += 1
        features = {name: torch.full_like(t, number) for name, t in features.items()}
        targets = {"trajectory": torch.full((8, 3), float(number))}
        layouts.write_token(sys.argv[1], "log", "token", features, targets, sys.argv[2])
        print(number, flush=True)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_that_is_killed_leaves_one_whole_version(tmp_path, layout):
    command = [sys.executable, "-c", textwrap.dedent(WRITE_FOREVER), str(tmp_path), layout]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
    (sample,) = layouts.CacheDataset(tmp_path)  # pyright: ignore[reportGeneralTypeIssues]
    number = sample["number"].item()
    assert number >= written[-1]
    assert (sample["last_hidden_state"] == number).all()
    assert (sample["trajectory"] == number).all()
