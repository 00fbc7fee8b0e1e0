"""The model that is trained: adapters (DoRA, by PEFT) on some layers, all else frozen.

DoRA (Liu et al., arXiv:2402.09353) trains the length and the direction of each row of a weight,
the direction by a product of two thin matrices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.openpilot.importing import ImportedGraph
from tpuport.errors import UsageError

# The last dense layers, temporal projections and heads, as files name them.
DEFAULT_LAYERS = (r"hydra", r"policy", r"temporal", r"plan")


@dataclass(frozen=True)
class DoraOptions:
    """Which layers are trained, and how.

    Attributes:
        layers: patterns that are looked for in the names of dense and convolution layers, such as
            `temporal_hydra/plan`.
        rank: of the product.
        alpha: the product counts alpha / rank.
        seed: of the first matrices.
    """

    layers: tuple[str, ...] = DEFAULT_LAYERS
    rank: int = 16
    alpha: float = 16.0
    seed: int = 0


def trainable_layers(graph: nn.Module) -> dict[str, nn.Module]:
    """The dense and convolution layers by name."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {name: module for name, module in graph.named_modules() if isinstance(module, kinds)}


def choose_layers(graph: ImportedGraph, patterns: Sequence[str], rank: int = 1) -> list[str]:
    """The names of the layers that patterns find.

    Depthwise convolutions are left out: a product cannot be of lower rank than they are.

    Args:
        graph: the model.
        patterns: regular expressions, looked for anywhere in a name. One that finds nothing is
            wrong only if all do, or if it is none of the defaults.
        rank: of the adapters.

    Raises:
        UsageError: a pattern is no regular expression or finds nothing, or a layer cannot have an
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
    """Put adapters on layers and freeze all else, in place. At first nothing changes: the adapters
    begin as the identity.

    Args:
        graph: the model, in float32.
        options: which and how.

    Returns:
        The names of the layers.

    Raises:
        UsageError: see `choose_layers`; or the rank is less than 1.
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
    """How many numbers are trained, and how many there are."""
    sizes = [(p.numel(), p.requires_grad) for p in graph.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def merge(graph: ImportedGraph) -> list[str]:
    """Put what adapters have learned into their layers, and take them off, in place.

    Returns:
        The names of the layers.

    Raises:
        UsageError: a layer would get numbers that are infinite or none.
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
