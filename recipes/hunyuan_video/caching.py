"""Steps that reuse what the blocks gave in an earlier step, as upstream's two caches do.

Nothing of a transformer is rewritten: for one call its list of blocks is another one.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.hunyuan_video.networks import Network, network_of
from tpuport.errors import UsageError

KINDS = ("deepcache", "teacache")


@dataclass(frozen=True)
class StepCache:
    """Which steps are computed in full, and what the others reuse.

    "deepcache" runs the last block alone, on what entered it in the last full step. "teacache" runs
    no block: what all of them added to the tokens in that step is added again (Liu et al. 2024,
    arXiv:2411.19108). The steps are upstream's fixed ones for both (hyvideo, generate.py
    --cache_start_step and so on).

    Attributes:
        kind: a name of `KINDS`.
        start: the first step that could reuse; those before are full.
        end: the first step after which all are full again.
        interval: of the steps from start to end every so many are full.
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
        """Whether a step, counted from 0, is computed by all blocks."""
        if not self.start <= step < self.end:
            return True
        # Nothing is kept before the first step.
        return step == 0 or (step - self.start) % self.interval == 0


class _Streams(nn.Module):
    """Stands in a list of blocks, and takes a block's arguments.

    Args:
        network: what the blocks take and return.
        like: one of the blocks.
        change: makes the streams of the streams that enter.
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
        """What a block would return, if it made of the streams what `change` makes."""
        given = self._signature.bind(None, *args, **kwargs).arguments
        found = self._change([given[name] for name in self._network.streams])
        return found[0] if len(found) == 1 else tuple(found)


@contextmanager
def keeping(transformer: Any, kind: str) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """While it holds, each call of a transformer adds what a later step may reuse to the list."""
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
    """While it holds, calls of a transformer reuse what `keeping` listed, in its order."""
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
