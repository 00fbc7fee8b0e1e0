"""Block sizes of the splash kernel: tuned ones from a table, defaults for kernels not in it.

`block_table.json` is a list of entries, written by the tuner: chip, head_dim, dtype, mask, block_q,
block_kv, block_kv_compute, share_of_ceiling and share_of_peak, and where they were tuned
block_q_backward and block_kv_backward. Of several entries that fit, the one with the highest
share_of_ceiling is taken.
"""

import functools
import json
from importlib import resources
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention.options import BlockSizes
from tpuport.kernels.attention.tiles import KernelTiles

# The kernel's last dimension is a multiple of it.
LANES = 128
# jax's name of a device -> the chip's.
CHIPS = {
    "TPU v4": "v4",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
}
# Where the table says nothing: what compiles within the chip's fast memory that a kernel may have
# by default (16 MiB up to v5, 32 MiB from v6e), forward and backward.
_SMALL = KernelTiles(q=1024, kv=1024, kv_compute=512, q_back=512, kv_back=512)
_LARGE = KernelTiles(q=2048, kv=2048, kv_compute=1024, q_back=1024, kv_back=1024)
_LARGE_CHIPS = ("v6e", "v7x")
# Queries a step of a kernel that masks. 3072 by 2048 fits a v6e in some programs alone: at 112,856
# keys libtpu 0.0.42 runs out of fast memory.
_MOST_MASKED = 2048


def chip_of(device_kind: str) -> str:
    """Return a chip's short name, such as "v6e", from jax's name of the device."""
    return CHIPS.get(device_kind, device_kind)


def choose_tiles(
    *,
    chip: str,
    head_dim: int,
    dtype: str,
    mask: str,
    num_queries: int,
    num_keys: int,
    override: BlockSizes | None = None,
) -> KernelTiles:
    """Choose the block sizes of one kernel, valid for the lengths of its sequences.

    Args:
        chip: short name, such as "v6e".
        head_dim: size of one head.
        dtype: dtype of the operands, such as "bfloat16".
        mask: kind of mask, as `Mask.kind` names it.
        num_queries: queries that one chip handles.
        num_keys: keys that one chip handles at a time.
        override: sizes that the caller wants; None takes the table's.

    Raises:
        UsageError: sizes that the kernel cannot have.
    """
    if override is not None:
        check_sizes(override)
    tuned = _find(chip, head_dim, dtype, mask)
    wanted = _tiles_of(override, tuned) if override is not None else tuned
    kv, compute = _fit_keys(wanted.kv, wanted.kv_compute, num_keys)
    kv_back, _ = _fit_keys(wanted.kv_back, wanted.kv_back, num_keys)
    return KernelTiles(
        q=_fit(wanted.q, num_queries),
        kv=kv,
        kv_compute=compute,
        q_back=_fit(wanted.q_back, num_queries),
        kv_back=kv_back,
    )


def check_sizes(sizes: BlockSizes) -> None:
    """Raise `UsageError` for sizes that the kernel cannot have."""
    for name, size in (("q", sizes.q), ("kv", sizes.kv), ("kv_compute", sizes.kv_compute)):
        if size <= 0 or size % LANES:
            raise UsageError(
                f"BlockSizes({name}={size}) is not a multiple of {LANES}. What to do: choose one"
            )
    if sizes.kv % sizes.kv_compute:
        raise UsageError(
            f"BlockSizes(kv={sizes.kv}, kv_compute={sizes.kv_compute}): kv_compute must divide kv"
        )


def _tiles_of(sizes: BlockSizes, tuned: KernelTiles) -> KernelTiles:
    """Return a caller's sizes; those of the backward pass never exceed what is known to compile."""
    return KernelTiles(
        q=sizes.q,
        kv=sizes.kv,
        kv_compute=sizes.kv_compute,
        q_back=min(sizes.q, tuned.q_back),
        kv_back=min(sizes.kv, tuned.kv_back),
    )


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    """Return the entries of `block_table.json`."""
    text = (
        resources.files("tpuport.kernels.attention")
        .joinpath("block_table.json")
        .read_text(encoding="utf-8")
    )
    return tuple(json.loads(text))


def _find(chip: str, head_dim: int, dtype: str, mask: str) -> KernelTiles:
    """Return the best entry of the table for exactly this kernel, or the default."""
    default = _LARGE if chip in _LARGE_CHIPS and dtype == "bfloat16" else _SMALL
    key = {"chip": chip, "head_dim": head_dim, "dtype": dtype, "mask": mask}
    found = [
        entry
        for entry in table()
        if key.items() <= entry.items() and (mask == "full" or entry["block_q"] <= _MOST_MASKED)
    ]
    if not found:
        return default
    best = max(found, key=lambda e: e["share_of_ceiling"])
    return KernelTiles(
        q=best["block_q"],
        kv=best["block_kv"],
        kv_compute=best["block_kv_compute"],
        q_back=best.get("block_q_backward", default.q_back),
        kv_back=best.get("block_kv_backward", default.kv_back),
    )


def _fit(wanted: int, length: int) -> int:
    """Return the size of at most `wanted` with the least cost: little padding, few small blocks."""
    return min(_candidates(wanted), key=lambda size: _padded(size, length) * (1 + 64 / size))


def _fit_keys(wanted: int, compute: int, length: int) -> tuple[int, int]:
    """Choose a block of keys as `_fit` does, and the largest part of it to multiply at once."""

    def cost(size: int) -> float:
        part = _largest_part(size, compute)
        return _padded(size, length) * (1 + 64 / size + 64 / part)

    size = min(_candidates(wanted), key=cost)
    return size, _largest_part(size, compute)


def _candidates(wanted: int) -> list[int]:
    """Return the sizes to choose from; large ones only where their parts fill the matrix unit."""
    fine = range(LANES, min(wanted, 8 * LANES) + 1, LANES)
    return [*fine, *range(12 * LANES, wanted, 4 * LANES), wanted]


def _padded(size: int, length: int) -> int:
    """Return a sequence's length rounded up to full blocks."""
    return -(-max(length, 1) // size) * size


def _largest_part(size: int, most: int) -> int:
    """Return the largest multiple of the lanes that divides `size` and is at most `most`."""
    return max(p for p in range(LANES, min(size, most) + 1, LANES) if size % p == 0)
