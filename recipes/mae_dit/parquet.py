"""Images in parquet files, as Hugging Face has them: a column of bytes, one of class numbers."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from recipes.packages import needed
from tpuport.foundation.errors import UsageError

# The names of a split on the hub, whose files are named NAME-00000-of-00003.parquet: the first of
# them that is there, as a set with images for validation has others without labels for a test.
_SPLITS = {"train": ("train",), "val": ("val", "validation", "valid", "dev", "test")}
# Row groups that a process keeps: writers of images put some hundred rows in each.
_GROUPS_KEPT = 8


def _parquet() -> Any:
    return needed("pyarrow.parquet", "images in parquet files", "pyarrow", "recipes")


@dataclass(frozen=True)
class TableEntry:
    """An image in a row of a parquet file.

    Attributes:
        path: The file.
        label: Number of its class.
        column: The column of images.
        group: Number of the row group.
        start: The row in that group.
    """

    path: Path
    label: int
    column: str
    group: int
    start: int

    def read(self) -> bytes:
        """Return the bytes of the image.

        Raises:
            ValueError: The row has none, but only a path, or the file is damaged.
        """
        content = _images(self.path, self.group, self.column)[self.start]
        if content is None:
            raise ValueError(f"row {self.start} of group {self.group} has no bytes of an image")
        return content


@lru_cache(_GROUPS_KEPT)
def _images(path: Path, group: int, column: str) -> list[bytes | None]:
    table = _parquet().ParquetFile(path).read_row_group(group, columns=[column])
    return [None if one is None else one["bytes"] for one in table.column(column).to_pylist()]


def files_of(root: Path, split: str | None) -> list[Path]:
    """Return the parquet files of a split, in a folder or in "data" below it.

    All files belong to it if none has the name of a split.

    Raises:
        UsageError: There are files of other splits only.
    """
    found = sorted(root.glob("*.parquet")) or sorted((root / "data").glob("*.parquet"))
    by_name: dict[str, list[Path]] = {}
    for path in found:
        by_name.setdefault(path.stem.partition("-")[0], []).append(path)
    if split is None or not by_name.keys() & {name for names in _SPLITS.values() for name in names}:
        return found
    wanted = _SPLITS.get(split, (split,))
    chosen = next((by_name[name] for name in wanted if name in by_name), None)
    if chosen is None:
        raise UsageError(
            f"{root}: no parquet file is of the split {split!r}: expected a name that begins with"
            f" {' or '.join(f'{name}-' for name in wanted)}, found {', '.join(sorted(by_name))}."
            " What to do: rename the files, or put those of the split in a folder of their own"
        )
    return chosen


def entries_of(path: Path) -> list[TableEntry]:
    """Return the images of a file.

    Raises:
        UsageError: It is damaged, or has not one column of images and one of class numbers.
    """
    try:
        file = _parquet().ParquetFile(path)
        image, label = _columns(path, file.schema_arrow)
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        labels = file.read(columns=[label]).column(label).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these classes
        raise UsageError(f"{path} is damaged: {error}. What to do: fetch it again") from error
    if None in labels:
        raise UsageError(f"{path}: row {labels.index(None)} has no {label}")
    places = ((group, row) for group, size in enumerate(sizes) for row in range(size))
    return [
        TableEntry(path, int(number), image, *place)
        for number, place in zip(labels, places, strict=True)
    ]


def _columns(path: Path, schema: Any) -> tuple[str, str]:
    """Return the columns of images and of class numbers: those that the file says, or by type."""
    arrow = needed("pyarrow", "images in parquet files", "pyarrow", "recipes")
    said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    kinds = {name: one.get("_type") for name, one in _features(said).items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    images = images or [
        field.name
        for field in schema
        if arrow.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
    ]
    labels = labels or [field.name for field in schema if arrow.types.is_integer(field.type)]
    for what, found in (("images", images), ("class numbers", labels)):
        if len(found) != 1:
            raise UsageError(
                f"{path}: expected one column of {what}, found {found or 'none'} among"
                f" {schema.names}. What to do: write a file with the columns image (bytes, path)"
                " and label"
            )
    return images[0], labels[0]


def _features(said: Any) -> dict[str, Any]:
    info = said.get("info") if isinstance(said, dict) else None
    features = info.get("features") if isinstance(info, dict) else None
    found = features if isinstance(features, dict) else {}
    return {name: one for name, one in found.items() if isinstance(one, dict)}


def write(path: Path, rows: list[tuple[str, int, bytes]], classes: tuple[str, ...]) -> None:
    """Write images with their names and class numbers, as the library `datasets` does.

    Args:
        path: The file.
        rows: A name, the number of the class and the content of each.
        classes: Their names.
    """
    arrow = needed("pyarrow", "images in parquet files", "pyarrow", "recipes")
    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(classes), "_type": "ClassLabel"},
    }
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    images = [{"bytes": content, "path": name} for name, _, content in rows]
    labels = [label for _, label, _ in rows]
    table = arrow.table(
        {"image": arrow.array(images, kind), "label": arrow.array(labels, arrow.int64())}
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    _parquet().write_table(table, path, row_group_size=32)
