"""Damaged, hostile and incomplete checkpoints: each refusal says what and where."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tpuport
from tpuport.foundation.errors import CheckpointError


class Runs:
    """A pickle of this would make the file named in the environment."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch $TPUPORT_HACKED",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("place", ["beside", "within"])
def test_a_pickle_that_runs_code_is_refused_by_name(
    tmp_path: Path, monkeypatch, zipped: bool, place: str
):
    mark = tmp_path / "hacked"
    monkeypatch.setenv("TPUPORT_HACKED", str(mark))
    path = tmp_path / "a.pt"
    weights = {"w": torch.ones(2)}
    held = {"state_dict": weights, "x": Runs()} if place == "beside" else {**weights, "x": Runs()}
    torch.save(held, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"would run posix\.system when it is loaded") as info:
        tpuport.load_checkpoint(path)
    assert "Save model.state_dict() instead" in str(info.value)
    assert not mark.exists()


def test_a_whole_pickled_model_is_refused(tmp_path: Path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear"):
        tpuport.open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"hello", pickle.dumps({"a": 1}, 2), b"\x00" * 64]
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes, suffix: str):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"a{suffix}"):
        tpuport.open_checkpoint(path)


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.99])
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".safetensors"])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: float, suffix: str):
    path = tmp_path / f"a{suffix}"
    tensors = {"a": torch.randn(400), "b": torch.randn(300)}
    if suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=suffix == ".pt")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(CheckpointError, match=r"is not an intact|is not a checkpoint"):
        tpuport.load_checkpoint(path)


def test_a_file_cut_after_it_was_opened_is_refused(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.randn(4000)}, path)
    opened = tpuport.open_checkpoint(path)
    os.truncate(path, 9000)
    with pytest.raises(CheckpointError, match="is truncated: it ends at byte 9000"):
        opened.read("a")


def test_a_file_replaced_after_it_was_opened_is_read_as_it_was(tmp_path: Path):
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    save_file({"a": torch.ones(4)}, other)
    opened = tpuport.open_checkpoint(path)
    os.replace(other, path)
    assert torch.equal(opened.read("a"), torch.zeros(4))


def test_a_storage_smaller_than_its_tensor_is_refused(tmp_path: Path):
    path, bad = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"w": torch.ones(100)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bad, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, content[:8] if "/data/" in entry.filename else content)
    with pytest.raises(CheckpointError, match=r"'w' needs 400 bytes of its storage, which has 8"):
        tpuport.load_checkpoint(bad)


def test_a_compressed_archive_is_read_by_torch(tmp_path: Path):
    path, packed = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"w": torch.arange(100.0)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    assert tpuport.load_checkpoint(packed)["w"].tolist() == list(range(100))


def test_conjugate_and_negative_views_have_their_values(tmp_path: Path):
    z = torch.randn(3, dtype=torch.complex64)
    negative = torch._neg_view(torch.ones(2))
    torch.save({"conj": z.conj(), "negative": negative}, tmp_path / "a.pt")
    loaded = tpuport.load_checkpoint(tmp_path / "a.pt")
    assert loaded["conj"].tolist() == z.conj().tolist()
    assert loaded["negative"].tolist() == [-1, -1]


def test_a_sparse_tensor_is_refused(tmp_path: Path):
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'w' in .* is torch.sparse_coo.*to_dense"):
        tpuport.load_checkpoint(tmp_path / "a.pt")


def write_header(path: Path, text: str, data: bytes) -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
    return path


def test_a_name_that_stands_twice_is_refused(tmp_path: Path):
    one = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    path = write_header(tmp_path / "a.safetensors", f"{{{one},{one}}}", b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"names 'a' twice|not an intact safetensors file"):
        tpuport.open_checkpoint(path)


def test_a_type_that_torch_has_not_is_refused(tmp_path: Path):
    text = '{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    path = write_header(tmp_path / "a.safetensors", text, b"\0")
    with pytest.raises(CheckpointError, match=r"'a' in .* has the dtype F4"):
        tpuport.open_checkpoint(path)


# Indices.


def shards(folder: Path, weight_map: object, **files: dict) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


A, B = {"a": torch.zeros(2)}, {"b": torch.ones(2)}


