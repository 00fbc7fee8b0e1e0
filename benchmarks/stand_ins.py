"""What stands in for packages that real code imports and a step does not need."""

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
    """Takes any arguments; classes that are imported and never used are this."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules whose every attribute is a class that does nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Answer for the names given and all below them."""
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module an answer to every name."""

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (_Anything,), {})

        vars(module)["__getattr__"] = attribute


class Mlp(nn.Module):
    """What timm calls `Mlp`."""

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
        """Two linear maps of the last dimension."""
        return self.fc2(self.norm(self.act(self.fc1(x))))


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, score_mod: Callable[..., Any]
) -> torch.Tensor:
    """FlexAttention of [B, H, L, E] tensors, written out; a row without scores gives zeros."""
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
    """A quiet logger, as loguru's is named."""
    found = logging.getLogger("upstream")
    found.addHandler(logging.NullHandler())
    return found


@contextmanager
def plain_config() -> Iterator[None]:
    """Without transformers' `PretrainedConfig`, which since version 5 is a dataclass itself.

    The planner's configuration is a dataclass that inherits from it.
    """
    transformers = importlib.import_module("transformers")
    kept = transformers.PretrainedConfig
    vars(transformers)["PretrainedConfig"] = object
    try:
        yield
    finally:
        vars(transformers)["PretrainedConfig"] = kept
