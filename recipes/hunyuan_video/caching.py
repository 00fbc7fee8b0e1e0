"""Denoising steps that reuse the block outputs of earlier steps, as upstream's three caches do.

The transformer is not rewritten: its list of blocks is replaced for the length of one call.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from recipes.hunyuan_video.networks import Network, network_of
from tpuport.foundation.errors import UsageError

KINDS = ("deepcache", "teacache", "taylorcache")
# The highest difference of "taylorcache" (angelslim, TaylorCacheHelper, max_order). Its helper
# splits values in low and high frequencies and continues both alike, which is the same as neither.
_ORDER = 2
Values = list[tuple[Any, ...]]


@dataclass(frozen=True)
class StepCache:
    """The steps that are computed in full, and what the others reuse.

    "deepcache" runs only the last block, on the input it had in the last full step. "teacache" runs
    no block: it adds the difference that all blocks made in that step again (Liu et al. 2024,
    arXiv:2411.19108). "taylorcache" runs no block either: it continues their result by its first
    two differences between full steps (Liu et al. 2025, arXiv:2503.06923). All use upstream's fixed
    steps (hyvideo, generate.py --cache_start_step and so on).

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
        if self.kind == "taylorcache" and self.start == 0 and self.interval > 1 and self.end > 1:
            raise UsageError(
                "cache_start=0 with taylorcache: expected at least 1, as it continues results from"
                " that of step 1 on"
            )

    def is_full(self, step: int) -> bool:
        """Return whether a step, counted from 0, is computed by all blocks."""
        if not self.start <= step < self.end:
            return True
        # Step 0 has no earlier step to reuse.
        return step == 0 or (step - self.start) % self.interval == 0

    def last_full(self, step: int) -> int:
        """Return the last step computed by all blocks before a later one."""
        return next(earlier for earlier in reversed(range(step)) if self.is_full(earlier))


class Kept:
    """What full steps of a run leave for those that reuse it, one entry for each network call.

    Args:
        cache: The steps.
    """

    def __init__(self, cache: StepCache) -> None:
        self._cache = cache
        self._values: list[Any] = []
        # By call, the first stream after the last block and its differences by steps.
        self._differences: list[list[jax.Array]] = []

    def drop(self) -> None:
        """Free what the next full step replaces."""
        self._values = []

    def take(self, step: int, values: Values) -> None:
        """Keep what `keeping` collected in a full step."""
        if self._cache.kind != "taylorcache":
            self._values = values
            return
        self._values = [others for _, *others in values]
        if step > 0:  # upstream's helper begins with the second step, too
            before = self._differences or [[] for _ in values]
            distance = step - self._cache.last_full(step)
            self._differences = [
                _extended(_like(known, value[0]), value[0], distance)
                for known, value in zip(before, values, strict=True)
            ]

    def at(self, step: int) -> Values:
        """Return what a step reuses, as `reusing` takes it."""
        if self._cache.kind != "taylorcache":
            return self._values
        ahead = step - self._cache.last_full(step)
        streams = [_continued(known, ahead) for known in self._differences]
        return [(s, *others) for s, others in zip(streams, self._values, strict=True)]

    def saved(self) -> dict[str, jax.Array]:
        """Return by name what a full step needs of those before it."""
        return {
            f"differences.{call}.{order}": value
            for call, known in enumerate(self._differences)
            for order, value in enumerate(known)
        }

    def restore(self, found: Mapping[str, jax.Array]) -> None:
        """Go on from what `saved` returned; other names are left alone."""
        names = [name.split(".")[1:] for name in found if name.startswith("differences.")]
        calls = 1 + max((int(call) for call, _ in names), default=-1)
        self._differences = [
            [found[f"differences.{n}.{k}"] for k in range(sum(int(c) == n for c, _ in names))]
            for n in range(calls)
        ]


def _like(known: list[jax.Array], value: jax.Array) -> list[jax.Array]:
    """Put values on the devices that another one is on, where those of a saved run may not be."""
    where = value.sharding
    return [one if one.sharding == where else jax.device_put(one, where) for one in known]


@partial(jax.jit, donate_argnums=0)
def _extended(known: list[jax.Array], value: jax.Array, distance: int) -> list[jax.Array]:
    """Return a value and its differences, from those at the full step that many steps before."""
    found = [value]
    for before in known[:_ORDER]:
        change = found[-1].astype(jnp.float32) - before.astype(jnp.float32)
        found.append((change / distance).astype(value.dtype))
    return found


@jax.jit
def _continued(known: list[jax.Array], ahead: int) -> jax.Array:
    """Return the value some steps after the last full one, by its Taylor polynomial."""
    terms = [
        value.astype(jnp.float32) * (ahead**order / math.factorial(order))
        for order, value in enumerate(known)
    ]
    return jnp.asarray(sum(terms)).astype(known[0].dtype)


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
    elif kind == "taylorcache":
        order = [*blocks, stand_in(note)]
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
    if kind in ("deepcache", "taylorcache"):
        given = _Streams(network, blocks[-1], lambda streams: left.pop(0))
        order = [given, blocks[-1]] if kind == "deepcache" else [given]
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
