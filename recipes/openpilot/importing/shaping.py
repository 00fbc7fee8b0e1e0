"""Operators that move elements without computing any. Shapes are the graph's, and constant."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from recipes.openpilot.importing.nodes import Built, Constant, Node, Variable, builds, lifted, size


def _reshape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return x.reshape(x.shape[0], *shape)


def _to_shape(node: Node, shape: tuple[int, ...]) -> Built:
    return Built(partial(_reshape, shape=shape), [node.variable(0).name])


def reshaped(node: Node, before: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that Reshape gives: -1 is the rest, 0 keeps a size without `allowzero`."""
    keep = not node.attr("allowzero", 0)
    sizes = [before[i] if s == 0 and keep else s for i, s in enumerate(target)]
    if -1 in sizes:
        rest = math.prod(s for s in sizes if s != -1)
        sizes[sizes.index(-1)] = size(before) // max(rest, 1)
    if size(sizes) != size(before):
        raise node.refuse(f"{before} cannot become {target}")
    return tuple(sizes)


@builds("Reshape")
def reshape(node: Node) -> Built:
    """Build a reshape, `allowzero` included."""
    target = node.ints(1, "shape") or ()
    return _to_shape(node, reshaped(node, node.variable(0).shape, target))


@builds("Flatten")
def flatten(node: Node) -> Built:
    """Build a reshape to two axes: all before a given axis, and the rest."""
    shape = node.variable(0).shape
    axis = node.attr("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return _to_shape(node, (size(shape[:axis]), size(shape[axis:])))


@builds("Squeeze")
def squeeze(node: Node) -> Built:
    """Build a reshape without some axes of size 1."""
    shape = node.variable(0).shape
    axes = node.ints(1, "axes")
    if axes is None:
        axes = tuple(i for i, s in enumerate(shape) if s == 1)
    gone = {axis % len(shape) for axis in axes}
    if any(shape[axis] != 1 for axis in gone):
        raise node.refuse(f"{shape} has more than one element along axes {axes}")
    return _to_shape(node, tuple(s for i, s in enumerate(shape) if i not in gone))


@builds("Unsqueeze")
def unsqueeze(node: Node) -> Built:
    """Build a reshape with more axes of size 1."""
    shape, axes = node.variable(0).shape, node.ints(1, "axes") or ()
    rank = len(shape) + len(axes)
    new, old = {axis % rank for axis in axes}, iter(shape)
    return _to_shape(node, tuple(1 if i in new else next(old) for i in range(rank)))


@builds("Transpose")
def transpose(node: Node) -> Built:
    """Build a permutation of axes, by default in reverse order."""
    x = node.variable(0)
    perm = node.attr("perm") or tuple(reversed(range(len(x.shape))))
    return Built(partial(torch.permute, dims=(0, *(axis + 1 for axis in perm))), [x.name])


@builds("Expand")
def expand(node: Node) -> Built:
    """Build a broadcast to a shape."""
    x = node.variable(0)
    shape = np.broadcast_shapes(x.shape, node.ints(1) or ())
    by = len(shape) - len(x.shape)
    return Built(partial(_expand, shape=shape, by=by), [x.name])


def _expand(x: torch.Tensor, shape: tuple[int, ...], by: int) -> torch.Tensor:
    return lifted(x, by).expand(x.shape[0], *shape)


@builds("Tile")
def tile(node: Node) -> Built:
    """Build repetitions along axes."""
    x = node.variable(0)
    return Built(partial(_tile, repeats=node.ints(1) or ()), [x.name])


def _tile(x: torch.Tensor, repeats: tuple[int, ...]) -> torch.Tensor:
    return x.repeat(1, *repeats)


@builds("Slice")
def slice_(node: Node) -> Built:
    """Build slices along axes, negative steps included."""
    x = node.variable(0)
    starts, ends = node.ints(1, "starts") or (), node.ints(2, "ends") or ()
    axes = node.ints(3, "axes") or tuple(range(len(starts)))
    steps = node.ints(4) or (1,) * len(starts)
    index, flips = [slice(None)] * len(x.shape), []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = node.axis(axis, len(x.shape))
        places = range(*slice(start, end, step).indices(x.shape[axis]))
        if step < 0:
            flips.append(axis)
            places = places[::-1]
        index[axis] = slice(places.start, max(places.stop, places.start), places.step)
    call = partial(_slice, index=(Ellipsis, *index), flips=tuple(flips))
    return Built(call, [x.name])


def _slice(x: torch.Tensor, index: tuple[Any, ...], flips: tuple[int, ...]) -> torch.Tensor:
    x = x[index]
    return x.flip(flips) if flips else x


@builds("Split")
def split(node: Node) -> Built:
    """Build a split along an axis, into given sizes or as equal as possible."""
    x = node.variable(0)
    axis = node.axis(node.attr("axis", 0), len(x.shape))
    sizes = node.ints(1, "split")
    if sizes is None:
        count = node.attr("num_outputs", node.num_outputs)
        part = -(-x.shape[axis] // count)
        sizes = (*(part,) * (count - 1), x.shape[axis] - part * (count - 1))
    return Built(partial(_split, sizes=sizes, axis=axis), [x.name])


def _split(x: torch.Tensor, sizes: tuple[int, ...], axis: int) -> tuple[torch.Tensor, ...]:
    return torch.split(x, list(sizes), axis)


@builds("Concat")
def concat(node: Node) -> Built:
    """Build a concatenation along an axis. Constants are repeated in each row."""
    values = [node.value(i) for i in range(len(node.inputs))]
    axis = node.axis(node.attr("axis"), len(values[0].shape))
    operands = [
        v.name if isinstance(v, Variable) else node.register(v) for v in values if size(v.shape)
    ]
    batched = tuple(isinstance(v, Variable) for v in values if size(v.shape))
    if len(operands) == 1:
        return Built(_same, operands)
    return Built(partial(_concat, axis=axis, batched=batched), operands)


def _concat(*values: torch.Tensor, axis: int, batched: tuple[bool, ...]) -> torch.Tensor:
    rows = values[batched.index(True)].shape[0]
    dtype = values[batched.index(True)].dtype
    pairs = zip(values, batched, strict=True)
    whole = [v if own else v.to(dtype).expand(rows, *v.shape) for v, own in pairs]
    return torch.cat(whole, axis)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


# -- by index --------------------------------------------------------------------------------------


@builds("Gather")
def gather(node: Node) -> Built:
    """Build a gather along an axis by indices, constant or computed."""
    data, places = node.value(0), node.value(1)
    axis = node.axis(node.attr("axis", 0), len(data.shape))
    if isinstance(data, Constant):
        if axis != -len(data.shape):
            raise node.refuse("it takes from a constant along another axis than the first")
        return Built(_from_table, [node.register(data), node.operand(1)])
    if isinstance(places, Variable):
        ranks = (len(data.shape), len(places.shape))
        return Built(partial(_gather, axis=axis, ranks=ranks), [data.name, places.name])
    known = places.array.astype(np.int64)
    known = np.where(known < 0, known + data.shape[axis], known)
    if not known.ndim:
        return Built(partial(torch.select, dim=axis, index=int(known)), [data.name])
    call = partial(_take, axis=axis, places=tuple(known.ravel().tolist()), shape=known.shape)
    return Built(call, [data.name])


def _take(
    x: torch.Tensor, axis: int, places: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    found = x.index_select(x.ndim + axis, torch.tensor(places, device=x.device))
    front, back = found.shape[: x.ndim + axis], found.shape[x.ndim + axis + 1 :]
    return found.reshape(*front, *shape, *back)


def _from_table(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    places = torch.where(places < 0, places + table.shape[0], places)
    return table[places.long()]


def _gather(
    x: torch.Tensor, places: torch.Tensor, axis: int, ranks: tuple[int, int]
) -> torch.Tensor:
    moved = x.movedim(axis, 1)  # (n, size, ...)
    places = torch.where(places < 0, places + moved.shape[1], places).long()
    rows = places.reshape(places.shape[0], -1, *(1,) * (moved.ndim - 2))
    found = moved.gather(1, rows.expand(*rows.shape[:2], *moved.shape[2:]))
    before = ranks[0] + axis  # axes of the graph before the one that is taken from
    found = found.reshape(places.shape[0], *places.shape[1:], *moved.shape[2:])
    taken = list(range(1, 1 + ranks[1]))
    return found.movedim(taken, [axis + before for axis in taken]) if before else found


@builds("GatherElements")
def gather_elements(node: Node) -> Built:
    """Build a gather of one element for each index, along an axis."""
    x, places = node.variable(0), node.variable(1)
    axis = node.axis(node.attr("axis", 0), len(x.shape))
    if any(
        a != b
        for i, (a, b) in enumerate(zip(x.shape, places.shape, strict=True))
        if i != axis % len(x.shape)
    ):
        raise node.refuse("its indices have other sizes than its data along other axes")
    return Built(partial(_gather_elements, axis=axis), [x.name, places.name])


def _gather_elements(x: torch.Tensor, places: torch.Tensor, axis: int) -> torch.Tensor:
    places = torch.where(places < 0, places + x.shape[axis], places)
    return x.gather(axis, places.long())


# -- padding, and other orders ------------------------------------------------------------------


@builds("Pad")
def pad(node: Node) -> Built:
    """Build padding or cropping at the ends of axes."""
    x = node.variable(0)
    rank, mode = len(x.shape), node.attr("mode", "constant")
    pads = node.ints(1, "pads") or ()
    axes = node.ints(3) or tuple(range(rank))
    around = {node.axis(axis, rank): (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    if mode == "constant":
        fill = node.attr("value", 0.0)
        if node.input(2) is not None:
            fill = node.constant(2).item()
        ends = [end for axis in range(-1, -rank - 1, -1) for end in around.get(axis, (0, 0))]
        return Built(partial(F.pad, pad=ends, value=fill), [x.name])
    ways = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    if mode not in ways or any(end < 0 for ends in around.values() for end in ends):
        raise node.refuse(f"mode {mode!r} with pads {pads}")
    places = {
        axis: tuple(np.pad(np.arange(x.shape[axis]), ends, mode=mode).tolist())
        for axis, ends in around.items()
        if any(ends)
    }
    return Built(partial(_places, places=places), [x.name])


def _places(x: torch.Tensor, places: dict[int, tuple[int, ...]]) -> torch.Tensor:
    for axis, wanted in places.items():
        x = x.index_select(x.ndim + axis, torch.tensor(wanted, device=x.device))
    return x


@builds("DepthToSpace", "SpaceToDepth")
def depth_to_space(node: Node) -> Built:
    """Build a move of channels to blocks of pixels, or back."""
    x, block = node.variable(0), node.attr("blocksize")
    n, c, h, w = x.shape
    if node.op == "SpaceToDepth":
        first = (n, c, h // block, block, w // block, block)
        perm, last = (0, 3, 5, 1, 2, 4), (n, c * block**2, h // block, w // block)
    elif node.attr("mode", "DCR") == "DCR":
        first = (n, block, block, c // block**2, h, w)
        perm, last = (0, 3, 4, 1, 5, 2), (n, c // block**2, h * block, w * block)
    else:
        first = (n, c // block**2, block, block, h, w)
        perm, last = (0, 1, 4, 2, 5, 3), (n, c // block**2, h * block, w * block)
    dims = (0, *(axis + 1 for axis in perm))
    return Built(partial(_blocks, first=first, dims=dims, last=last), [x.name])


def _blocks(x: torch.Tensor, first: Any, dims: Any, last: Any) -> torch.Tensor:
    return x.reshape(x.shape[0], *first).permute(dims).reshape(x.shape[0], *last)


@builds("Trilu")
def trilu(node: Node) -> Built:
    """Build the upper or lower triangle of each matrix."""
    x = node.variable(0)
    k = 0 if node.input(1) is None else int(node.constant(1))
    function = torch.triu if node.attr("upper", 1) else torch.tril
    return Built(partial(function, diagonal=k), [x.name])
