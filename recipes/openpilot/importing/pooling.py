"""Pooling and resizing of pictures."""

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from recipes.openpilot.importing.nodes import Built, Node, builds
from recipes.openpilot.importing.products import torch_pads, window_pads

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@builds("GlobalAveragePool", "GlobalMaxPool")
def global_pool(node: Node) -> Built:
    """Build a reduction over all pixels."""
    x = node.variable(0)
    dim = tuple(range(2 - len(x.shape), 0))
    function: Any = torch.mean if node.op == "GlobalAveragePool" else torch.amax
    return Built(partial(function, dim=dim, keepdim=True), [x.name])


@builds("MaxPool", "AveragePool")
def pool(node: Node) -> Built:
    """Build a reduction over windows."""
    x = node.variable(0)
    if node.num_outputs > 1 or node.attr("ceil_mode", 0):
        raise node.refuse("it gives indices, or rounds sizes up")
    kernel = tuple(node.attr("kernel_shape"))
    ones = (1,) * len(kernel)
    dilations = tuple(node.attr("dilations") or ones)
    pads = window_pads(node, x.shape[2:], kernel, dilations)
    stride = tuple(node.attr("strides") or ones)
    if node.op == "MaxPool":
        function = partial(_MAX[len(kernel)], kernel_size=kernel, stride=stride, dilation=dilations)
        fill = float("-inf")
    else:
        if dilations != ones:
            raise node.refuse(f"dilations {dilations}")
        counts = bool(node.attr("count_include_pad", 0))
        if not counts and any(low or high for low, high in pads):
            share = _filled_share(x.shape[2:], kernel, stride, pads)
            function = partial(_mean_of_filled, kernel=kernel, stride=stride, share=share)
        else:
            function = partial(_AVERAGE[len(kernel)], kernel_size=kernel, stride=stride)
        fill = 0.0
    return Built(partial(_pool, function=function, pads=torch_pads(pads), fill=fill), [x.name])


def _pool(x: torch.Tensor, function: Any, pads: list[int], fill: float) -> torch.Tensor:
    images = x.flatten(0, 1)
    if any(pads):
        images = F.pad(images, pads, value=fill)
    return function(images).unflatten(0, x.shape[:2])


def _filled_share(sizes: Any, kernel: Any, stride: Any, pads: Any) -> torch.Tensor:
    """Return the fraction of each window that is inside the picture."""
    ones = F.pad(torch.ones(1, 1, *sizes), torch_pads(pads))
    return _AVERAGE[len(kernel)](ones, kernel, stride)[0, 0]


def _mean_of_filled(
    images: torch.Tensor, kernel: Any, stride: Any, share: torch.Tensor
) -> torch.Tensor:
    return _AVERAGE[len(kernel)](images, kernel, stride) / share


# -- other sizes -----------------------------------------------------------------------------------


@builds("Resize")
def resize(node: Node) -> Built:
    """Build a resize by nearest pixels or linear interpolation, as one matrix per axis.

    The formulas are in https://onnx.ai/onnx/operators/onnx__Resize.html.
    """
    x = node.variable(0)
    mode = node.attr("mode", "nearest")
    where = node.attr("coordinate_transformation_mode", "half_pixel")
    known = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    odd = [n for n in ("antialias", "axes", "exclude_outside") if node.attr(n)]
    if mode not in ("nearest", "linear") or where not in known or odd:
        raise node.refuse(f"mode {mode!r} with {where!r} {' '.join(odd)}".rstrip())
    if node.opset < 11:
        raise node.refuse("Resize was another operator before opset 11")
    sizes = node.ints(3)
    if sizes is not None:
        if node.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise node.refuse("keep_aspect_ratio_policy is not stretch")
        scales = [new / old for new, old in zip(sizes, x.shape, strict=True)]
    else:
        scales = [float(s) for s in node.constant(2)]
        sizes = tuple(int(np.floor(old * s)) for old, s in zip(x.shape, scales, strict=True))
    matrices = {}
    for axis, (old, new, scale) in enumerate(zip(x.shape, sizes, scales, strict=True)):
        if new != old:
            at = _coordinates(old, new, scale, where)
            nearest = node.attr("nearest_mode", "round_prefer_floor")
            matrix = _nearest(at, old, nearest) if mode == "nearest" else _lines(at, old)
            matrices[axis - len(x.shape)] = torch.from_numpy(matrix.astype(np.float32))
    return Built(partial(_resize, matrices=matrices), [x.name])


def _coordinates(old: int, new: int, scale: float, where: str) -> np.ndarray:
    """Return the coordinate of each new pixel among the old ones."""
    at = np.arange(new, dtype=np.float64)
    if where == "asymmetric":
        return at / scale
    if where == "align_corners":
        return at * (old - 1) / (new - 1) if new > 1 else np.zeros(1)
    if where == "pytorch_half_pixel" and new == 1:
        return np.zeros(1)
    return (at + 0.5) / scale - 0.5


_ROUNDINGS = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _nearest(at: np.ndarray, old: int, way: str) -> np.ndarray:
    return np.eye(old)[np.clip(_ROUNDINGS[way](at), 0, old - 1).astype(int)]


def _lines(at: np.ndarray, old: int) -> np.ndarray:
    low = np.floor(at)
    share = (at - low)[:, None]
    low = low.astype(int)
    eye = np.eye(old)
    first, second = (eye[np.clip(low + i, 0, old - 1)] for i in (0, 1))
    return (1 - share) * first + share * second


def _resize(x: torch.Tensor, matrices: dict[int, torch.Tensor]) -> torch.Tensor:
    for axis, matrix in matrices.items():
        moved = torch.matmul(x.movedim(axis, -1), matrix.T.to(x.dtype))
        x = moved.movedim(-1, axis)
    return x
