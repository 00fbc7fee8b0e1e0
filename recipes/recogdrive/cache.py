"""The frozen VLM's last hidden states of every scene, on disk for the planner.

Each token is written atomically, so that a run that was killed is resumed with the tokens that are
missing.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from recipes.recogdrive.chats import IMAGE, IMG_CONTEXT, IMG_END, IMG_START
from recipes.recogdrive.layouts import Layout, find_entries, write_token
from recipes.recogdrive.loading import load_chat_model, tile_of
from recipes.recogdrive.origin import check_origin
from recipes.recogdrive.scenes import SYSTEM_MESSAGE, Frame, read_scenes
from recipes.recogdrive.tiles import Tiling, cut, pad_tiles, pixels, read_image
from recipes.recogdrive.upstream_vlm import upstream_chat_model
from recipes.recogdrive.vlm import ChatModel
from tpuport.foundation.errors import UsageError
from tpuport.training import initialize

MAX_LENGTH = 2800  # the length to which upstream pads each prompt


@dataclass(frozen=True)
class Prompts:
    """A converter of scenes to the model's arguments, all of the same shapes.

    Attributes:
        tokenizer: A tokenizer of transformers.
        tiling: The way images are cut into tiles.
        tokens_per_tile: Number of tokens per tile.
        max_length: Length to which prompts are padded on the left.
    """

    tokenizer: Any
    tiling: Tiling
    tokens_per_tile: int
    max_length: int = MAX_LENGTH

    def arguments(self, scene: Frame) -> dict[str, np.ndarray]:
        """Return the arrays of one scene, without a batch dim.

        Returns:
            input_ids, segments, position_ids int32 (max_length,), pixel_values float32 (tiles, 3,
            side, side) and image_flags int32 (tiles,), padded to the tiling's bound of tiles.

        Raises:
            UsageError: The prompt is longer than `max_length`, or the image is missing.
        """
        try:
            image = read_image(scene.image)
        except OSError as error:
            raise UsageError(f"{scene.log}/{scene.token}: {error}") from error
        values = pixels(cut(image, self.tiling), self.tiling)
        ids = self.tokens(scene, len(values))
        if len(ids) > self.max_length:
            raise UsageError(
                f"{scene.log}/{scene.token}: {len(ids)} tokens, more than --max_length"
                f" {self.max_length}. What to do: raise it, or lower --max_dynamic_patch"
            )
        start = self.max_length - len(ids)
        place = np.arange(self.max_length) - start
        padded = np.zeros(self.max_length, np.int32)
        padded[:start] = self.tokenizer.pad_token_id
        padded[start:] = ids
        return {
            "input_ids": padded,
            "segments": (place >= 0).astype(np.int32),
            "position_ids": np.where(place >= 0, place, 1).astype(np.int32),
            **pad_tiles(values, self.tiling.bound, f"{scene.log}/{scene.token}"),
        }

    def tokens(self, scene: Frame, num_tiles: int) -> list[int]:
        """Return the tokens of a scene's prompt, up to the start of the model's answer."""
        image = IMG_START + IMG_CONTEXT * (self.tokens_per_tile * num_tiles) + IMG_END
        text = (
            f"<|im_start|>system\n{SYSTEM_MESSAGE}<|im_end|>\n"
            f"<|im_start|>user\n{scene.question()}<|im_end|>\n"
            "<|im_start|>assistant\n"
        ).replace(IMAGE, image, 1)
        return self.tokenizer(text, add_special_tokens=False).input_ids


def last_hidden_states(
    model: ChatModel,
    input_ids: torch.Tensor,
    pixel_values: torch.Tensor,
    image_flags: torch.Tensor,
    segments: torch.Tensor,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """Return the states to cache, (rows, length, width) in float32, NaN for rows that do not fit.

    Return the states to cache, (rows, length, width) in float32, NaN where a row does not fit.
    """
    hidden, fits = model.hidden_states(input_ids, pixel_values, image_flags, segments, position_ids)
    return torch.where(fits[:, None, None], hidden.float(), float("nan"))


def write_cache(
    compute: Callable[..., torch.Tensor],
    prompts: Prompts,
    scenes: Sequence[Frame],
    root: str | Path,
    *,
    batch_size: int = 8,
    layout: Layout = "upstream",
    num_threads: int = 8,
    on_batch: Callable[[int], None] | None = None,
) -> int:
    """Cache the scenes that are not in the cache yet.

    Threads read images and write tokens while the model computes.

    Args:
        compute: `last_hidden_states` of a ported model, called with keyword arguments.
        prompts: Converts scenes to its arguments.
        scenes: Scenes to cache.
        root: Folder of the cache.
        batch_size: Scenes at a time. The last batch is padded, so that there is one program.
        layout: "upstream" or "safetensors".
        num_threads: Number of threads that read and write.
        on_batch: Called after each batch with the number of tokens written so far.

    Returns:
        The number of tokens that were written.

    Raises:
        UsageError: An image is missing, or a prompt is too long.
        CheckpointError: A token cannot be written.
    """
    todo = missing_scenes(scenes, root, layout)
    done, writing = 0, []
    with ThreadPoolExecutor(num_threads) as pool:
        for some, arguments in _read_ahead(pool, prompts, todo, batch_size):
            hidden = tpuport.to_torch(compute(**arguments))
            for one in writing:
                one.result()
            writing = [
                pool.submit(_write, root, scene, hidden[row], layout)
                for row, scene in enumerate(some)
            ]
            done += len(some)
            if on_batch is not None:
                on_batch(done)
        for one in writing:
            one.result()
    return done


def missing_scenes(scenes: Sequence[Frame], root: str | Path, layout: Layout) -> list[Frame]:
    """Return the scenes that a cache lacks in a layout."""
    if not Path(root).is_dir():
        return list(scenes)
    there = {(entry.log, entry.token) for entry in find_entries(root, layout)}
    return [scene for scene in scenes if (scene.log, scene.token) not in there]


def _read_ahead(
    pool: ThreadPoolExecutor, prompts: Prompts, scenes: Sequence[Frame], batch_size: int
) -> Iterator[tuple[Sequence[Frame], dict[str, torch.Tensor]]]:
    """Yield batches with their scenes, while the next batch is read."""
    parts = [scenes[i : i + batch_size] for i in range(0, len(scenes), batch_size)]

    def begin(part: Sequence[Frame]) -> list[Future[dict[str, np.ndarray]]]:
        return [pool.submit(prompts.arguments, scene) for scene in part]

    ahead = begin(parts[0]) if parts else []
    for number, part in enumerate(parts):
        rows = [one.result() for one in ahead]
        ahead = begin(parts[number + 1]) if number + 1 < len(parts) else []
        rows += [rows[-1]] * (batch_size - len(rows))
        yield part, {n: torch.from_numpy(np.stack([r[n] for r in rows])) for n in rows[0]}


def _write(root: str | Path, scene: Frame, hidden: torch.Tensor, layout: Layout) -> None:
    if not hidden.isfinite().all():
        raise UsageError(
            f"{scene.log}/{scene.token}: its hidden states are not finite. What to do: check the"
            " weights, and that the tokenizer is theirs"
        )
    features = {**scene.features(), "last_hidden_state": hidden}
    write_token(root, scene.log, scene.token, features, scene.targets(), layout)


def shard_of(scenes: Sequence[Frame], shard: int, num_shards: int) -> list[Frame]:
    """Return the scenes that one of several processes caches, by their order.

    Raises:
        UsageError: There is no such process.
    """
    if not 0 <= shard < num_shards:
        raise UsageError(f"shard {shard} of {num_shards}: expected one from 0 up to their number")
    return list(scenes[shard::num_shards])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m recipes.recogdrive cache`."""
    add = parser.add_argument
    add(
        "--model_name_or_path",
        required=True,
        help="folder of the VLM: `model` in the output_dir of stage 1",
    )
    add("--scenes", required=True, help="JSONL file of scenes (recipes/recogdrive/scenes.py)")
    add("--cache_path", required=True, help="folder of the cache")
    add("--layout", default="upstream", choices=("upstream", "safetensors"))
    add("--batch_size", type=int, default=8, help="scenes per batch")
    add("--max_length", type=int, default=MAX_LENGTH, help="length to which prompts are padded")
    add(
        "--max_dynamic_patch",
        type=int,
        default=12,
        help="maximum number of tiles, without the thumbnail",
    )
    add("--fp32", action="store_true", help="compute in float32; upstream caches in bfloat16")
    add("--upstream", help="a checkout of recogdrive, to use its own model")
    add("--no_verify", action="store_true", help="do not compare a batch with eager PyTorch")
    add("--num_shards", type=int, help="number of processes that share the scenes")
    add("--shard", type=int, help="number of this process, from 0; needs --num_shards")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags of a command line."""
    parser = argparse.ArgumentParser("recipes.recogdrive cache", description=__doc__)
    add_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Cache all scenes, or resume after a kill."""
    run(parse(arguments))


