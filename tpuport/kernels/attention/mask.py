"""Masks described by their structure, never as a matrix of the scores' size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# A tile of any further mask or bias: (q_start, q_size, k_start, k_size) -> an array that broadcasts
# to (batch, query heads, q_size, k_size). The starts may be traced numbers, the sizes never are.
Blocks = Callable[[Any, int, Any, int], jax.Array]


@dataclass(frozen=True, eq=False)
class Mask:
    """Structure of a mask: a pair of query and key is seen if every condition holds.

    A query that may attend to nothing gives 0, as in torch.

    Args:
        causal: query i sees key j only if j <= i + offset.
        offset: where the queries stand among the keys. Also shifts `window`.
        window: (left, right): query i sees key j only if i + offset - left <= j <= i + offset +
            right. None on a side means no limit there.
        q_segments: ids (batch, queries), any int32; a query attends only to keys of its own id.
            Blocks that have no id in common are skipped where ids rise.
        kv_segments: ids (batch, keys), int32; given if and only if `q_segments` is.
        key_valid: booleans (batch or 1, keys); False is a key that nobody attends to. A numpy array
            is known when the program is compiled, and costs less than a traced one.
        query_valid: booleans (batch or 1, queries); False is a query that attends to nothing.
        blocks: any further mask (booleans, False is not seen) or bias (numbers, added to the
            scaled scores), one tile at a time.
        fill: what a score becomes where booleans of `blocks` are False, or numbers plus infinity;
            None if it then does not count. A finite number counts, as it does in a row of such
            numbers alone.
    """

    causal: bool = False
    offset: int = 0
    window: tuple[int | None, int | None] | None = None
    q_segments: Any = None
    kv_segments: Any = None
    key_valid: Any = None
    query_valid: Any = None
    blocks: Blocks | None = None
    fill: float | None = None

    @property
    def kind(self) -> str:
        """Return the structure's name, by which block sizes are chosen."""
        if self.q_segments is not None:
            return "segments"
        if self.window is not None:
            return "window"
        if self.causal:
            return "causal"
        return "full" if self.key_valid is None else "padding"

    def band(self) -> tuple[int | None, int | None]:
        """Return (lowest, highest) of j - i that `causal`, `window` and `offset` together allow."""
        left, right = self.window or (None, None)
        low = None if left is None else self.offset - left
        limits = [self.offset + r for r in (right, 0 if self.causal else None) if r is not None]
        return low, min(limits, default=None)

    def tile(self, q_start: Any, q_size: int, k_start: Any, k_size: int) -> jax.Array | None:
        """Return which pairs of this tile are seen, `blocks` apart.

        Booleans that broadcast to (batch, 1, q, k); None if nothing limits the tile.
        """
        q_ids = q_start + jnp.arange(q_size, dtype=jnp.int32)[:, None]
        k_ids = k_start + jnp.arange(k_size, dtype=jnp.int32)[None, :]
        low, high = self.band()
        parts = []
        if low is not None:
            parts.append((k_ids - q_ids >= low)[None, None])
        if high is not None:
            parts.append((k_ids - q_ids <= high)[None, None])
        if self.q_segments is not None:
            q_part = _slice(self.q_segments, q_start, q_size)
            parts.append(
                (q_part[:, :, None] == _slice(self.kv_segments, k_start, k_size)[:, None])[:, None]
            )
        if self.key_valid is not None:
            parts.append(_slice(self.key_valid, k_start, k_size)[:, None, None, :])
        if self.query_valid is not None:
            parts.append(_slice(self.query_valid, q_start, q_size)[:, None, :, None])
        seen = None
        for part in parts:
            seen = part if seen is None else seen & part
        return seen


def _slice(array: Any, start: Any, size: int) -> jax.Array:
    """Return `size` columns of (batch, sequence) from `start`."""
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(array), start, size, axis=1)
