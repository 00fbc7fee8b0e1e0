"""`tpuport.save_checkpoint`: arrays to files, if asked in the form of an existing checkpoint."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import flushed, replacing_file, replacing_folder
from tpuport.weights import torch_file
from tpuport.weights.checkpoint import Checkpoint, open_checkpoint
from tpuport.weights.locate import SAFETENSORS, TORCH, is_weights, locate
from tpuport.weights.read import OpenFile, raw_bytes, same_bits
from tpuport.weights.safetensors_file import (
    Header,
    in_library_order,
    make_header,
    read_header,
    write_file,
)
from tpuport.weights.values import HasWeights, Values, values_of

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_STEM = "model"


def save_checkpoint(
    path: str | Path,
    weights: Mapping[str, Any] | HasWeights,
    *,
    like: str | Path | Checkpoint | None = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write weights atomically, in the formats that PyTorch reads.

    Args:
        path: A `.safetensors` file, a torch file (`.pt`, `.pth`, `.bin`, `.ckpt`), or else a
            directory, written as `save_pretrained` does: one file of weights, or shards and their
            index. Other files in an existing directory stay.
        weights: Arrays or tensors by name, or a ported model (the entries of its `state_dict`).
        like: A checkpoint with the same names to imitate: dtypes, order, shards, metadata and what
            else it holds (configuration files of a directory, `extra` of a torch file). Weights
            equal to the result of loading it are saved as its bytes, so a round trip of untouched
            weights gives the same file, even if they were held in fewer bits.
        max_shard_size: The most bytes of one file in a directory, such as `"5GB"`, where `like`
            does not decide it.
        metadata: Strings for safetensors files; by default those of `like`.

    Raises:
        CheckpointError: the disk is full or a value does not fit; the old files are unchanged.
        UsageError: an argument does not fit.
    """
    target, limit = Path(path), _num_bytes(max_shard_size)
    opened = like if like is None or isinstance(like, Checkpoint) else open_checkpoint(like)
    values = values_of(weights, opened)
    strings = _strings(metadata, opened)
    if isinstance(weights, HasWeights):
        strings = {**strings, **weights._checkpoint_metadata()}
    names = list(values.source if opened is None else opened)
    if target.suffix in SAFETENSORS:
        header = _only(opened.headers) if opened else None
        with replacing_file(target) as temporary:
            _write_safetensors(temporary, values, names, header, strings)
    elif target.suffix in TORCH:
        file = _torch_file(opened, None)
        with replacing_file(target) as temporary:
            _write_torch(temporary, values, names, file, opened.key if opened else None)
    elif target.exists() and not target.is_dir():
        msg = (
            f"{target} is a file, and its name says no format; end the name in .safetensors or .pt"
        )
        raise UsageError(msg)
    else:
        _save_folder(target, values, names, limit, strings)


def _only(headers: Mapping[str, Header]) -> Header | None:
    return next(iter(headers.values())) if len(headers) == 1 else None


def _strings(metadata: Mapping[str, str] | None, like: Checkpoint | None) -> Mapping[str, str]:
    if metadata is None:
        # transformers refuses files without this entry.
        return like.metadata if like and like.format == "safetensors" else {"format": "pt"}
    if not all(isinstance(s, str) for pair in metadata.items() for s in pair):
        msg = f"metadata has to be strings by strings, got {dict(metadata)!r}"
        raise UsageError(msg)
    return metadata


def _num_bytes(size: int | str) -> int:
    if isinstance(size, int) and size > 0:
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", str(size), re.IGNORECASE)
    count = float(found[1]) * _UNITS[(found[2] or "").upper()] if found else 0
    if count < 1:
        msg = f"max_shard_size={size!r} is not a size; write a number of bytes or '5GB'"
        raise UsageError(msg)
    return int(count)


# -- one file --------------------------------------------------------------------------------------


def _write_safetensors(
    path: Path,
    values: Values,
    names: list[str],
    like: Header | None,
    metadata: Mapping[str, str],
) -> None:
    infos = values.infos(names)
    start: bytes | None = None
    if like is not None and like.metadata == dict(metadata):
        same = like.extents.keys() == infos.keys() and all(
            (e.shape, e.dtype) == (infos[name].shape, infos[name].dtype)
            for name, e in like.extents.items()
        )
        if same:
            start, names = like.raw, list(like.extents)
    if start is None:
        infos = in_library_order(infos)
        start, names = make_header(infos, metadata), list(infos)
    with flushed(path) as out:
        write_file(out, start, names, lambda name: raw_bytes(values.read(name)))
    read_header(OpenFile(path))


def _torch_file(like: Checkpoint | None, name: str | None) -> Path | None:
    """Return the torch file to imitate: the only one of `like`, or the one of this name."""
    if like is None or like.format != "torch":
        return None
    files = {file.name: file for file in like.located.files}
    if name is not None:
        return files.get(name)
    return next(iter(files.values())) if len(files) == 1 else None


