"""Saving is whole or not at all: killed, on a full disk, over old files."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.torch import save_file

import tpuport
from tpuport.foundation.errors import CheckpointError, UsageError

TARGETS = ("m.safetensors", "m.pt", "folder")


def run(code: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def values(path: Path) -> dict[str, float]:
    return {name: float(a[0]) for name, a in tpuport.load_checkpoint(path).items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


_KILLED = """
import os, sys
import numpy as np
import tpuport
from tpuport.weights import values

target, after = sys.argv[1], int(sys.argv[2])
real, count = values.Values.read, 0

def read(self, name):
    global count
    count += 1
    if count > after:
        print("half", flush=True)
        os.kill(os.getpid(), 9)
    return real(self, name)

values.Values.read = read
new = {n: np.full(50_000, 2, np.float32) for n in "abcd"}
tpuport.save_checkpoint(target, new, max_shard_size=300_000)
"""


# "m.safetensors" has the one file, the other of the two folders several.
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("m.safetensors", 3),
        pytest.param("m.pt", 3, marks=pytest.mark.slow),
        pytest.param("folder", 0, marks=pytest.mark.slow),
        ("folder", 3),
    ],
)
def test_a_process_killed_while_saving_leaves_the_old_files(tmp_path: Path, name: str, after: int):
    target = tmp_path / name
    old = {n: np.ones(50_000, np.float32) for n in "abcd"}
    tpuport.save_checkpoint(target, old, max_shard_size=300_000)
    before = files_of(tmp_path)
    process = run(_KILLED, target, after)
    out, errors = process.communicate()
    assert (out, process.returncode) == ("half\n", -signal.SIGKILL), errors
    assert {n: b for n, b in files_of(tmp_path).items() if ".tmp-" not in n} == before
    assert values(target) == dict.fromkeys("abcd", 1.0)


_LIMITED = """
import resource, sys
import numpy as np
import tpuport
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for target in sys.argv[1:]:
    try:
        tpuport.save_checkpoint(target, {n: np.full(50_000, 2, np.float32) for n in "abcd"})
    except tpuport.TpuportError as error:
        print(type(error).__name__, error)
