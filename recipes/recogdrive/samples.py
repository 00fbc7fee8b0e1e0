"""Conversations of a meta file as arrays, and as the static batches of a training run."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from recipes.recogdrive.chats import (
    Encoded,
    Sample,
    Source,
    encode,
    read_lines,
    read_meta,
    read_sample,
)
from recipes.recogdrive.packing import (
    Bucket,
    LossReduction,
    PlannedBatch,
    fill_batch,
    plan_epoch,
)
from recipes.recogdrive.tiles import Tiling, cut, num_tiles, pixels, read_image
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file


@dataclass(frozen=True)
class Usable:
    """The samples of a data set that can be trained on, and their sizes.

    Attributes:
        indices: Indices of the samples.
        sizes: Tokens and tiles of each sample.
        left_out: Number of samples that were left out, by reason.
    """

    indices: list[int]
    sizes: list[tuple[int, int]]
    left_out: dict[str, int] = field(default_factory=dict)


class ChatData:
    """The samples of a meta file, by their index.

    Args:
        meta_path: The meta file.
        tokenizer: A tokenizer of transformers, with the added tokens.
        tiling: The way images are cut into tiles.
        tokens_per_tile: Number of tokens per tile.
        max_seq_length: Length at which a sample is cut off.

    Raises:
        UsageError: A file is missing or has another format, or the tokenizer lacks tokens.
    """

    def __init__(
        self,
        meta_path: str | Path,
        tokenizer: Any,
        tiling: Tiling,
        tokens_per_tile: int,
        max_seq_length: int,
    ) -> None:
        self.tokenizer, self.tiling = tokenizer, tiling
        self.tokens_per_tile, self.max_seq_length = tokens_per_tile, max_seq_length
        check_tokens(tokenizer)
        self._lines = [
            (source, number, line)
            for source in read_meta(meta_path)
            for number, line in read_lines(source)
        ]
        if not self._lines:
            raise UsageError(f"{meta_path}: its data sets have no lines")

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> Sample:
        """Read a sample from its line."""
        source, number, line = self._lines[index]
        return read_sample(line, number, source)

    def tiling_of(self, source: Source) -> Tiling:
        """Return the tiling of a data set's images, which may have its own maximum of tiles."""
        if source.max_dynamic_patch is None:
            return self.tiling
        return replace(self.tiling, max_dynamic_patch=source.max_dynamic_patch)

    def size(self, index: int) -> tuple[int, int] | str:
        """Return tokens and tiles of a sample, or the reason why it is left out.

        Images are fully decoded here, since a truncated one is not noticed before.
        """
        sample = self.read(index)
        tiling, counts = self.tiling_of(sample.source), []
        for path in sample.images:
            try:
                size = read_image(path).size
            except FileNotFoundError:
                return "an image is not there"
            except OSError:
                return "an image cannot be read"
            counts.append(num_tiles(size, tiling, len(sample.images)))
        encoded = self._encoded(sample, counts)
        if not encoded.is_whole:
            return "an image is cut off by --max_seq_length"
        return len(encoded.input_ids), sum(counts)

    def sample(self, index: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Return the arrays of a sample.

        Args:
            index: Index of the sample.
            seed: Random seed of the augmentation, if its data set has it.

        Returns:
            input_ids and labels int32 (length,), pixel_values float32 (tiles, 3, side, side).

        Raises:
            UsageError: An image is missing or cannot be read.
        """
        found = self.read(index)
        tiling, tiles, counts = self.tiling_of(found.source), [], []
        for path in found.images:
            try:
                image = read_image(path)
            except OSError as error:
                raise UsageError(
                    f"{found.where}: {error}. What to do: mend the image and run again, or leave"
                    " it out by --on_broken skip"
                ) from error
            some = cut(image, tiling, len(found.images))
            tiles += some
            counts.append(len(some))
        augment = np.random.default_rng((seed, index)) if found.source.data_augment else None
        values = pixels(tiles, tiling, augment) if tiles else np.zeros((0, *self.tile_shape), "f4")
        encoded = self._encoded(found, counts)
        return {
            "input_ids": encoded.input_ids,
            "labels": encoded.labels,
            "pixel_values": values,
        }

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Return the shape of a tile, (3, side, side)."""
        return 3, self.tiling.force_image_size, self.tiling.force_image_size

    def _encoded(self, sample: Sample, counts: Sequence[int]) -> Encoded:
        return encode(
            sample.turns,
            self.tokenizer,
            [self.tokens_per_tile * count for count in counts],
            max_seq_length=self.max_seq_length,
            where=sample.where,
        )

    def usable(
        self, kept_in: str | Path | None = None, on_broken: Literal["raise", "skip"] = "raise"
    ) -> Usable:
        """Return the samples that can be trained on, after reading each once with its images.

        Args:
            kept_in: Folder in which sizes are kept for the next run over the same lines and images.
            on_broken: What to do about a sample whose image is missing, unreadable or cut off.
                Upstream replaces it by another sample.

        Raises:
            UsageError: There is such a sample, or no other.
        """
        path = None if kept_in is None else Path(kept_in) / f"samples-{self.fingerprint()}.json"
        found = self._sizes(path)
        left_out = Counter(one for one in found if isinstance(one, str))
        if left_out and on_broken == "raise":
            index = next(i for i, one in enumerate(found) if isinstance(one, str))
            raise UsageError(
                f"{self.read(index).where}: {found[index]} ({sum(left_out.values())} such of"
                f" {len(found)} samples). What to do: correct the data or the length, or leave such"
                " samples out by --on_broken skip"
            )
        whole = [(i, (one[0], one[1])) for i, one in enumerate(found) if not isinstance(one, str)]
        if not whole:
            raise UsageError(f"no sample can be trained on: {dict(left_out)}")
        return Usable([i for i, _ in whole], [size for _, size in whole], dict(left_out))

    def _sizes(self, path: Path | None) -> list[tuple[int, int] | str]:
        """Return `size` of every sample, from the file `path` if its images are unchanged.

        The file does not keep samples that were left out, since an image may be repaired, or arrive
        later.
        """
        kept: list[Any] = [None] * len(self)
        if path is not None and path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
        found, new = [], []
        for index, one in enumerate(kept):
            if one is None or one["images"] != _states([name for name, *_ in one["images"]]):
                images = _states(map(str, self.read(index).images))
                size = self.size(index)
                one = None if isinstance(size, str) else {"size": size, "images": images}
            else:
                size = (one["size"][0], one["size"][1])
            found.append(size)
            new.append(one)
        if path is not None and new != kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_file(path) as temporary:
                temporary.write_text(json.dumps(new), encoding="utf-8")
        return found

    def fingerprint(self) -> str:
        """Return a digest of all that samples depend on, except for the images' pixels."""
        digest = hashlib.sha256()
        settings = [asdict(self.tiling), self.tokens_per_tile, self.max_seq_length]
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        digest.update(json.dumps([settings, vocabulary]).encode())
        for source, number, line in self._lines:
            digest.update(f"{source}{number}{line}".encode())
        return digest.hexdigest()[:16]


def _states(paths: Iterable[str]) -> list[list[Any]]:
    """Return path, modification time in ns and size of files, with None for a missing one."""
    states = []
    for path in paths:
        try:
            stat = Path(path).stat()
            states.append([path, stat.st_mtime_ns, stat.st_size])
        except OSError:
            states.append([path, None, None])
    return states


class PlannedChats(torch.utils.data.Dataset[dict[str, np.ndarray]]):
    """The batches of a complete run, by their index, the same for the same seed.

    Args:
        data: The samples.
        usable: The samples to use.
        buckets: Static sizes of rows.
        num_rows: Rows of a batch, over all processes.
        epochs: Number of epochs. A fraction is a part of the last epoch.
        pack: Whether rows have several samples.
        reduction: How labels are weighted.
        seed: Random seed of order and augmentation.
    """

    def __init__(
        self,
        data: ChatData,
        usable: Usable,
        buckets: Sequence[Bucket],
        *,
        num_rows: int,
        epochs: float = 1,
        pack: bool = True,
        reduction: LossReduction = "token",
        seed: int = 0,
    ) -> None:
        self.data, self.usable, self.num_rows = data, usable, num_rows
        self.reduction: LossReduction = reduction
        self.seed = seed
        self.plan: list[tuple[int, PlannedBatch]] = []
        left = epochs
        for epoch in range(int(np.ceil(epochs))):
            # SeedSequence, since seed + epoch would repeat the epochs of another run's seed.
            drawn = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
            planned = plan_epoch(usable.sizes, buckets, num_rows=num_rows, pack=pack, seed=drawn)
            planned = planned[: int(np.ceil(len(planned) * min(1.0, left)))]
            self.plan += [(drawn, one) for one in planned]
            left -= 1

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.part(index, slice(None))

    def part(self, index: int, rows: slice) -> dict[str, np.ndarray]:
        """Return some rows of a batch, without reading the images of the others."""
        seed, planned = self.plan[index]
        samples = [
            [self.data.sample(self.usable.indices[i], seed) for i in row]
            for row in planned.rows[rows]
        ]
        return fill_batch(
            samples, planned.bucket, tile_shape=self.data.tile_shape, reduction=self.reduction
        )

    def identity(self) -> dict[str, Any]:
        """Return what identifies this plan, as JSON values. A resumed run must have the same."""
        plan = [(drawn, one.bucket.length, one.bucket.tiles, one.rows) for drawn, one in self.plan]
        return {
            "data": self.data.fingerprint(),
            "samples": _digest(self.usable.indices),
            "batches": _digest(plan),
            "num_batches": len(plan),
            "seed": self.seed,
            "loss_reduction": self.reduction,
        }

    @property
    def filled(self) -> float:
        """Return the fraction of all tokens in all rows that is not padding."""
        used = sum(self.usable.sizes[i][0] for _, b in self.plan for row in b.rows for i in row)
        return used / sum(b.bucket.length * len(b.rows) for _, b in self.plan)


class PlannedRows(torch.utils.data.Dataset[dict[str, np.ndarray]]):
    """The rows of a run's batches, one batch after another. Each process reads its own.

    Args:
        planned: The batches.
    """

    def __init__(self, planned: PlannedChats) -> None:
        self.planned = planned

    def __len__(self) -> int:
        return len(self.planned) * self.planned.num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch, row = divmod(index, self.planned.num_rows)
        return {n: v[0] for n, v in self.planned.part(batch, slice(row, row + 1)).items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def check_tokens(tokenizer: Any) -> None:
    """Raise `UsageError` if one of the template's words is not a single token of a tokenizer."""
    for word in ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"):
        ids = tokenizer(word, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise UsageError(
                f"the tokenizer makes {len(ids)} tokens of {word}; expected one. What to do: give"
                " an InternVL or Qwen 2 tokenizer; --model_name_or_path has it next to the weights"
            )
