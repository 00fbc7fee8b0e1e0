"""Images come from all layouts alike, and broken files are skipped and counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recipes.mae_dit.config import load
from recipes.mae_dit.data import batches, find, pictures, training_batches
from recipes.mae_dit.make_data import make_data
from tpuport.foundation.errors import UsageError


def made(folder: Path, layout: str) -> Path:
    make_data(folder, count=10, size=40, layout=layout)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("layout", ["folder", "tar", "parquet"])
def test_every_image_comes_once(tmp_path, file, layout):
    given = list(batches(load(file), made(tmp_path / "data", layout), split="train"))
    assert [one["image"].shape for one in given] == [(4, 3, 16, 16)] * 3
    valid = torch.cat([one["valid"] for one in given])
    assert valid.tolist() == [True] * 10 + [False] * 2
    labels = torch.cat([one["label"] for one in given])[valid]
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    images = torch.cat([one["image"] for one in given])[valid]
    assert 0 <= images.min() < 0.2 < 0.8 < images.max() <= 1


def test_layouts_have_the_same_images(tmp_path, file):
    found = [
        {
            int(one["image"].sum() * 100): int(one["label"])
            for one in pictures(load(file), made(tmp_path / layout, layout), "train", train=False)  # type: ignore[attr-defined]
        }
        for layout in ("folder", "tar", "parquet")
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["MAE", "DiT", "VAE", "weak", ""])
def test_crops_of_training(tmp_path, file, kind):
    config = load(file, [f"dataset.transforms.type=imagenet{kind}24x24"])
    found = pictures(config, made(tmp_path / "data", "folder"), "train", train=True)
    np.random.seed(0)
    several = torch.stack([found[0]["image"] for _ in range(6)])
    assert several.shape == (6, 3, 24, 24)
    different = len({float(one.sum()) for one in several.flip(-1)})
    flips = len({tuple(one[:, 3, 3].tolist()) for one in several})
    # The images are square: only these two kinds take all of one.
    assert flips == 2 if kind in ("DiT", "") else different > 2


def test_a_broken_file_is_skipped_and_counted(tmp_path, file):
    folder, config = made(tmp_path / "data", "folder"), load(file)
    broken = sorted((folder / "train").rglob("*.JPEG"))[2]
    broken.write_bytes(broken.read_bytes()[:100])
    found = pictures(config, folder, "train", train=True)
    with pytest.warns(UserWarning, match=broken.name):
        row = found[2]
    assert (bool(row["valid"]), int(row["skipped"])) == (True, 1)
    with pytest.warns(UserWarning, match=broken.name):
        given = list(batches(config, folder, split="train"))
    assert sum(int(one["valid"].sum()) for one in given) == 9


def test_batches_of_training(tmp_path, file):
    folder = made(tmp_path / "data", "tar")
    found = training_batches(load(file, ["experiment.accu_step=2"]), folder)
    assert len(found) == 1
    assert next(iter(found))["image"].shape == (8, 3, 16, 16)
    with pytest.raises(UsageError, match="less than one batch"):
        training_batches(load(file, ["experiment.batch_size=11"]), folder)


def test_what_is_damaged_is_named(tmp_path, file):
    folder = made(tmp_path / "data", "tar")
    shard = folder / "train" / "000000.tar"
    shard.write_bytes(b"no tar" * 200)
    with pytest.raises(UsageError, match=r"000000\.tar is damaged"):
        find(folder / "train")
    with pytest.raises(UsageError, match="neither tar shards, parquet files nor folders"):
        find(tmp_path / "none")
    with pytest.raises(UsageError, match="imagenetMAE256x256"):
        pictures(load(file, ["dataset.transforms.type=LSUN"]), folder, "val", train=True)
    with pytest.raises(UsageError, match="--data"):
        pictures(load(file), None, "val", train=True)


def test_splits_of_the_hub(tmp_path, file):
    folder = made(tmp_path / "data", "parquet")
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    for split, name in (("train", "train"), ("val", "validation")):
        (part,) = (folder / split).glob("*.parquet")
        part.rename(hub / part.name.replace(split, name, 1))
    # A test set without labels, which is not for validation.
    _table(hub / "test-00000-of-00001.parquet", image=[{"bytes": b"x"}], label=[-1])
    counts = [
        len(pictures(load(file), hub.parent, split, train=False)) for split in ("train", "val")
    ]
    assert counts == [10, 2]
    for path in hub.glob("[!t]*"):
        path.unlink()
    assert len(pictures(load(file), hub.parent, "val", train=False)) == 1
    (hub / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(UsageError, match=r"split 'val': expected a name .* found train\."):
        pictures(load(file), hub.parent, "val", train=False)


def _table(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_tables_by_others(tmp_path, file):
    (known,) = (made(tmp_path / "data", "parquet") / "val").glob("*.parquet")
    content = pq.read_table(known).column("image").to_pylist()[0]["bytes"]
    images = [{"bytes": content}, {"bytes": None}, {"bytes": content[:99]}, {"bytes": content}]
    _table(tmp_path / "own" / "a.parquet", picture=images, target=[3, 2, 1, 0], name=["x"] * 4)
    with pytest.warns(UserWarning, match=r"a\.parquet"):
        given = list(batches(load(file), tmp_path / "own"))
    assert given[0]["label"].tolist() == [3, 2, 1, 0]
    assert given[0]["valid"].tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"image": [{"bytes": b"x"}], "a": [1], "b": [2]}, r"class numbers, found \['a', 'b'\]"),
        ({"image": ["x.png"], "label": [1]}, "expected one column of images, found none"),
        ({"image": [{"bytes": b"x"}] * 2, "label": [1, None]}, "row 1 has no label"),
    ],
)
def test_tables_that_are_refused(tmp_path, columns, said):
    _table(tmp_path / "a.parquet", **columns)
    with pytest.raises(UsageError, match=said):
        find(tmp_path)


def test_a_damaged_table_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + b"x" * 200 + b"PAR1")
    with pytest.raises(UsageError, match=r"a\.parquet is damaged"):
        find(tmp_path)
