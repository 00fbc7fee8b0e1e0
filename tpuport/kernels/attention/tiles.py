"""Tile sizes of the kernels, forward and backward."""

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


@dataclass(frozen=True)
class DenseTiles:
    """Rows of queries and of keys that the kernel of `dense.py` handles at a time.

    Args:
        q: queries a step.
        kv: keys a step.
        kv_tile: keys of one product; the last one of a step may have fewer.
    """

    q: int
    kv: int
    kv_tile: int
