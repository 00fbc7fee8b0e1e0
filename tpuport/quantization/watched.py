"""Float layers that also collect numbers, in buffers of a watcher: results of the program."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tpuport.sharding.constraints import Activations
from tpuport.sharding.leaves import module_of
from tpuport.sharding.mesh import MeshAxis, sizes_of
from tpuport.sharding.rule_table import ShardingRules
from tpuport.sharding.spec_rule import SpecRule

_EXPERTS_NDIM = 3


class WatchedLinear(torch.nn.Linear):
    """A linear layer whose weight keeps its name, so that rules of sharding apply."""

    def __init__(self, layer: torch.nn.Linear, watcher: torch.nn.Module) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.watcher, self.whole = watcher, torch.nn.Identity()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the float layer's output."""
        y = torch.nn.functional.linear(input, self.whole(self.weight), self.bias)
        self.watcher((input,), y)
        return y


class WatchedLayer(torch.nn.Module):
    """Any other layer."""

    def __init__(self, layer: torch.nn.Module, watcher: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.watcher = layer, watcher

    @property
    def weight(self) -> Any:
        """Return the float layer's weight, whose dtype a model may ask for."""
        return self.layer.weight

    def forward(self, *args: Any) -> Any:
        """Return the float layer's output."""
        y = self.layer(*args)
        self.watcher(args, y)
        return y


def watched(layer: torch.nn.Module, watcher: torch.nn.Module) -> torch.nn.Module:
    """Return a layer that also calls a watcher, with its arguments and its output."""
    of_linear = isinstance(layer, torch.nn.Linear)
    return WatchedLinear(layer, watcher) if of_linear else WatchedLayer(layer, watcher)


def gathered(model: Any, mesh: Mesh | Mapping[str, int], table: ShardingRules) -> ShardingRules:
    """Shard weights of linear layers and experts over all axes, and gather those of layers at use.

    Each chip runs the whole batch, and adds no part of a product's terms. So layers find the
    numbers of one chip, and GPTQ gets the same codes on any mesh. Experts stay where they are, and
    what is not watched is replicated. A mesh for long sequences shards activations as before.

    Args:
        model: the ported model with watched layers.
        mesh: a mesh or its sizes.
        table: the rules of its preset.
    """
    sizes = sizes_of(mesh)
    rules: list[SpecRule] = []
    for name, module in module_of(model).named_modules():
        if isinstance(module, WatchedLinear):
            spec = _over_all_axes(module.weight.shape, sizes)
            rules.append(SpecRule(f"{name}.weight", spec, "gathered at each use"))
        elif isinstance(module, WatchedLayer):
            rules += [
                SpecRule(f"{name}.{path}", _over_all_axes(one.shape[:1], sizes), "experts")
                for path, one in module.named_parameters()
                if one.ndim == _EXPERTS_NDIM
            ]
    is_long = sizes.get(MeshAxis.SEQUENCE, 1) > 1
    whole = Activations({"**.whole": P(), "whole": P()}).optional()
    return ShardingRules(
        [*rules, SpecRule("**", P(), "replicated")],
        inputs=table.inputs if is_long else (),
        activations=whole + table.activations if is_long else whole,
    )


def _over_all_axes(shape: Sequence[int], sizes: Mapping[str, int]) -> P:
    """Return a spec that shards the first dim that all axes together divide, if any."""
    axes = tuple(name for name, size in sizes.items() if size > 1)
    num = math.prod(sizes.values())
    dim = next((dim for dim, size in enumerate(shape) if size % num == 0), None)
    return P() if dim is None or not axes else P(*[None] * dim, axes)
