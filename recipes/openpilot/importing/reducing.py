"""Operators that reduce axes, and others along an axis."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from recipes.openpilot.importing.nodes import Built, Node, builds


def _sum(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    # torch sums integers in int64 unless a dtype is given.
    return torch.sum(x, dim, keepdim, dtype=x.dtype)


def _l2(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    # vector_norm rather than sqrt(sum), whose gradient at 0 is NaN.
    return torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim)


def _l1(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    return _sum(x.abs(), dim, keepdim)


def _log_sum(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    return _sum(x, dim, keepdim).log()


def _sum_square(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    return _sum(x * x, dim, keepdim)


def _prod(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    for axis in sorted(dim):
        # In ascending order of negative axes. keepdim keeps the meaning of those that are left.
        x = torch.prod(x, axis, True, dtype=x.dtype)
    return x if keepdim else x.reshape(_without(x.shape, dim))


def _without(shape: Any, dim: Any) -> list[int]:
    gone = {len(shape) + axis for axis in dim}
    return [size for axis, size in enumerate(shape) if axis not in gone]


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{"ReduceSum": _sum, "ReduceMean": torch.mean, "ReduceMax": torch.amax},
    **{"ReduceMin": torch.amin, "ReduceProd": _prod, "ReduceL1": _l1, "ReduceL2": _l2},
    **{"ReduceLogSum": _log_sum, "ReduceLogSumExp": torch.logsumexp},
    **{"ReduceSumSquare": _sum_square},
}


@builds(*_REDUCTIONS)
def reduction(node: Node) -> Built:
    """Build a reduction over axes from an attribute, or since opset 13 or 18 from an input."""
    x = node.variable(0)
    axes, keep = node.ints(1, "axes"), bool(node.attr("keepdims", 1))
    if not axes:
        if node.attr("noop_with_empty_axes", 0) or not x.shape:
            return Built(_same, [x.name])
        axes = tuple(range(len(x.shape)))
    dim = tuple(node.axis(axis, len(x.shape)) for axis in axes)
    return Built(partial(_REDUCTIONS[node.op], dim=dim, keepdim=keep), [x.name])


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@builds("ArgMax", "ArgMin")
def arg(node: Node) -> Built:
    """Build the index of an extreme, the first one as in torch."""
    x = node.variable(0)
    if node.attr("select_last_index", 0):
        raise node.refuse("select_last_index is on")
    function = torch.argmax if node.op == "ArgMax" else torch.argmin
    dim = node.axis(node.attr("axis", 0), len(x.shape))
    return Built(partial(function, dim=dim, keepdim=bool(node.attr("keepdims", 1))), [x.name])


@builds("CumSum")
def cumsum(node: Node) -> Built:
    """Build cumulative sums."""
    x = node.variable(0)
    if node.attr("exclusive", 0) or node.attr("reverse", 0):
        raise node.refuse("exclusive or reverse is on")
    dim = node.axis(int(node.constant(1)), len(x.shape))
    return Built(partial(torch.cumsum, dim=dim, dtype=x.dtype), [x.name])


@builds("Softmax", "LogSoftmax")
def softmax(node: Node) -> Built:
    """Build a softmax over one axis, or up to opset 12 over that axis and all after it."""
    x = node.variable(0)
    rank = len(x.shape)
    function = F.softmax if node.op == "Softmax" else F.log_softmax
    if node.opset >= 13:
        axis = node.axis(node.attr("axis", -1), rank)
        return Built(partial(function, dim=axis), [x.name])
    axis = node.axis(node.attr("axis", 1), rank)
    return Built(partial(_over_the_rest, axis=axis, function=function), [x.name])


def _over_the_rest(x: torch.Tensor, axis: int, function: Callable[..., Any]) -> torch.Tensor:
    return function(x.flatten(axis), dim=-1).reshape(x.shape)


@builds("TopK")
def top_k(node: Node) -> Built:
    """Build the largest or smallest elements in order."""
    x = node.variable(0)
    (k,) = node.ints(1, "k") or (0,)
    dim = node.axis(node.attr("axis", -1), len(x.shape))
    largest = bool(node.attr("largest", 1))
    return Built(partial(_top_k, k=k, dim=dim, largest=largest), [x.name])


def _top_k(x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = torch.topk(x, k, dim, largest)
    return values, places
