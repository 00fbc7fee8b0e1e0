"""Tile sizes of one kernel, forward and backward."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelTiles:
    """Rows of queries and of keys that a kernel handles at a time.

    Args:
        q: queries a step.
        kv: keys brought in at a time.
        kv_compute: keys a multiplication.
        q_back: queries a step, backward.
        kv_back: keys a step, backward.
    """

    q: int
    kv: int
    kv_compute: int
    q_back: int
    kv_back: int
