"""Non-maximum suppression of boxes, by torchvision's op: as many are left as data decides."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.tracing.core.context import current
from tpuport.tracing.core.values import value_of
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    count_node,
    extents_of,
    node_of,
    note_dynamic,
    refuse,
    require_equal,
    strip,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import handles, tensors_of
from tpuport.tracing.dynamic_shapes.joining import compacted


@handles("nms")
def _nms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the places of the boxes that overlap no better one too much, the best first."""
    if func.namespace != "torchvision":
        if any(map(extents_of, tensors_of(args, kwargs))):
            raise refuse(func)
        return NotImplemented
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    boxes, scores, threshold = given["dets"], given["scores"], given["iou_threshold"]
    sizes = [extents_of(t).get(0, node_of(torch.Tensor.size(t)[0])) for t in (boxes, scores)]
    message = "boxes and scores should have same number of elements in dimension 0"
    require_equal(sizes[0], sizes[1], message)
    size = min(torch.Tensor.size(t)[0] for t in (boxes, scores))
    corners = value_of(strip(boxes).detach())[:size]
    ranks = value_of(strip(scores).detach())[:size]
    is_real = jnp.arange(size) < sizes[0].value
    order = jnp.argsort(ranks, stable=True, descending=True)
    order = order[jnp.argsort(~is_real[order], stable=True)]
    kept = _kept(corners[order], is_real[order], threshold)
    places = order[compacted(kept, size)]
    note_dynamic(current())
    found = wrap_now(places, torch.int64)
    found._bounds = (0, max(size - 1, 0))
    return attach(found, {0: count_node(jnp.sum(kept, dtype=jnp.int32), size)})


def _kept(boxes: jax.Array, is_real: jax.Array, threshold: float) -> jax.Array:
    """Return which of the boxes (the best first) overlap none that is kept before them."""
    left, top, right, bottom = boxes.T
    areas = (right - left) * (bottom - top)
    places = jnp.arange(boxes.shape[0])
    limit = _rounded_down(threshold, boxes.dtype)

    def step(place: jax.Array, kept: jax.Array) -> jax.Array:
        width = jnp.minimum(right[place], right) - jnp.maximum(left[place], left)
        height = jnp.minimum(bottom[place], bottom) - jnp.maximum(top[place], top)
        shared = jnp.maximum(width, 0) * jnp.maximum(height, 0)
        overlap = shared / (areas[place] + areas - shared)
        return kept & ~((overlap > limit) & (places > place) & kept[place])

    return jax.lax.fori_loop(0, boxes.shape[0], step, is_real)


def _rounded_down(number: float, dtype: Any) -> np.ndarray:
    """Return the largest number of a dtype that is at most `number`, a float of 64 bits."""
    made = np.asarray(number, dtype)
    return made if float(made) <= number else np.nextafter(made, np.asarray(-math.inf, dtype))