def _write_torch(
    path: Path, values: Values, names: list[str], like: Path | None, key: str | None
) -> None:
    whole: Any = {}
    if like is not None:
        file = OpenFile(like)
        whole = torch_file.load_whole(file, mmap=file.read(0, 4) == b"PK\x03\x04")
    weights = torch_file.at_key(whole, key) if like is not None else whole
    made: dict[Any, torch.Tensor] = {}
    for name in names:
        # Tied weights share their storage in the file.
        same = (values.source.memory_of(name), values.dtypes[name])
        tensor = made[same] if same in made else values.read(name)
        old = weights.get(name)
        if old is not None and same_bits(old, tensor):
            continue
        made[same] = tensor
        weights[name] = _as_was(tensor, old)
    with flushed(path) as out:
        try:
            torch.save(whole, out)
        except RuntimeError as error:
            # torch's C++ writer hides the OSError of the file.
            raise _cause(error) or OSError(None, str(error).splitlines()[0]) from error


def _cause(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _as_was(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=old.requires_grad)
    return tensor


# -- a directory -----------------------------------------------------------------------------------


def _save_folder(
    target: Path, values: Values, names: list[str], limit: int, metadata: Mapping[str, str]
) -> None:
    like = values.like
    if like is None or not like.located.files:
        layout = _shards(values, names, limit, _stem_in(target))
    else:
        layout = {_file_name(like, name): held for name, held in like.names_in.items()}
    replaced = _replaced_by(next(iter(layout)))
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(target, lambda name: not replaced.fullmatch(name)) as temporary:
        _copy_others(like, temporary)
        for name, held in layout.items():
            if name.endswith(SAFETENSORS):
                header = _header(like, name)
                own = like is not None and header is not None and metadata == like.metadata
                strings = header.metadata if own and header else metadata
                _write_safetensors(temporary / name, values, held, header, strings)
            else:
                key = like.key if like else None
                _write_torch(temporary / name, values, held, _torch_file(like, name), key)
        index = _index(values, layout)
        if index is not None:
            with flushed(temporary / index[0]) as out:
                out.write(index[1])


def _header(like: Checkpoint | None, name: str) -> Header | None:
    return None if like is None else like.headers.get(name) or _only(like.headers)


def _shards(values: Values, names: list[str], limit: int, stem: str) -> dict[str, list[str]]:
    """Assign tensors to files in order, starting a new one when the limit would be passed."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in values.infos(names).items():
        if groups[-1] and size + info.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += info.nbytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    count = len(groups)
    return {f"{stem}-{i:05}-of-{count:05}.safetensors": g for i, g in enumerate(groups, 1)}


def _stem_in(target: Path) -> str:
    """Return the name of the weights in a directory, so that a save replaces them."""
    try:
        first = locate(target).files[0].name
    except CheckpointError:
        return _STEM  # a new directory, or one without weights
    stem = _without_number(first).removesuffix(".safetensors")
    return stem if first.endswith(SAFETENSORS) and "." not in stem else _STEM


def _file_name(like: Checkpoint, name: str) -> str:
    known = is_weights(name) and (like.located.index is not None or like.path.is_dir())
    return name if known or len(like.names_in) > 1 else f"{_STEM}.safetensors"


def _replaced_by(name: str) -> re.Pattern[str]:
    """Return a pattern of the files that weights of this name replace: file, shards and index."""
    base, _, suffix = _without_number(name).rpartition(".")
    shards = rf"{re.escape(base)}(-\d{{5}}-of-\d{{5}})?\.{re.escape(suffix)}"
    first, _, variant = base.partition(".")
    dotted = re.escape(f".{variant}") if variant else ""
    return re.compile(rf"{shards}|{re.escape(first)}\.{re.escape(suffix)}\.index{dotted}\.json")


def _copy_others(like: Checkpoint | None, folder: Path) -> None:
    """Copy the other files that a directory needs: configuration, tokenizer."""
    if like is None or not like.path.is_dir():
        return
    for file in sorted(like.located.files[0].parent.iterdir()):
        if file.is_file() and not is_weights(file.name) and not (folder / file.name).exists():
            with flushed(folder / file.name) as out:
                out.write(file.read_bytes())


def _index(values: Values, layout: Mapping[str, list[str]]) -> tuple[str, bytes] | None:
    """Return the name and text of the index; None for a single file without one."""
    like = values.like
    total = sum(info.nbytes for info in values.infos(values.source).values())
    index = like.located.index if like else None
    if like is not None and index is not None:
        if like.nbytes == total:
            return index.name, index.read_bytes()
        found = json.loads(index.read_text(encoding="utf-8"))
        found["metadata"] = {**(found.get("metadata") or {}), "total_size": total}
        name = index.name
    elif len(layout) == 1:
        return None
    else:
        weight_map = {name: file for file, names in layout.items() for name in names}
        found = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        name = f"{_without_number(next(iter(layout)))}.index.json"
    return name, (json.dumps(found, indent=2) + "\n").encode()


def _without_number(name: str) -> str:
    """Return the name of a shard without its number."""
    return re.sub(r"-\d{5}-of-\d{5}", "", name)
