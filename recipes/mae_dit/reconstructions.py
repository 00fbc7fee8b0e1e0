"""Pictures of images above their reconstructions."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from PIL import Image

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file
from tpuport.model.ported_model import PortedModel

SHOWN = 8  # columns of a picture
_IMAGES = 2 * SHOWN


def grid(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return pairs of images (3, H, W) in [0, 1] as a picture, each above its other one."""
    lines = []
    for start in range(0, len(pairs), SHOWN):
        part = pairs[start : start + SHOWN]
        blank = [np.ones_like(part[0][0])] * (SHOWN - len(part))
        for number in (0, 1):
            lines.append(np.concatenate([*(pair[number] for pair in part), *blank], 2))
    return np.round(np.concatenate(lines, 1).transpose(1, 2, 0) * 255).astype(np.uint8)


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Write a picture (H, W, 3) of 8 bits as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as temporary:
        Image.fromarray(picture).save(temporary, format="PNG")


def first_images(batches: Iterable[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return the first images that can be decoded, of one picture.

    Raises:
        UsageError: There are none.
    """
    found: list[torch.Tensor] = []
    for batch in batches:
        found.extend(batch["image"][batch["valid"]])
        if len(found) >= _IMAGES:
            break
    if not found:
        raise UsageError("no image for validation can be decoded: there is nothing to reconstruct")
    return torch.stack(found[:_IMAGES])


class Reconstructions:
    """Draws the same images and their reconstructions while stage 1 trains.

    Args:
        ported: The modules of stage 1.
        images: The images (N, 3, H, W).
        folder: Where to write the pictures.
        every: Updates between two of them.
        last: The last update, after which there is one in any case.
        averaged: Whether the averaged weights are looked at.
        seed: Seed of what the autoencoder draws, the same each time.
    """

    def __init__(
        self,
        ported: PortedModel,
        images: torch.Tensor,
        folder: Path,
        *,
        every: int,
        last: int,
        averaged: bool,
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise UsageError(f"{every} updates between pictures: expected 1 or more")
        self.every = every
        self._images, self._folder, self._last = images, folder, last
        self._averaged, self._key = averaged, jax.random.key(seed)

        def program(params: Any, buffers: Any, key: jax.Array, images: jax.Array) -> jax.Array:
            return ported.apply(params, buffers, key, images, method="reconstructed")[0]

        self._program = jax.jit(program)

    def __call__(self, step: Any, state: Any) -> dict[str, np.ndarray]:
        """Draw the picture of a state, if one is due."""
        number = int(state.step)
        if number % self.every and number != self._last:
            return {}
        ported = step.load_state(state, ema=self._averaged)
        images = self._images.numpy()
        made = tpuport.to_numpy(self._program(ported.params, ported.buffers, self._key, images))
        picture = grid([*zip(images, made, strict=True)])
        write_picture(self._folder / f"step-{number:06d}.png", picture)
        return {"reconstructions": picture}
