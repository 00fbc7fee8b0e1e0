"""The files behind a path: one file, an index with its shards, or a directory of either."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tpuport.foundation.errors import CheckpointError
from tpuport.weights.safetensors_file import unique_json

SAFETENSORS = (".safetensors",)
TORCH = (".pt", ".pth", ".bin", ".ckpt")
# The file names of transformers and diffusers, stem and suffix, in the order of preference.
_NAMES = (
    ("model", ".safetensors"),
    ("diffusion_pytorch_model", ".safetensors"),
    ("pytorch_model", ".bin"),
    ("diffusion_pytorch_model", ".bin"),
)


@dataclass(frozen=True)
class Located:
    """The files of a checkpoint.

    Attributes:
        files: The files with weights.
        index: The index that names them.
        weight_map: The index's map from tensor name to file name.
    """

    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: dict[str, str] | None = None


def locate(path: str | Path, *, variant: str | None = None, subfolder: str = "") -> Located:
    """Find the files behind a path.

    Args:
        path: A file of weights, an index, or a directory as `save_pretrained` writes it.
        variant: The variant of a directory's weights, such as `"fp16"`.
        subfolder: The part of a directory, such as `"transformer"` of a diffusers pipeline.

    Raises:
        CheckpointError: there are none, or not as the index says.
    """
    root = Path(path)
    asked = root / subfolder if subfolder else root
    if not asked.exists() and (matching := _matching(asked)):
        return Located(matching)
    if not asked.exists():
        msg = (
            f"{asked} does not exist; a name on the Hugging Face hub has to be downloaded first"
            " (huggingface_hub.snapshot_download gives its directory)"
        )
        raise CheckpointError(msg)
    if asked.is_dir():
        shards = _rank_files(asked) if variant is None else ()
        if shards:
            return Located(shards)
        asked = _in_directory(asked, variant)
    elif variant is not None:
        msg = f"variant={variant!r} chooses among the files of a directory, and {asked} is a file"
        raise CheckpointError(msg)
    return _read_index(asked) if asked.name.endswith(".json") else Located((asked,))


def _matching(pattern: Path) -> tuple[Path, ...]:
    """Return the torch files that a pattern names."""
    if "*" not in pattern.name or not pattern.parent.is_dir():
        return ()
    return tuple(sorted(p for p in pattern.parent.glob(pattern.name) if p.suffix in TORCH))


def _rank_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a directory, if they differ in their numbers only: one for each rank."""
    if any((folder / name).exists() for name in _candidates(None)):
        return ()
    files = tuple(sorted(p for p in folder.iterdir() if p.suffix in TORCH))
    alike = {re.sub(r"\d+", "0", p.name) for p in files}
    return files if len(files) > 1 and len(alike) == 1 else ()


def is_weights(name: str) -> bool:
    """Return whether a file of this name holds weights or is an index of them."""
    return name.endswith((*SAFETENSORS, *TORCH)) or (".index." in name and name.endswith(".json"))


def _candidates(variant: str | None) -> Iterator[str]:
    dotted = f".{variant}" if variant else ""
    for stem, suffix in _NAMES:
        yield f"{stem}{dotted}{suffix}"
        yield f"{stem}{suffix}.index{dotted}.json"


def _in_directory(folder: Path, variant: str | None) -> Path:
    looked_for = list(_candidates(variant))
    for name in looked_for:
        if (folder / name).exists():
            return folder / name
    there = sorted(p.name for p in folder.iterdir())
    if variant is None:
        for suffixes in (SAFETENSORS, TORCH):
            single = [name for name in there if name.endswith(suffixes)]
            if len(single) == 1:
                return folder / single[0]
    weights = [name for name in there if is_weights(name)]
    parts = [p.name for p in sorted(folder.iterdir()) if p.is_dir() and _has_weights(p)]
    hint = ""
    if weights:
        hint = f"; it has {', '.join(weights[:8])}: pass the file that you mean"
    elif parts:
        hint = f"; subfolders with weights: {', '.join(parts)} (pass subfolder=)"
    elif there:
        hint = f"; it has {', '.join(there[:8])}"
    of = "" if variant is None else f" of the variant {variant!r}"
    msg = f"{folder} has no weights{of}: looked for {', '.join(looked_for)}{hint}"
    raise CheckpointError(msg)


def _has_weights(folder: Path) -> bool:
    return any(is_weights(p.name) for p in folder.iterdir())


def _read_index(path: Path) -> Located:
    found = unique_json(path.read_text(encoding="utf-8"), path)
    weight_map = found.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        msg = (
            f"{path} has no weight_map, so it is not an index of weights; pass the file or the"
            " directory of the weights"
        )
        raise CheckpointError(msg)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or file == "..":
            msg = (
                f"{path} says that {name!r} is in {file!r}, and only a file in the same directory"
                " is opened; the index may be damaged or hostile"
            )
            raise CheckpointError(msg)
    names = list(dict.fromkeys(weight_map.values()))
    kinds = {Path(name).suffix for name in names}
    if len(kinds) > 1 or not kinds <= {*SAFETENSORS, *TORCH}:
        msg = f"{path} names files of the kinds {', '.join(sorted(kinds))}, expected one kind"
        raise CheckpointError(msg)
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        msg = (
            f"{path} names {len(names)} files, and {len(missing)} of them are not there:"
            f" {', '.join(missing[:5])}; download them too"
        )
        raise CheckpointError(msg)
    return Located(tuple(path.parent / name for name in names), path, weight_map)
