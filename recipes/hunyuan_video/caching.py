"""Denoising steps that reuse the block outputs of an earlier step, as upstream's two caches do.

The transformer is not rewritten: its list of blocks is replaced for the length of one call.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.hunyuan_video.networks import Network, network_of
from tpuport.foundation.errors import UsageError

KINDS = ("deepcache", "teacache")


@dataclass(frozen=True)
class StepCache:
    """The steps that are computed in full, and what the others reuse.

    "deepcache" runs only the last block, on the input it had in the last full step. "teacache" runs
    no block: it adds the difference that all blocks made in that step again (Liu et al. 2024,
    arXiv:2411.19108). Both use upstream's fixed steps (hyvideo, generate.py --cache_start_step and
    so on).

    Attributes:
        kind: A name of `KINDS`.
        start: First step that may reuse. All before it are full.
        end: First step after which all are full again.
        interval: Every how many steps from start to end one is full.
    """

    kind: str = "deepcache"
    start: int = 11
    end: int = 45
    interval: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"cache={self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.start < 0 or self.end < self.start:
            raise UsageError(
                f"cache_start={self.start} and cache_end={self.end}: expected 0 <= start <= end"
            )
        if self.interval < 1:
            raise UsageError(f"cache_interval={self.interval}: expected at least 1")

    def is_full(self, step: int) -> bool:
        """Return whether a step, counted from 0, is computed by all blocks."""
        if not self.start <= step < self.end:
            return True
        # Step 0 has no earlier step to reuse.
        return step == 0 or (step - self.start) % self.interval == 0


class _Streams(nn.Module):
    """A module that takes a block's place in the list and accepts a block's arguments.

    Args:
        network: Names of the block's arguments and results.
        like: One of the blocks, whose signature is used.
        change: Computes the new streams from those that enter.
    """

    def __init__(
        self,
        network: Network,
        like: nn.Module,
        change: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        super().__init__()
        self._network, self._change = network, change
        self._signature = inspect.signature(type(like).forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the streams that `change` makes, in the form that a block returns."""
        given = self._signature.bind(None, *args, **kwargs).arguments
        found = self._change([given[name] for name in self._network.streams])
        return found[0] if len(found) == 1 else tuple(found)


@contextmanager
def keeping(transformer: Any, kind: str) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Collect what a later step may reuse, one entry for each call of the transformer."""
    network, blocks = _blocks_of(transformer)
    kept: list[tuple[torch.Tensor, ...]] = []
    before: list[list[torch.Tensor]] = []

    def enter(streams: list[torch.Tensor]) -> list[torch.Tensor]:
        before.append(streams)
        return streams

    def leave(streams: list[torch.Tensor]) -> list[torch.Tensor]:
        kept.append(tuple(now - then for now, then in zip(streams, before.pop(), strict=True)))
        return streams

    def note(streams: list[torch.Tensor]) -> list[torch.Tensor]:
        kept.append(tuple(streams))
        return streams

    def stand_in(change: Any) -> nn.Module:
        return _Streams(network, blocks[-1], change)

    if kind == "deepcache":
        order = [*blocks[:-1], stand_in(note), blocks[-1]]
    else:
        order = [stand_in(enter), *blocks, stand_in(leave)]
    with _in_place_of_blocks(transformer, network, order):
        yield kept


@contextmanager
def reusing(
    transformer: Any, kind: str, kept: Sequence[tuple[torch.Tensor, ...]]
) -> Iterator[None]:
    """Make calls of a transformer reuse what `keeping` collected, in its order."""
    network, blocks = _blocks_of(transformer)
    left = list(kept)
    if kind == "deepcache":
        given = _Streams(network, blocks[-1], lambda streams: left.pop(0))
        order = [given, blocks[-1]]
    else:

        def add(streams: list[torch.Tensor]) -> list[torch.Tensor]:
            return [now + then for now, then in zip(streams, left.pop(0), strict=True)]

        order = [_Streams(network, blocks[-1], add)]
    with _in_place_of_blocks(transformer, network, order):
        yield


def _blocks_of(transformer: Any) -> tuple[Network, list[nn.Module]]:
    network = network_of(transformer)
    if network.blocks is None:
        raise UsageError(
            f"cache: {type(transformer).__name__} has more than one list of blocks, which no cache"
            " knows. What to do: give no cache"
        )
    return network, list(getattr(transformer, network.blocks))


@contextmanager
def _in_place_of_blocks(
    transformer: Any, network: Network, order: Sequence[nn.Module]
) -> Iterator[None]:
    name = str(network.blocks)
    before = getattr(transformer, name)
    setattr(transformer, name, nn.ModuleList(order))
    try:
        yield
    finally:
        setattr(transformer, name, before)
