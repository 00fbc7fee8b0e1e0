"""The model that is trained: adapters (DoRA, by PEFT) on some layers, with all else frozen.

DoRA (Liu et al., arXiv:2402.09353) trains the norm and the direction of each row of a weight, the
direction by a product of two thin matrices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.openpilot.importing import ImportedGraph
from tpuport.foundation.errors import UsageError

# The last dense layers, temporal projections and heads, by their names in files.
DEFAULT_LAYERS = (r"hydra", r"policy", r"temporal", r"plan")


@dataclass(frozen=True)
class DoraOptions:
    """The layers that are trained, and the settings of their adapters.

    Attributes:
        layers: Patterns that are searched in the names of dense and convolution layers, such as
            `temporal_hydra/plan`.
        rank: Rank of the product.
        alpha: The product is scaled by alpha / rank.
        seed: Random seed of the first matrices.
    """

    layers: tuple[str, ...] = DEFAULT_LAYERS
    rank: int = 16
    alpha: float = 16.0
    seed: int = 0


def trainable_layers(graph: nn.Module) -> dict[str, nn.Module]:
    """Return the dense and convolution layers by name."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {name: module for name, module in graph.named_modules() if isinstance(module, kinds)}


def choose_layers(graph: ImportedGraph, patterns: Sequence[str], rank: int = 1) -> list[str]:
    """Return the names of the layers that patterns match.

    Depthwise convolutions are left out, since a product cannot have a lower rank than they have.

    Args:
        graph: The model.
        patterns: Regular expressions, searched anywhere in a name. A default pattern may match
            nothing if another one matches.
        rank: Rank of the adapters.

    Raises:
        UsageError: A pattern is no regular expression or matches nothing, or a layer cannot have an
            adapter.
    """
    layers = trainable_layers(graph)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        try:
            found = [name for name in layers if re.search(pattern, name)]
        except re.error as error:
            raise UsageError(f"layers: {pattern!r} is no regular expression: {error}") from error
        if not found and pattern not in DEFAULT_LAYERS:
            raise UsageError(
                f"layers: {pattern!r} finds none of the {len(layers)} layers, such as"
                f" {', '.join(list(layers)[-3:])}"
            )
        chosen |= dict.fromkeys(found)
    names = [name for name in chosen if not _is_grouped(layers[name], rank)]
    if not names:
        raise UsageError(
            f"layers: {list(patterns)} find no layer that can have an adapter, among"
            f" {', '.join(list(layers)[-3:])} and {max(len(layers) - 3, 0)} others"
        )
    _check_untied(layers, names)
    return names


def _is_grouped(module: nn.Module, rank: int) -> bool:
    return getattr(module, "groups", 1) > 1 and bool(rank % module.groups)  # type: ignore[operator]


def _check_untied(layers: dict[str, nn.Module], names: Sequence[str]) -> None:
    users: dict[int, list[str]] = {}
    for name, module in layers.items():
        users.setdefault(id(module.weight), []).append(name)
    for name in names:
        others = users[id(layers[name].weight)]
        if len(others) > 1:
            raise UsageError(
                f"{' and '.join(others)} are one weight in the file, which adapters would make"
                " two. What to do: leave them out"
            )


def add_dora(graph: ImportedGraph, options: DoraOptions) -> list[str]:
    """Add adapters to layers and freeze all else, in place.

    The adapters begin as the identity, so that nothing changes at first.

    Args:
        graph: The model, in float32.
        options: The layers and the settings of the adapters.

    Returns:
        The names of the layers.

    Raises:
        UsageError: See `choose_layers`; or the rank is less than 1.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if options.rank < 1 or options.alpha <= 0:
        raise UsageError(f"rank={options.rank}, alpha={options.alpha}: expected numbers above 0")
    names = choose_layers(graph, options.layers, options.rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,  # type: ignore[arg-type] # it divides
            use_dora=True,
            lora_dropout=0.0,
            bias="none",
            target_modules=names,
        )
        inject_adapter_in_model(config, graph)
    for name, parameter in graph.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return names


def count_trained(graph: nn.Module) -> tuple[int, int]:
    """Return the number of trained parameters, and that of all parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in graph.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def merge(graph: ImportedGraph) -> list[str]:
    """Merge adapters into their layers and remove them, in place.

    Returns:
        The names of the layers.

    Raises:
        UsageError: A layer would get values that are not finite.
    """
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        name: module for name, module in graph.named_modules() if isinstance(module, LoraLayer)
    }
    for name, layer in layers.items():
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise UsageError(f"{name} was not merged: {error}") from error
        parent, _, last = name.rpartition(".")
        setattr(graph.get_submodule(parent), last, layer.get_base_layer())
    return list(layers)
