"""Cached hidden states on disk: upstream's gzip pickles, or one safetensors file per token.

    upstream     ROOT/LOG/TOKEN/internvl_feature.gz, ROOT/LOG/TOKEN/trajectory_target.gz
    safetensors  ROOT/LOG/TOKEN.safetensors

Features are `history_trajectory` (4, 3), `high_command_one_hot` (4,), `status_feature` (8,) and
`last_hidden_state` (tokens, width); the target is `trajectory` (8, 3): x, y in metres, heading in
radians, every half second.
"""

import gzip
import io
import json
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch._utils import _rebuild_tensor_v2
from torch.nn.utils.rnn import pad_sequence

from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import replacing_file, replacing_folder

Layout = Literal["upstream", "safetensors"]
Tensors = dict[str, torch.Tensor]

FEATURE_FILE, TARGET_FILE = "internvl_feature.gz", "trajectory_target.gz"
SUFFIX = ".safetensors"
_FEATURE, _TARGET = "features.", "targets."
# Metadata of a safetensors file: names of float32 tensors that are stored as bfloat16 without loss.
_WIDENED = "float32_as_bfloat16"
# Errors that gzip, pickle and torch raise on damaged or foreign bytes.
_DAMAGED = (
    *(OSError, EOFError, zlib.error, pickle.UnpicklingError, RuntimeError),
    *(ValueError, TypeError, LookupError, AttributeError),
)


@dataclass(frozen=True)
class Entry:
    """The location of one token's cache.

    Attributes:
        log: Drive of the token.
        token: Upstream's name of the sample.
        path: Folder (upstream's layout) or file (safetensors).
        layout: Layout of the entry.
    """

    log: str
    token: str
    path: Path
    layout: Layout


# -- reading ---------------------------------------------------------------------------------------


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler of dicts of torch tensors, which rejects everything else that a file names."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
            ("torch.storage", "_load_from_bytes"): _storage_of,
        }
        if (module, name) not in allowed:
            raise CheckpointError(
                f"{self._path} names {module}.{name}, and a cache holds tensors alone: it was not"
                " read. What to do: if it can be trusted, write it anew with write_token()"
            )
        return allowed[module, name]


def _storage_of(data: bytes) -> Any:
    """Load a tensor's storage safely.

    torch's own function for this unpickles arbitrary objects.
    """
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def read_pickle(path: Path) -> Tensors:
    """Read the tensors of one of upstream's files.

    Raises:
        CheckpointError: It is damaged, or is no dict of tensors.
    """
    try:
        with gzip.open(path, "rb") as file:
            found = _TensorUnpickler(io.BytesIO(file.read()), path).load()
    except CheckpointError:
        raise
    except _DAMAGED as error:
        raise CheckpointError(
            f"{path} was not read: {type(error).__name__}: {error}. What to do: delete it and cache"
            " the token again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise CheckpointError(f"{path} holds {type(found).__name__}, not a dict of tensors")
    return dict(found)


def read_entry(entry: Entry) -> tuple[Tensors, Tensors]:
    """Read the features and targets of one token.

    Raises:
        CheckpointError: A file is damaged.
    """
    if entry.layout == "upstream":
        return read_pickle(entry.path / FEATURE_FILE), read_pickle(entry.path / TARGET_FILE)
    features, targets = {}, {}
    try:
        with safetensors.safe_open(entry.path, framework="pt") as file:
            widened = json.loads((file.metadata() or {}).get(_WIDENED, "[]"))
            for name in file.keys():
                tensor = file.get_tensor(name)
                tensor = tensor.float() if name in widened else tensor
                if name.startswith(_FEATURE):
                    features[name.removeprefix(_FEATURE)] = tensor
                else:
                    targets[name.removeprefix(_TARGET)] = tensor
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{entry.path} was not read: {error}. What to do: delete it and cache the token again"
        ) from error
    return features, targets


# -- writing ---------------------------------------------------------------------------------------


def write_token(
    root: str | Path,
    log: str,
    token: str,
    features: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    layout: Layout = "upstream",
) -> Entry:
    """Write the cache of one token atomically, also if the process is killed.

    Args:
        root: Folder of the cache.
        log: Drive of the token.
        token: Name of the sample.
        features: Tensors by name, on any device and without a batch dim.
        targets: Tensors by name, likewise.
        layout: "upstream", which upstream's own loaders read; or "safetensors", which is read
            faster. In the latter a float32 tensor whose values are exact in bfloat16, as the hidden
            states of a bfloat16 model are, is stored in half the bytes without loss.

    Raises:
        UsageError: A name cannot be a file's, or there is no such layout.
        CheckpointError: The disk is full, or the file cannot be written.
    """
    for what, name in (("log", log), ("token", token)):
        if not name or Path(name).name != name or name.startswith("."):
            raise UsageError(f"{what}={name!r}: expected a name without slashes or leading dots")
    folder = Path(root) / log
    folder.mkdir(parents=True, exist_ok=True)
    parts = (_on_cpu(features), _on_cpu(targets))
    if layout == "upstream":
        path = folder / token
        files = dict(zip((FEATURE_FILE, TARGET_FILE), parts, strict=True))
        with replacing_folder(path, keep=lambda name: name not in files) as temporary:
            for name, tensors in files.items():
                with gzip.open(temporary / name, "wb", compresslevel=1) as file:
                    pickle.dump(tensors, file)
    elif layout == "safetensors":
        path = folder / f"{token}{SUFFIX}"
        with replacing_file(path) as temporary:
            _write_safetensors(temporary, *parts)
    else:
        raise UsageError(f"layout={layout!r}: expected 'upstream' or 'safetensors'")
    return Entry(log, token, path, layout)


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    # Copied, since pickling a view would write all of its storage.
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def _write_safetensors(path: Path, features: Tensors, targets: Tensors) -> None:
    tensors = {f"{_FEATURE}{name}": tensor for name, tensor in features.items()}
    tensors |= {f"{_TARGET}{name}": tensor for name, tensor in targets.items()}
    widened = []
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or not tensor.numel():
            continue
        half = tensor.bfloat16()
        # Compared as bits, since the sign of a zero and the payload of a NaN must be kept, too.
        if torch.equal(half.float().view(torch.int32), tensor.view(torch.int32)):
            tensors[name] = half
            widened.append(name)
    safetensors.torch.save_file(tensors, path, metadata={_WIDENED: json.dumps(widened)})