@pytest.mark.parametrize("of", ["index", "directory"])
def test_shards_are_one_checkpoint(tmp_path: Path, of: str):
    index = shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=A, two=B)
    loaded = tpuport.load_checkpoint(index if of == "index" else tmp_path)
    assert {n: a.tolist() for n, a in loaded.items()} == {"a": [0, 0], "b": [1, 1]}


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "one.safetensors", "b": "gone.safetensors"}, "1 of them are not there: gone"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "says that 'c' is in 'two.safetensors'"),
        ({"a": "one.safetensors"}, None),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "'a' is in 'two.safetensors', which"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' is in 'one.safetensors', which"),
        ({"a": "../../etc/passwd"}, r"only a file in the same directory is opened"),
        ({"a": "/etc/passwd"}, r"only a file in the same directory is opened"),
        ({"a": ".."}, r"only a file in the same directory is opened"),
        ({"a": "x\\y.safetensors"}, r"only a file in the same directory is opened"),
        ({"a": 3}, r"only a file in the same directory is opened"),
        ({"a": "one.safetensors", "b": "two.bin"}, r"the kinds .bin, .safetensors"),
        ({"a": "passwd"}, r"files of the kinds"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    tmp_path: Path, weight_map: object, match: str | None
):
    index = shards(tmp_path, weight_map, one=A, two=B)
    if match is None:
        assert list(tpuport.open_checkpoint(index)) == ["a"]
        return
    with pytest.raises(CheckpointError, match=match):
        tpuport.open_checkpoint(index)


def test_a_name_in_two_shards_is_refused(tmp_path: Path):
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    index = shards(tmp_path, weight_map, one=A, two={**B, "a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"'a' is in 'two.safetensors', and .* says in 'one"):
        tpuport.open_checkpoint(index)


def test_an_index_that_names_something_twice_is_refused(tmp_path: Path):
    index = shards(tmp_path, {}, one=A, two=B)
    index.write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(CheckpointError, match="names 'a' twice"):
        tpuport.open_checkpoint(index)


# Directories and keys.


def test_a_directory_without_weights_lists_what_was_looked_for(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError) as info:
        tpuport.open_checkpoint(tmp_path)
    for word in ("model.safetensors", "diffusion_pytorch_model.bin", "it has notes.txt"):
        assert word in str(info.value)
    with pytest.raises(CheckpointError, match=r"variant 'fp16': looked for model\.fp16\.safe"):
        tpuport.open_checkpoint(tmp_path, variant="fp16")


def test_a_name_on_the_hub_is_not_downloaded():
    with pytest.raises(CheckpointError, match=r"meta/llama does not exist; .*snapshot_download"):
        tpuport.open_checkpoint("meta/llama")


def test_a_directory_prefers_safetensors_and_knows_variants_and_subfolders(tmp_path: Path):
    folder = tmp_path / "unet"
    folder.mkdir()
    torch.save({"w": torch.zeros(1)}, folder / "diffusion_pytorch_model.bin")
    save_file({"w": torch.ones(1)}, folder / "diffusion_pytorch_model.safetensors")
    save_file({"w": torch.ones(1) * 2}, folder / "diffusion_pytorch_model.fp16.safetensors")
    load = tpuport.load_checkpoint
    assert load(tmp_path, subfolder="unet")["w"].item() == 1
    assert load(tmp_path, subfolder="unet", variant="fp16")["w"].item() == 2
    with pytest.raises(CheckpointError, match=r"subfolders with weights: unet \(pass subfolder=\)"):
        load(tmp_path)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
def test_weights_are_found_under_the_usual_keys(tmp_path: Path, key: str):
    torch.save({"epoch": 2, key: {"w": torch.ones(1), "n": 3}}, tmp_path / "a.pt")
    opened = tpuport.open_checkpoint(tmp_path / "a.pt")
    assert (list(opened), opened.key, opened.extra) == (["w"], key, {"epoch": 2})


def test_weights_elsewhere_need_their_key(tmp_path: Path):
    path = tmp_path / "a.pt"
    torch.save({"nets": {"ema": {"w": torch.ones(1)}, "step": 5}}, path)
    with pytest.raises(CheckpointError, match=r"holds a dict with 'nets', .* pass key="):
        tpuport.open_checkpoint(path)
    opened = tpuport.open_checkpoint(path, key="nets.ema")
    assert (list(opened), opened.extra) == (["w"], {"nets": {"step": 5}})
    with pytest.raises(CheckpointError, match="no tensors under key='nope'"):
        tpuport.open_checkpoint(path, key="nope")
    torch.save({"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.zeros(1)}}, path)
    with pytest.raises(CheckpointError, match="under 'state_dict' and 'model'; pass key="):
        tpuport.open_checkpoint(path)