def run(options: argparse.Namespace) -> int:
    """Run `main` with parsed flags, and return the number of tokens written."""
    shard, num_shards = _share(options)
    scenes = shard_of(read_scenes(options.scenes), shard, num_shards)
    check_origin(
        options.cache_path,
        options.model_name_or_path,
        max_length=options.max_length,
        max_dynamic_patch=options.max_dynamic_patch,
        dtype="float32" if options.fp32 else "bfloat16",
        upstream=options.upstream is not None,
    )
    todo = len(missing_scenes(scenes, options.cache_path, options.layout))
    _say(f"{len(scenes)} scenes, {len(scenes) - todo} of them are there")
    model, tokenizer = load_chat_model(options.model_name_or_path)
    side, per_tile = tile_of(model)
    tiling = Tiling(side, max_dynamic_patch=options.max_dynamic_patch)
    with contextlib.ExitStack() as stack:
        if options.upstream is not None:
            model = stack.enter_context(upstream_chat_model(options.upstream))(model)
        written = write_cache(
            ported_states(model, bf16=not options.fp32, verify=not options.no_verify),
            Prompts(tokenizer, tiling, per_tile, options.max_length),
            scenes,
            options.cache_path,
            batch_size=options.batch_size,
            layout=options.layout,
            on_batch=lambda done: _say(f"{done} of {todo} written"),
        )
    _say(f"{written} written to {options.cache_path}")
    return written


def _share(options: argparse.Namespace) -> tuple[int, int]:
    """Return the number of this process and their count, from flags or the distributed run."""
    if (options.shard is None) != (options.num_shards is None):
        there, missing = ("shard", "num_shards")[:: 1 if options.num_shards is None else -1]
        raise UsageError(
            f"--{there} without --{missing}. What to do: give each process both, or none for one"
            " process or those of torchrun, Slurm or a TPU slice"
        )
    if options.shard is not None:
        return options.shard, options.num_shards
    hosts = initialize()
    return hosts.process, hosts.count


def ported_states(model: ChatModel, *, bf16: bool, verify: bool) -> Callable[..., Any]:
    """Return `last_hidden_states` of a frozen model as a program.

    Args:
        model: Model in float32, on the CPU.
        bf16: Whether to compute in bfloat16.
        verify: Whether to compare the first batch with eager PyTorch.
    """
    frozen = model.eval().requires_grad_(False)
    ported = tpuport.convert(frozen, methods=(last_hidden_states,), verify=verify)
    if bf16:
        tpuport.cast(ported, "bf16")
    return ported.last_hidden_states


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
