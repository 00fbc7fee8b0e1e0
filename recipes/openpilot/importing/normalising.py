"""Operators that normalise by statistics, of the input itself or from the file."""

from functools import partial

import torch
import torch.nn.functional as F

from recipes.openpilot.importing.nodes import Built, Constant, Node, builds


@builds("LayerNormalization")
def layer_norm(node: Node) -> Built:
    """Build a normalisation over an axis and all axes after it."""
    if node.num_outputs > 1:
        raise node.refuse("its mean or deviation is used")
    x = node.variable(0)
    axis = node.axis(node.attr("axis", -1), len(x.shape))
    shape, epsilon = x.shape[axis:], node.attr("epsilon", 1e-5)
    given = [node.value(i) for i in range(1, len(node.inputs)) if node.inputs[i] is not None]
    if any(not isinstance(v, Constant) for v in given):
        raise node.refuse("its weight is computed from the inputs of the model")
    call = partial(_layer_norm, shape=shape, epsilon=epsilon)
    return Built(call, [x.name, *(node.register(v) for v in given if isinstance(v, Constant))])


def _layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    shape: tuple[int, ...],
    epsilon: float,
) -> torch.Tensor:
    weight = weight.expand(shape)
    bias = None if bias is None else bias.expand(shape)
    return F.layer_norm(x, shape, weight, bias, epsilon)


@builds("BatchNormalization")
def batch_norm(node: Node) -> Built:
    """Build a normalisation with the statistics of the file, which are not updated."""
    x = node.variable(0)
    if node.attr("training_mode", 0) or node.num_outputs > 1:
        raise node.refuse("it is in training")
    given = [node.value(i) for i in range(1, 5)]
    if any(not isinstance(v, Constant) for v in given):
        raise node.refuse("its weights are computed from the inputs of the model")
    weights = [node.register(v) for v in given if isinstance(v, Constant)]
    call = partial(_batch_norm, axes=len(x.shape) - 2, epsilon=node.attr("epsilon", 1e-5))
    return Built(call, [x.name, *weights])


def _per_channel(weight: torch.Tensor, axes: int) -> torch.Tensor:
    return weight.reshape(-1, *(1,) * axes)


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    axes: int,
    epsilon: float,
) -> torch.Tensor:
    scale = weight * torch.rsqrt(variance + epsilon)
    return x * _per_channel(scale, axes) + _per_channel(bias - mean * scale, axes)


@builds("InstanceNormalization", "GroupNormalization")
def group_norm(node: Node) -> Built:
    """Build a normalisation over groups of channels.

    Up to opset 20, GroupNormalization has one weight per group.
    """
    x = node.variable(0)
    channels = x.shape[1]
    groups = channels if node.op == "InstanceNormalization" else node.attr("num_groups")
    given = [node.value(1), node.value(2)]
    if any(not isinstance(v, Constant) for v in given):
        raise node.refuse("its weights are computed from the inputs of the model")
    weights = [node.register(v) for v in given if isinstance(v, Constant)]
    repeats = channels // given[0].shape[0]
    call = partial(_group_norm, groups=groups, repeats=repeats, epsilon=node.attr("epsilon", 1e-5))
    return Built(call, [x.name, *weights])


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    repeats: int,
    epsilon: float,
) -> torch.Tensor:
    weight, bias = weight.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    return F.group_norm(x.flatten(0, 1), groups, weight, bias, epsilon).reshape(x.shape)


@builds("LpNormalization")
def lp_norm(node: Node) -> Built:
    """Build a normalisation by the norm along an axis."""
    x = node.variable(0)
    p, axis = node.attr("p", 2), node.axis(node.attr("axis", -1), len(x.shape))
    return Built(partial(_lp_norm, p=p, axis=axis), [x.name])


def _lp_norm(x: torch.Tensor, p: int, axis: int) -> torch.Tensor:
    return x / torch.linalg.vector_norm(x, p, dim=axis, keepdim=True)
