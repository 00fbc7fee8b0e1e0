"""Means of images over the cells of boxes, by torchvision's op (`roi_align`)."""

import itertools

import jax
import jax.numpy as jnp

from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import wide


@lowering("torchvision.roi_align", reason="torchvision computes it in C++")
def _roi_align(
    image: jax.Array,
    boxes: jax.Array,
    scale: float,
    height: int,
    width: int,
    samples: int,
    aligned: bool,
) -> jax.Array:
    """Average `image` [N, C, H, W] in the height x width cells of each box.

    Args:
        image: the images, or their features.
        boxes: [K, 5] of the number of an image and left, top, right, bottom. No gradient flows to
            them, as in torchvision.
        scale: the size of the features, relative to that of the images.
        height: the number of rows of cells.
        width: the number of columns of cells.
        samples: the number of samples of a cell along each dim.
        aligned: whether pixels have their centers at halves.

    Returns:
        [K, C, height, width].

    Raises:
        PortError: the number of samples depends on the size of the boxes.
    """
    if samples <= 0:
        raise port_error(
            "roi_align with sampling_ratio=-1 takes as many samples as the size of a box decides",
            code="TPU203",
            remedy="give a sampling_ratio, 2 for example, as torchvision's detection models do",
        )
    pixels = wide(image).transpose(0, 2, 3, 1)
    places = jax.lax.stop_gradient(wide(boxes))
    of_image = places[:, 0].astype(jnp.int32)[:, None, None]
    left, top, right, bottom = (places[:, 1:] * scale - (0.5 if aligned else 0.0)).T
    least = None if aligned else 1.0
    rows = _sampled(top, bottom, height, samples, least)
    columns = _sampled(left, right, width, samples, least)
    total = jnp.zeros((), pixels.dtype)
    for i, j in itertools.product(range(samples), repeat=2):
        pairs = itertools.product(
            _neighbours(rows[..., i], image.shape[2]), _neighbours(columns[..., j], image.shape[3])
        )
        for (row, of_row), (column, of_column) in pairs:
            weight = of_row[:, :, None] * of_column[:, None, :]
            total = (
                total + pixels[of_image, row[:, :, None], column[:, None, :]] * weight[..., None]
            )
    return (total / samples**2).transpose(0, 3, 1, 2)


def _sampled(
    start: jax.Array, end: jax.Array, cells: int, samples: int, least: float | None
) -> jax.Array:
    """Return the places [K, cells, samples] of the samples along one dim of the boxes."""
    size = (end - start if least is None else jnp.maximum(end - start, least)) / cells
    within = (jnp.arange(samples) + 0.5) * size[:, None] / samples
    return (start[:, None] + jnp.arange(cells) * size[:, None])[..., None] + within[:, None]


def _neighbours(at: jax.Array, size: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return the two pixels around a place, each with its weight: 0 a pixel or more outside."""
    inside = (at >= -1) & (at <= size)
    at = jnp.clip(at, 0, size - 1)
    low = jnp.floor(at)
    after = jnp.where(inside, at - low, 0)
    before = jnp.where(inside, 1 - (at - low), 0)
    first = low.astype(jnp.int32)
    return [(first, before), (jnp.minimum(first + 1, size - 1), after)]
