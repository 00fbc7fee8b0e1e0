"""A small VLM, its data on disk, and its batches."""

import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from recipes.recogdrive.loading import load_chat_model, tile_of
from recipes.recogdrive.make_chats import make_chats
from recipes.recogdrive.packing import fill_batch, make_buckets
from recipes.recogdrive.samples import ChatData
from recipes.recogdrive.tiles import Tiling
from recipes.recogdrive.vlm import ChatModel, make_vlm

LENGTH, MOST_TILES = 112, 4


class Small:
    """What `make_chats` wrote, and what is read from it.

    The weights are larger than at the start of a training, so that everything counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = make_chats(folder, num_chats=10, num_scenes=9)
        self.model, self.tokenizer = load_chat_model(folder / "model")
        _, self.per_tile = tile_of(self.model)
        enlarge(self.model)
        self.data = ChatData(
            folder / "meta.json",
            self.tokenizer,
            Tiling(56, max_dynamic_patch=MOST_TILES),
            self.per_tile,
            LENGTH,
        )

    def thin(self) -> Self:
        """The same with a model of one layer each, which is compiled in half the time."""
        other, config = copy.copy(self), copy.deepcopy(self.model.vlm.config)
        config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers = 1
        config.text_config.layer_types = config.text_config.layer_types[:1]
        other.model = ChatModel(make_vlm(config, seed=1), self.model.image_token)
        enlarge(other.model)
        return other

    def samples(self, *indices: int) -> list[dict[str, np.ndarray]]:
        return [self.data.sample(index) for index in indices]

    def batch(
        self, rows: list[list[dict[str, np.ndarray]]], length: int = 2 * LENGTH, **more: Any
    ) -> dict[str, torch.Tensor]:
        """The arrays of rows, as tensors."""
        (bucket,) = make_buckets([length], self.per_tile, 16)
        made = fill_batch(rows, bucket, tile_shape=(3, 56, 56), **more)
        return {name: torch.from_numpy(value) for name, value in made.items()}


def enlarge(model: torch.nn.Module) -> None:
    """Make biases and small weights count as those of a trained model do."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def loss_by_transformers(model: Any, sample: dict[str, np.ndarray]) -> tuple[torch.Tensor, int]:
    """The sum of a sample's losses by transformers' own forward, without padding, and of how many
    labels."""
    labels = torch.from_numpy(sample["labels"]).long()[None]
    tiles = torch.from_numpy(sample["pixel_values"])
    out = model.vlm(
        input_ids=torch.from_numpy(sample["input_ids"]).long()[None],
        pixel_values=tiles if len(tiles) else None,
        labels=labels,
        use_cache=False,
    )
    count = int((labels[:, 1:] >= 0).sum())
    return out.loss * count, count