"""


def test_a_full_disk_is_said_and_the_old_files_are_kept(tmp_path: Path):
    targets = [tmp_path / name for name in TARGETS]
    for target in targets:
        tpuport.save_checkpoint(target, {n: np.ones(50_000, np.float32) for n in "abcd"})
    before = files_of(tmp_path)
    out, errors = run(_LIMITED, *targets).communicate()
    assert len(out.splitlines()) == len(targets), errors
    for target, line in zip(targets, out.splitlines(), strict=True):
        assert line.startswith(f"CheckpointError {target} was not saved: the disk is full")
        assert "the old one is as it was" in line
    assert files_of(tmp_path) == before


def test_a_target_that_cannot_be_written_is_said(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"a\.pt was not saved: .*nothing was left there"):
        tpuport.save_checkpoint(tmp_path / "none" / "a.pt", {"a": np.ones(2)})
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"end the name in \.safetensors or \.pt"):
        tpuport.save_checkpoint(tmp_path / "file", {"a": np.ones(2)})


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path):
    save_file(
        {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int8)}, tmp_path / "a.safetensors"
    )
    new = {"a": jnp.ones(2), "b": jnp.array([1, 1000])}
    with pytest.raises(CheckpointError, match=r"'b' has values between 1 and 1000, .*torch\.int8"):
        tpuport.save_checkpoint(tmp_path / "b.safetensors", new, like=tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_saving_over_what_was_loaded(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(3), "b": torch.zeros(3)}, path, metadata={"step": "1"})
    loaded = tpuport.load_checkpoint(path, dtype="float16")
    tpuport.save_checkpoint(path, {**loaded, "b": loaded["b"] + 1}, like=path)
    assert values(path) == {"a": 1.0, "b": 1.0}
    assert tpuport.open_checkpoint(path).metadata == {"step": "1"}


# Directories.


def test_a_directory_is_written_as_save_pretrained_does(tmp_path: Path):
    arrays = {f"l{i}": jnp.full((100,), i, jnp.float32) for i in range(5)}
    tpuport.save_checkpoint(tmp_path / "m", arrays, max_shard_size="1KB")
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "m")) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert index["weight_map"]["l4"] == names[2]
    assert values(tmp_path / "m") == {f"l{i}": i for i in range(5)}


def test_old_weights_of_a_directory_go_and_other_files_stay(tmp_path: Path):
    folder = tmp_path / "m"
    arrays = {f"l{i}": np.ones(100, np.float32) for i in range(5)}
    tpuport.save_checkpoint(folder, arrays, max_shard_size=1000)
    (folder / "optimizer.pt").write_bytes(b"o")
    (folder / "model.fp16.safetensors").write_bytes(b"v")
    (folder / "runs").mkdir()
    (folder / "runs" / "log").write_bytes(b"l")
    tpuport.save_checkpoint(folder, arrays)
    assert sorted(files_of(folder)) == [
        "model.fp16.safetensors",
        "model.safetensors",
        "optimizer.pt",
        "runs/log",
    ]
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_sharded_round_trip_has_the_same_files(tmp_path: Path, suffix: str):
    folder = tmp_path / "a"
    folder.mkdir()
    parts = {"x-1": {"b": torch.ones(3), "a": torch.zeros(2).half()}, "x-2": {"c": torch.ones(1)}}
    for name, tensors in parts.items():
        if suffix == ".bin":
            torch.save(tensors, folder / f"{name}{suffix}")
        else:
            save_file(tensors, folder / f"{name}{suffix}", metadata={"part": name})
    stem = "pytorch_model" if suffix == ".bin" else "model"
    weight_map = {n: f"{part}{suffix}" for part, tensors in parts.items() for n in tensors}
    index = f"{stem}{suffix}.index.json"
    (folder / index).write_text(json.dumps({"weight_map": weight_map, "metadata": {"by": "x"}}))
    (folder / "config.json").write_text("{}")
    loaded = tpuport.load_checkpoint(folder, dtype="bfloat16")
    tpuport.save_checkpoint(tmp_path / "b", loaded, like=folder)
    before, after = files_of(folder), files_of(tmp_path / "b")
    assert before.keys() == after.keys()
    if suffix == ".safetensors":
        assert before == after
    else:
        assert before[index] == after[index]
        again = torch.load(tmp_path / "b" / "x-1.bin", weights_only=True)
        assert torch.equal(again["a"], parts["x-1"]["a"])


def test_a_changed_shape_keeps_the_shards(tmp_path: Path):
    arrays = {f"l{i}": np.ones(100, np.float32) for i in range(5)}
    tpuport.save_checkpoint(tmp_path / "a", arrays, max_shard_size=1000)
    grown = {**arrays, "l0": np.ones(150, np.float32)}
    tpuport.save_checkpoint(tmp_path / "b", grown, like=tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "b")) == sorted(os.listdir(tmp_path / "a"))
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2200
    assert tpuport.open_checkpoint(tmp_path / "b")["l0"].shape == (150,)


@pytest.mark.parametrize(
    ("arrays", "options", "match"),
    [
        ({"a": np.ones(2)}, {}, "has other names than the weights: b .*not among the weights"),
        ({"a": np.ones(2), "b": np.ones(2), "c": np.ones(1)}, {}, "c .*not in like"),
        ({"a": np.ones(2, np.int32), "b": np.ones(2)}, {}, "'a' is torch.int32 and torch.float32"),
        ({"a": np.ones(2), "b": np.ones(2)}, {"max_shard_size": "5XB"}, "'5XB' is not a size"),
        ({"a": np.ones(2), "b": np.ones(2)}, {"metadata": {"a": 1}}, "strings by strings"),
    ],
)
def test_what_does_not_fit_like_is_refused(tmp_path: Path, arrays, options, match: str):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, path)
    with pytest.raises(UsageError, match=match):
        tpuport.save_checkpoint(tmp_path / "b.safetensors", arrays, like=path, **options)


def test_what_is_no_tensor_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"'a' is a list, expected a torch\.Tensor"):
        tpuport.save_checkpoint(tmp_path / "b.pt", {"a": [1, 2]})


def test_two_processes_saving_at_once_leave_one_of_both(tmp_path: Path):
    code = """
        import sys
        import numpy as np
        import tpuport
        for _ in range(20):
            new = {n: np.full(5_000, float(sys.argv[2]), np.float32) for n in "abcd"}
            tpuport.save_checkpoint(sys.argv[1], new, max_shard_size=30_000)
    """
    target = tmp_path / "m"
    tpuport.save_checkpoint(target, {n: np.full(5_000, 1, np.float32) for n in "abcd"})
    writers = [run(code, target, value) for value in (1, 2)]
    seen = set()
    while any(w.poll() is None for w in writers):
        seen.add(frozenset(values(target).values()))
        time.sleep(0.01)
    assert [w.communicate()[1] for w in writers] == ["", ""]
    assert seen <= {frozenset({1.0}), frozenset({2.0})}


def test_saving_keeps_no_copy_on_the_host(tmp_path: Path):
    mesh = jax.make_mesh((4,), ("x",))
    arrays = {"a": jax.device_put(np.ones(8), NamedSharding(mesh, PartitionSpec("x")))}
    tpuport.save_checkpoint(tmp_path / "a.safetensors", arrays)
    assert arrays["a"]._npy_value is None  # pyright: ignore[reportAttributeAccessIssue]
    np.asarray(arrays["a"])
    assert arrays["a"]._npy_value is not None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_type_that_torch_has_not_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="'a' is of <U1, which torch has no type for"):
        tpuport.save_checkpoint(tmp_path / "a.safetensors", {"a": np.array(["x"])})