# -- the data set ----------------------------------------------------------------------------------


def find_entries(
    root: str | Path, layout: Layout | None = None, logs: Iterable[str] | None = None
) -> list[Entry]:
    """Return the complete tokens of a cache, sorted by log and token.

    Args:
        root: Folder of the cache.
        layout: Layout to look for; None for both (safetensors, if a token has both).
        logs: Drives to include; None for all.

    Raises:
        UsageError: There is no such folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise UsageError(f"{root} is no folder. What to do: write a cache there first")
    names = sorted(p.name for p in root.iterdir() if p.is_dir()) if logs is None else list(logs)
    entries = []
    for log in names:
        if not (root / log).is_dir():
            raise UsageError(f"{root} has no log {log!r}")
        found = {}
        for path in sorted((root / log).iterdir()):
            entry = None if path.name.startswith(".") else _entry_at(path, log)
            if entry is not None and layout in (None, entry.layout):
                if entry.layout == "safetensors" or entry.token not in found:
                    found[entry.token] = entry
        entries += [found[token] for token in sorted(found)]
    return entries


def _entry_at(path: Path, log: str) -> Entry | None:
    if path.suffix == SUFFIX:
        return Entry(log, path.stem, path, "safetensors")
    if (path / FEATURE_FILE).is_file() and (path / TARGET_FILE).is_file():
        return Entry(log, path.name, path, "upstream")
    return None


class CacheDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """The samples of a cache, each a dict of its features and targets, and its token.

    Poses in float64, as in real caches, become float32, as in upstream.

    Args:
        root: Folder of the cache.
        layout: "upstream", "safetensors", or None for either.
        logs: Drives to include; None for all.

    Raises:
        UsageError: There is no token.
    """

    def __init__(
        self,
        root: str | Path,
        layout: Layout | None = None,
        logs: Sequence[str] | None = None,
    ) -> None:
        self.entries = find_entries(root, layout, logs)
        if not self.entries:
            what = layout or "cached"
            raise UsageError(
                f"{root} has no {what} token: expected LOG/TOKEN/{FEATURE_FILE} with"
                f" {TARGET_FILE} next to it, or LOG/TOKEN{SUFFIX}. What to do: write them with"
                " python -m recipes.recogdrive cache, or make-data for a small set"
            )

    @property
    def tokens(self) -> list[str]:
        """Return the names of the samples, in order."""
        return [entry.token for entry in self.entries]

    @property
    def names(self) -> list[str]:
        """Return drive and name of the samples, in order."""
        return [f"{entry.log}/{entry.token}" for entry in self.entries]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self.entries[index]
        features, targets = read_entry(entry)
        tensors = {**features, **targets}
        doubles = {n: t.float() for n, t in tensors.items() if t.dtype == torch.float64}
        return {**tensors, **doubles, "token": entry.token}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate samples to a batch, with hidden states padded with zeros as in upstream.

    The planner attends to the zeros, too, so that a sample's result depends on the longest one in
    its batch. Upstream's caches have 2800 tokens each. The names of the tokens are left out.
    """
    batch = {
        name: torch.stack([sample[name] for sample in samples])
        for name in samples[0]
        if name not in ("last_hidden_state", "token")
    }
    states = [sample["last_hidden_state"] for sample in samples]
    return {**batch, "last_hidden_state": pad_sequence(states, batch_first=True)}


def collate_alike(dataset: CacheDataset) -> Callable[[Sequence[dict[str, Any]]], Any]:
    """Return a `collate` for processes that each read a part of a batch.

    A process does not know the lengths of the others' hidden states, and padding is attended to. So
    all must have the length of the first sample's.
    """
    return partial(_collated_alike, len(dataset[0]["last_hidden_state"]), dataset.names[0])


def _collated_alike(length: int, of: str, samples: Sequence[dict[str, Any]]) -> Any:
    for sample in samples:
        if len(sample["last_hidden_state"]) != length:
            raise UsageError(
                f"{sample['token']} has {len(sample['last_hidden_state'])} hidden states and {of}"
                f" {length}: several processes cannot pad a batch alike. What to do: cache all with"
                " one --max_length, or train by one process"
            )
    return collate(samples)


def datasets(
    cache: str | Path, logs: Sequence[str] | None, val_logs: Sequence[str] | None
) -> tuple[CacheDataset, CacheDataset]:
    """Return the data sets for training and validation, equal unless drives of either are given.

    Args:
        cache: Cache of either layout.
        logs: Drives to train on; by default all that are not for validation.
        val_logs: Drives to validate on; by default those of training.
    """
    if logs is None and val_logs is not None:
        every = {entry.log for entry in CacheDataset(cache).entries}
        logs = sorted(every - set(val_logs))
    dataset = CacheDataset(cache, logs=logs)
    return dataset, dataset if val_logs is None else CacheDataset(cache, logs=val_logs)
