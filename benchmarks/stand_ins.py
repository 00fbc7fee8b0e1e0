"""Stubs for packages that real code imports and a step does not need."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _Anything:
    """A stub class that takes any arguments, for classes that are imported and never used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer of stub modules, whose every attribute is a class that does nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for the names given and all below them."""
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Make every attribute of the module a stub class."""

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (_Anything,), {})

        vars(module)["__getattr__"] = attribute


class Mlp(nn.Module):
    """The counterpart of timm's `Mlp`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        norm_layer: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.norm = norm_layer(hidden_features)
        self.fc2 = nn.Linear(hidden_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply two linear maps to the last dim."""
        return self.fc2(self.norm(self.act(self.fc1(x))))


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, score_mod: Callable[..., Any]
) -> torch.Tensor:
    """Compute FlexAttention of [B, H, L, E] tensors. A row without scores gives zeros."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    indices = torch.meshgrid(
        *(torch.arange(size, device=query.device) for size in scores.shape), indexing="ij"
    )
    scores = score_mod(scores, *indices)
    weights = scores.softmax(-1)
    return torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, weights) @ value


def stand_in(name: str, **attributes: Any) -> None:
    """Make a module importable unless it is installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None or name in sys.modules:
        for end in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:end])
            sys.modules.setdefault(part, types.ModuleType(part))
        vars(sys.modules[name]).update(attributes)


def quiet_logger() -> Any:
    """Return a logger without output, in place of loguru's."""
    found = logging.getLogger("upstream")
    found.addHandler(logging.NullHandler())
    return found


@contextmanager
def plain_config() -> Iterator[None]:
    """Replace transformers' `PretrainedConfig`, which since version 5 is a dataclass itself.

    The planner's configuration is a dataclass that inherits from it.
    """
    transformers = importlib.import_module("transformers")
    kept = transformers.PretrainedConfig
    vars(transformers)["PretrainedConfig"] = object
    try:
        yield
    finally:
        vars(transformers)["PretrainedConfig"] = kept
