"""Float layers that also collect numbers, in buffers of a watcher: results of the program."""

from typing import Any

import torch


class WatchedLinear(torch.nn.Linear):
    """A linear layer whose weight keeps its name, so that rules of sharding apply."""

    def __init__(self, layer: torch.nn.Linear, watcher: torch.nn.Module) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.watcher = watcher

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the float layer's output."""
        y = super().forward(input)
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
