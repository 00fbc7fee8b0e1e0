"""Interrupted commands keep what they finished; damaged files and full disks are one error."""

import io
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import tpuport
from recipes.mae_dit import generation
from recipes.mae_dit import make_data as making
from recipes.mae_dit.__main__ import app
from recipes.mae_dit.config import load
from recipes.mae_dit.data import batches, find
from recipes.mae_dit.evaluation.measuring import read_samples
from recipes.mae_dit.evaluation.statistics import read_reference
from recipes.mae_dit.generation import Sources
from recipes.mae_dit.make_data import make_data
from recipes.mae_dit.runs import Given
from recipes.mae_dit.stage2.sampling import Sampler
from recipes.mae_dit.statistics import LatentStatistics, read_statistics
from recipes.mae_dit.watching import write_curve, write_grid
from tests.full_disk import full_after
from tests.recipes.mae_dit.tiny import write
from tpuport.foundation.errors import CheckpointError, UsageError

FULL = "disk is full"


class Stop(BaseException):
    """Ends a command in the middle, as a signal does."""


def stopping(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """Return a function that ends the command at a call."""
    calls = iter(range(after))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Stop
        return function(*args, **kwargs)

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("layout", ["folder", "tar"])
def test_data_is_made_whole(tmp_path: Path, layout: Any, monkeypatch: Any):
    whole, out = tmp_path / "whole", tmp_path / "out"
    count = 70  # two shards
    made = make_data(whole, count=count, size=16, layout=layout)
    assert made == {"train": 70, "val": 17}
    with monkeypatch.context() as patch:
        patch.setattr(making, "replacing_file", stopping(making.replacing_file, 1))
        with pytest.raises(Stop):
            make_data(out, count=count, size=16, layout=layout)
    with full_after(400), pytest.raises(CheckpointError, match=FULL):
        make_data(out, count=count, size=16, layout=layout)
    assert all(contents(whole)[name] == content for name, content in contents(out).items())
    make_data(out, count=count, size=16, layout=layout)
    if layout == "folder":
        assert contents(out) == contents(whole)
    else:  # members have the time at which they were written
        assert [e.read() for e in find(out / "train")] == [e.read() for e in find(whole / "train")]
    with pytest.raises(UsageError, match="count was 70, is 71"):
        make_data(out, count=71, size=16, layout=layout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A configuration and a run of stage 1; what is compiled is kept."""
    folder = tmp_path_factory.mktemp("robust")
    write(folder)
    with tpuport.compile_cache(folder / "programs", min_compile_seconds=0.0):
        yield folder


def test_samples_are_drawn_once(folder: Path, tmp_path: Path, monkeypatch: Any):
    """A run that was ended goes on to the same bits, also with more samples."""

    def sample(out: Path, count: int = 10, seed: int = 0) -> dict[str, np.ndarray]:
        generation.sample(
            Given(folder / "stage2.yaml"),
            Sources(folder / "stage1"),
            None,
            out,
            count=count,
            seed=seed,
            say=lambda _: None,
            sampler="ddim",
        )
        with np.load(out / "samples.npz") as file:
            return {name: file[name] for name in file.files}

    whole, out = sample(tmp_path / "whole"), tmp_path / "out"
    batch = Sampler.batch
    monkeypatch.setattr(Sampler, "batch", stopping(batch, 1))
    with pytest.raises(Stop):
        sample(out)
    assert [path.name for path in (out / "parts").iterdir()] == ["000000.npz"]
    monkeypatch.setattr(Sampler, "batch", batch)
    with pytest.raises(UsageError, match="seed was 0, is 1"):
        sample(out, seed=1)
    with full_after(500), pytest.raises(CheckpointError, match=FULL):
        sample(out)
    (out / "parts" / "000000.npz").write_bytes(b"PK\3\4broken")
    with pytest.raises(CheckpointError, match=r"000000\.npz cannot be read.*delete it"):
        sample(out)
    (out / "parts" / "000000.npz").unlink()
    numbers: list[int] = []

    def counted(self: Sampler, number: int, *given: Any) -> np.ndarray:
        numbers.append(number)
        return batch(self, number, *given)

    monkeypatch.setattr(Sampler, "batch", stopping(counted, 2))
    with pytest.raises(Stop):
        sample(out)
    monkeypatch.setattr(Sampler, "batch", counted)
    found = sample(out, count=11)
    assert numbers == [0, 1, 2]
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name][:10], value)
    assert sorted(p.name for p in out.iterdir()) == ["grid.png", "record.json", "samples.npz"]


def test_files_are_written_whole_or_not_at_all(tmp_path: Path):
    pictures = np.zeros((9, 8, 8, 3), np.uint8)
    statistics = LatentStatistics(np.zeros((4, 9, 9)), np.ones((4, 9, 9)), 3)
    writers: dict[str, Callable[[Path], Any]] = {
        "grid.png": lambda path: write_grid(path, pictures),
        "stats.npz": statistics.save,
        "fid.svg": lambda path: write_curve(path, {1: 2.0, 2: 1.0}),
    }
    for name, save in writers.items():
        with full_after(50), pytest.raises(CheckpointError, match=f"{name} .*{FULL}|{FULL}"):
            save(tmp_path / name)
        assert not list(tmp_path.iterdir())
        save(tmp_path / name)
        (tmp_path / name).unlink()


def damaged(path: Path) -> Iterator[str]:
    """Damage a file of arrays in ways that Python's reader has errors of its own for."""
    content = path.read_bytes()
    head = content.index(b"PK\1\2")
    for what, offset, value in (
        ("compression", 10, 77),
        ("encrypted", 8, 1),
        ("version", 6, 99),
        ("patched", 8, 32),
    ):
        changed = bytearray(content)
        changed[head + offset] = value
        if what in ("encrypted", "patched"):
            changed[6] = value  # the file's own header has the flags as well
        path.write_bytes(bytes(changed))
        yield what
    for what, start in (("cut", len(content) // 2), ("empty", 0)):
        path.write_bytes(content[:start])
        yield what
    middle = len(content) // 3
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    yield "one bit"
    path.write_bytes(content)


def test_damaged_arrays_are_named(tmp_path: Path):
    path = tmp_path / "file.npz"
    readers: list[tuple[dict[str, Any], Callable[[Path], Any]]] = [
        ({"arr_0": np.zeros((3, 8, 8, 3), np.uint8)}, lambda p: list(read_samples(p, 4))),
        ({"mu": np.zeros(40), "sigma": np.eye(40)}, read_reference),
        ({"mean": np.zeros(80), "var": np.ones(80), "count": np.array(3)}, read_statistics),
    ]
    for arrays, read in readers:
        np.savez(path, **arrays)
        read(path)
        for what in damaged(path):
            with pytest.raises(CheckpointError, match=r"file\.npz cannot be read: .*What to do"):
                pytest.fail(f"{what}: {read(path)}")
        read(path)
    np.savez(path, mean=np.zeros(3), var=np.full(3, np.nan), count=np.array(3))
    with pytest.raises(CheckpointError, match="has no statistics of latents"):
        read_statistics(path)


def chunk(name: bytes, content: bytes) -> bytes:
    size, crc = (struct.pack(">I", value) for value in (len(content), zlib.crc32(name + content)))
    return size + name + content + crc


def test_images_of_any_damage_are_skipped(tmp_path: Path, file: Path):
    """One that says that it is huge, one that is cut, one that is no image, one of no bytes."""
    make_data(tmp_path / "data", count=8, size=20)
    paths = sorted((tmp_path / "data" / "train").rglob("*.JPEG"))
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))
    for path, content in zip(
        paths, (bomb, paths[1].read_bytes()[:300], b"text" * 50, b""), strict=False
    ):
        path.write_bytes(content)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given = list(batches(load(file), tmp_path / "data", split="train"))
    assert any("exceeds limit" in str(one.message) for one in said)
    assert len(said) == 4
    assert [int(one["valid"].sum()) for one in given] == [0, 4]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_but_damaged_images_is_an_error(folder: Path, tmp_path: Path):
    make_data(tmp_path / "data", count=4, size=20)
    for path in (tmp_path / "data").rglob("*.JPEG"):
        path.write_bytes(b"broken")
    given = [str(folder / "stage2.yaml"), "--data", str(tmp_path / "data")]
    run, out = ["--run", str(folder / "stage1")], ["-o", str(tmp_path / "out.npz")]
    done = CliRunner().invoke(app, ["reconstruct", *given, *run, *out])
    assert done.exit_code != 0
    assert "no image for validation can be decoded" in done.output
    done = CliRunner().invoke(app, ["stats", *given, *run, *out])
    assert done.exit_code != 0
    assert "no latent" in done.output
    assert not (tmp_path / "out.npz").exists()


def shard(path: Path, label: bytes) -> None:
    with tarfile.open(path, "w") as made:
        content = io.BytesIO()
        Image.new("RGB", (9, 9)).save(content, "JPEG")
        for name, part in (("a.jpg", content.getvalue()), ("a.cls", label)):
            member = tarfile.TarInfo(name)
            member.size = len(part)
            made.addfile(member, io.BytesIO(part))


def test_damaged_shards_and_configurations_are_named(tmp_path: Path):
    path = tmp_path / "000000.tar"
    shard(path, b"3")
    content = path.read_bytes()
    assert [entry.label for entry in find(tmp_path)] == [3]
    for length in (100, 700, 1500):  # in a header, in an image, in its label
        path.write_bytes(content[:length])
        with pytest.raises(UsageError, match=r"000000\.tar"):
            find(tmp_path)
    shard(path, b"cat")
    with pytest.raises(UsageError, match=r"000000\.tar is damaged.*cat"):
        find(tmp_path)
    config = tmp_path / "c.yaml"
    for text, error in (
        (b"\x80\x81", "cannot be read"),
        (b"a: [1", "is no YAML"),
        (b"a: !!python/object:os.system {}", "is no YAML"),
        (b"- 1", "expected sections by name"),
        (b"", "expected sections by name"),
    ):
        config.write_bytes(text)
        with pytest.raises(UsageError, match=error):
            load(config)
