"""One attention kernel by itself, for a tuner of block sizes to time."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention.blocks import choose_tiles
from tpuport.kernels.attention.dispatch import attend
from tpuport.kernels.attention.mask import Mask
from tpuport.kernels.attention.options import AttentionOptions, BlockSizes
from tpuport.kernels.attention.schedule import NOBODY, Piece, ScheduleBand, SegmentIds, make_pieces
from tpuport.kernels.attention.splash import FEW_BLOCKS
from tpuport.kernels.attention.tiles import KernelTiles

# The masks that block sizes are chosen by: `Mask.kind`.
KINDS = ("full", "causal", "window", "padding", "segments")


@dataclass(frozen=True)
class KernelCase:
    """One chip's share of an attention, for one example.

    Args:
        chip: short name, such as "v6e".
        num_heads: query heads.
        num_queries: queries.
        num_keys: keys.
        head_dim: size of a head.
        dtype: dtype of the operands.
        mask: one of `KINDS`; a window reaches back an eighth of the keys; padding and segments are
            traced inputs of the program, and the last key is then not seen.
        blocks: tile sizes; None takes those that `attend` would choose.
        num_kv_heads: key heads; as many as query heads if None.
        backward: whether gradients are computed too.
    """

    chip: str
    num_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    dtype: str = "bfloat16"
    mask: str = "full"
    blocks: BlockSizes | None = None
    num_kv_heads: int | None = None
    backward: bool = False


@dataclass(frozen=True)
class CallSteps:
    """The grid of one call of the forward kernel.

    Args:
        masked: whether the kernel masks the blocks it visits.
        steps: steps of the grid.
        active: steps that compute, in all runs together.
        runs: number of times the kernel is called.
    """

    masked: bool
    steps: int
    active: int
    runs: int = 1


@dataclass(frozen=True)
class BuiltKernel:
    """A case to trace, compile and time.

    Args:
        function: takes arrays like `args`; returns the output, or the gradients of q, k and v.
        args: shapes and dtypes of the arguments.
        blocks: tile sizes that the kernel uses.
        calls: calls of the forward kernel, in order.
        flops: operations of the forward products, unseen scores left out.
    """

    function: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    blocks: BlockSizes
    calls: tuple[CallSteps, ...]
    flops: int


def build_kernel(case: KernelCase) -> BuiltKernel:
    """Build the kernel of a case for one chip; lower it for that chip, or inside `shard_map`.

    Raises:
        UsageError: the mask is unknown, or the kernel cannot have the block sizes.
    """
    if case.mask not in KINDS:
        raise UsageError(
            f"There is no kind of mask {case.mask!r}. What to do: choose one of {', '.join(KINDS)}"
        )
    tiles = choose_tiles(
        chip=case.chip,
        head_dim=case.head_dim,
        dtype=case.dtype,
        mask=case.mask,
        num_queries=case.num_queries,
        num_keys=case.num_keys,
        override=case.blocks,
    )
    options = AttentionOptions(kernel="splash", chip=case.chip, blocks=case.blocks)
    band = _band(case)
    window = None if band.low is None else (-band.low, 0)
    mask = Mask(causal=case.mask == "causal", offset=band.shift, window=window)

    def forward(q: Any, k: Any, v: Any, extra: Any = None) -> jax.Array:
        now = mask
        if case.mask == "segments":
            ids = extra[:, : case.num_queries], extra[:, : case.num_keys]
            now = dataclasses.replace(mask, q_segments=ids[0], kv_segments=ids[1])
        elif case.mask == "padding":
            now = dataclasses.replace(mask, key_valid=extra)
        return attend(q, k, v, now, options=options)

    def gradients(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        out, pull = jax.vjp(lambda *qkv: forward(*qkv, *extra), q, k, v)
        return pull(out)

    num_blocks = -(-case.num_queries // tiles.q), -(-case.num_keys // tiles.kv)
    ids = _ids(case, tiles)
    pieces = make_pieces(band, num_blocks, (tiles.q, tiles.kv), ids=ids)
    # Where there are few blocks, ids are compared in all of them.
    all_masked = case.mask == "segments" and ids is None
    return BuiltKernel(
        function=gradients if case.backward else forward,
        args=_args(case),
        blocks=BlockSizes(tiles.q, tiles.kv, tiles.kv_compute),
        calls=tuple(_steps(piece, num_blocks[0], case.num_heads, all_masked) for piece in pieces),
        flops=4 * case.head_dim * case.num_heads * _seen(band),
    )


def _ids(case: KernelCase, tiles: KernelTiles) -> SegmentIds | None:
    """Return the ids of one segment without the last key; None if ids would skip no block."""
    if case.mask != "segments" or case.num_keys <= FEW_BLOCKS * tiles.kv:
        return None
    q_size, kv_size = (
        -(-length // block) * block
        for length, block in ((case.num_queries, tiles.q), (case.num_keys, tiles.kv))
    )
    seen = jnp.arange(kv_size) < case.num_keys - 1
    return SegmentIds(jnp.zeros(q_size, jnp.int32), jnp.where(seen, 0, NOBODY))


def _steps(piece: Piece, rows: int, heads: int, all_masked: bool) -> CallSteps:
    """Count the steps of one call of the kernel."""
    in_rounds = piece.rounds is not None
    block_mask: Any = piece.info.block_mask
    width = piece.round_size if in_rounds else block_mask.shape[-1]
    return CallSteps(
        masked=piece.at_edge or all_masked,
        steps=heads * rows * width,
        active=heads * int(block_mask.sum()),
        runs=int(piece.rounds) if in_rounds else 1,
    )


def _band(case: KernelCase) -> ScheduleBand:
    """Return the band of keys that the queries see; the last query stands at the last key."""
    shift = case.num_keys - case.num_queries
    low = -(case.num_keys // 8) if case.mask == "window" else None
    high = 0 if case.mask in ("causal", "window") else None
    # Keys that may be padding: the last block is masked, as it is when the program runs.
    num_keys = case.num_keys - 1 if case.mask == "padding" else case.num_keys
    return ScheduleBand(low, high, shift, case.num_queries, num_keys)


def _seen(band: ScheduleBand) -> int:
    """Count the pairs of a query and a key that attend."""
    places = np.arange(band.num_queries, dtype=np.int64) + band.shift
    last = np.full_like(places, band.num_keys - 1)
    if band.high is not None:
        last = np.minimum(last, places + band.high)
    first = np.zeros_like(places) if band.low is None else np.maximum(places + band.low, 0)
    return int(np.maximum(last - first + 1, 0).sum())


def _args(case: KernelCase) -> tuple[jax.ShapeDtypeStruct, ...]:
    kv_heads = case.num_kv_heads or case.num_heads
    shape = jax.ShapeDtypeStruct
    args = [
        shape((1, heads, length, case.head_dim), jnp.dtype(case.dtype))
        for heads, length in (
            (case.num_heads, case.num_queries),
            (kv_heads, case.num_keys),
            (kv_heads, case.num_keys),
        )
    ]
    if case.mask == "segments":
        args.append(shape((1, max(case.num_queries, case.num_keys)), jnp.dtype("int32")))
    elif case.mask == "padding":
        args.append(shape((1, case.num_keys), jnp.dtype("bool")))
    return tuple(args)
