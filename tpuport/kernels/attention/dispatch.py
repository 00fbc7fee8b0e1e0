"""`attend`, the entry point: it checks its arguments and chooses the kernel."""

import dataclasses
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention import dense, flash, random_bits
from tpuport.kernels.attention.blocks import chip_of, choose_tiles
from tpuport.kernels.attention.full import attend_full
from tpuport.kernels.attention.mask import Mask
from tpuport.kernels.attention.options import AttentionOptions, Shards
from tpuport.kernels.attention.problem import AttentionProblem, Parts, hoist
from tpuport.kernels.attention.sharded import attention
from tpuport.kernels.attention.tiles import DenseTiles, KernelTiles

# Rows of queries and of keys that blockwise attention handles at a time.
_BLOCKWISE = KernelTiles(q=512, kv=1024, kv_compute=1024, q_back=512, kv_back=1024)
_SPLASH_DTYPES = ("bfloat16", "float32")
# Reasons of `choose_kernel`.
CHOSEN, ANY_MASK = "chosen", "an arbitrary mask or bias"


class AttentionWarning(UserWarning):
    """Attention runs by a slower kernel than was asked for. The result is right."""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask = Mask(),  # noqa: B008 - frozen
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: Any = None,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
    shards: Shards | None = None,
) -> jax.Array:
    """Compute attention, softmax(scale q k^T + mask) v, by the kernel that the options name.

    Reverse-mode gradients reach q, k, v and the numbers that `mask.blocks` captured.

    Args:
        q: queries (B, Hq, Sq, D).
        k: keys (B, Hkv, Sk, D); Hkv divides Hq, and query head h uses key head h // (Hq // Hkv).
        v: values (B, Hkv, Sk, Dv).
        mask: who attends to whom. A query that may attend to nothing gives 0.
        scale: factor of the scores; 1 / sqrt(D) if None.
        softcap: scores s become softcap * tanh(s / softcap), before mask and bias.
        dropout: share of the weights that is dropped, the others scaled up.
        key: a `jax.random` key; needed for dropout.
        options: kernel, block sizes, and the strategy for a sharded sequence.
        shards: the mesh axes that the arrays are sharded over; None if nothing is sharded.

    Returns:
        (B, Hq, Sq, Dv), of q's dtype.

    Raises:
        UsageError: the shapes or the options do not go together.

    Warns:
        AttentionWarning: once for each reason that splash cannot serve, or an axis cannot be used.
    """
    check_arguments(q, k, v, mask, dropout=dropout, key=key)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    if options.kernel == "full":
        return attend_full(q, k, v, mask, scale=scale, softcap=softcap, dropout=dropout, key=key)
    shards = usable_shards(shards, q.shape)
    kernel, reasons = choose_kernel(q.dtype, mask, dropout, options, shards, key)
    _say_why(kernel, reasons, options, shards)
    low, high = mask.band()
    problem = AttentionProblem(
        *(kernel, scale, softcap, low, high, q.shape[2], k.shape[2], _BLOCKWISE),
        interpret=options.interpret,
        dropout=dropout,
        drawn_of=(q.shape[1], q.shape[2], k.shape[2]),
        shards=shards,
        sequence_parallel=options.sequence_parallel,
        precision=_precision(q),
    )
    out = _attend(problem, q, k, v, mask, key, options)
    if mask.query_valid is not None:
        out = jnp.where(jnp.asarray(mask.query_valid)[:, None, :, None], out, 0)
    return out


def _precision(q: jax.Array) -> str | None:
    """Return the precision of the kernel's products: the caller's setting for float32.

    For 16 bits there is one precision only, and a kernel that asks for another does not compile.
    """
    if q.dtype.itemsize < jnp.dtype("float32").itemsize:
        return "default"
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def _attend(
    problem: AttentionProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    key: Any,
    options: AttentionOptions,
) -> jax.Array:
    """Pad the sequences to divide among the chips, choose tiles, and run the kernel."""
    if problem.kernel == "splash":
        known = {"softcap": problem.softcap, "options": options, "shards": problem.shards}
        if found := dense_tiles(q, k, v, mask, **known):
            problem = dataclasses.replace(problem, kernel="dense", dense=found)
    batch, num_queries = q.shape[0], q.shape[2]
    problem, valid = _known_keys(problem, mask)
    pieces = _sequence_pieces(problem)
    q, k, v = (_pad_sequence(x, pieces, 2) for x in (q, k, v))
    # Queries that are padding have no id that matters; keys that are padding are past `num_keys`.
    parts = Parts(
        q_segments=_pad_sequence(_ids(mask.q_segments, batch), pieces, 1),
        kv_segments=_pad_sequence(_ids(mask.kv_segments, batch), pieces, 1),
        key_valid=_pad_sequence(_of_batch(valid, batch), pieces, 1),
        key=key,
    )
    problem = dataclasses.replace(problem, keys_whole=k.shape[2] == problem.num_keys)
    own_q, own_k = _own_lengths(problem, q.shape[2], k.shape[2], pieces)
    tiles = _choose_tiles(problem, q, mask, options, own_q, own_k)
    problem = dataclasses.replace(
        problem, tiles=tiles, keeps_bits=_keeps_bits(problem, q, own_q, own_k)
    )
    if mask.blocks is not None:
        padded = q.shape[2] != num_queries or not problem.keys_whole
        sizes = min(tiles.q, own_q), min(tiles.kv, own_k)
        within = (num_queries, problem.num_keys) if padded else None
        further, captured = hoist(mask.blocks, sizes, within)
        problem = dataclasses.replace(problem, further=further, fill=mask.fill)
        parts = dataclasses.replace(parts, captured=captured)
    out: Any = attention(problem, q, k, v, parts)
    return _over_sequence(problem, out)[:, :, :num_queries]


def _over_sequence(problem: AttentionProblem, out: jax.Array) -> jax.Array:
    """Shard the output over the sequence again, where "ulysses" had it sharded over heads.

    A sequence that the chips do not divide gets no constraint: the partitioner chooses better
    how to split it again.
    """
    shards = problem.shards
    if (
        shards is None
        or problem.sequence_parallel != "ulysses"
        or out.shape[2] % _sequence_size(problem)
    ):
        return out
    spec = P(shards.batch, shards.heads, shards.sequence)
    return jax.lax.with_sharding_constraint(out, NamedSharding(shards.mesh, spec))


def _known_keys(problem: AttentionProblem, mask: Mask) -> tuple[AttentionProblem, Any]:
    """Shorten the sequence where the keys' padding is static and at the end: it needs no mask."""
    valid: Any = mask.key_valid
    if not isinstance(valid, np.ndarray):
        return problem, None if valid is None else valid.astype(bool)
    valid = np.asarray(valid, bool)
    count = int(valid[0].sum())
    if np.array_equal(valid, np.broadcast_to(np.arange(valid.shape[1]) < count, valid.shape)):
        return dataclasses.replace(problem, num_keys=count), None
    return problem, valid


def _choose_tiles(
    problem: AttentionProblem,
    q: jax.Array,
    mask: Mask,
    options: AttentionOptions,
    own_q: int,
    own_k: int,
) -> KernelTiles:
    """Choose the tile sizes for one chip's share of the sequences."""
    if problem.kernel in ("splash", "dense"):
        choose = functools.partial(
            choose_tiles,
            chip=_chip(options, problem.shards),
            head_dim=q.shape[-1],
            dtype=q.dtype.name,
            num_queries=own_q,
            num_keys=own_k,
            override=options.blocks,
        )
        tiles = choose(mask=mask.kind)
        ends_within = own_k % tiles.kv or problem.num_keys < own_k or not problem.keys_whole
        # The last block is then masked, which takes more fast memory than what is tuned unmasked.
        return choose(mask="padding") if mask.kind == "full" and ends_within else tiles
    if options.blocks is None:
        return flash.TILES if problem.kernel == "flash" else _BLOCKWISE
    sizes = options.blocks
    return KernelTiles(sizes.q, sizes.kv, sizes.kv_compute, sizes.q, sizes.kv)


def _keeps_bits(problem: AttentionProblem, q: jax.Array, own_q: int, own_k: int) -> bool:
    """Return whether a chip keeps the bits of its dropout for the gradient."""
    axes: tuple[str, ...] = ()
    if problem.shards is not None:
        axes = problem.shards.batch + problem.shards.heads
        axes += problem.shards.sequence if problem.sequence_parallel == "ulysses" else ()
    across = math.prod(problem.shards.mesh.shape[a] for a in axes) if problem.shards else 1
    weights = q.shape[0] * q.shape[1] * own_q * own_k // across
    return problem.kernel == "flash" and flash.keeps_bits(weights)


def _own_lengths(problem: AttentionProblem, num_q: int, num_k: int, pieces: int) -> tuple[int, int]:
    """Return how many queries one chip handles, and how many keys at a time."""
    return num_q // pieces, num_k // pieces if problem.sequence_parallel == "ring" else num_k


def _sequence_pieces(problem: AttentionProblem) -> int:
    """Return the number of pieces that the sequence is split into while the kernel runs."""
    return 1 if problem.sequence_parallel == "ulysses" else _sequence_size(problem)


def _sequence_size(problem: AttentionProblem) -> int:
    """Return how many chips share the sequence."""
    if problem.shards is None:
        return 1
    return math.prod(problem.shards.mesh.shape[axis] for axis in problem.shards.sequence)


def _pad_sequence(x: Any, pieces: int, axis: int) -> Any:
    """Pad the sequence with zeros at its end, so that it divides among the chips."""
    if x is None or x.shape[axis] % pieces == 0:
        return x
    more = -x.shape[axis] % pieces
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])


def _of_batch(x: Any, batch: int) -> Any:
    """Broadcast (1 or B, S) to (B, S)."""
    return None if x is None else jnp.broadcast_to(jnp.asarray(x), (batch, x.shape[1]))


def _ids(segments: Any, batch: int) -> Any:
    return None if segments is None else _of_batch(segments, batch).astype(jnp.int32)


def choose_kernel(
    dtype: Any,
    mask: Mask,
    dropout: float,
    options: AttentionOptions,
    shards: Shards | None,
    key: Any = None,
) -> tuple[str, tuple[str, ...]]:
    """Return the kernel that `attend` takes when the score matrix is not asked for, and why.

    Args:
        dtype: dtype of the operands.
        mask: as `attend` takes it.
        dropout: as `attend` takes it.
        options: options whose kernel is "auto", "splash" or "blockwise".
        shards: as `attend` takes them.
        key: as `attend` takes it.

    Returns:
        "splash", "flash" or "blockwise", and all reasons for it: `CHOSEN`, each thing that splash
        cannot serve (`ANY_MASK` for a mask), or the platform. `dense_tiles` may replace splash
        afterwards.
    """
    chosen = (CHOSEN,) if options.kernel != "auto" else ()
    checks = (
        (ANY_MASK, mask.blocks is not None),
        ("dropout", bool(dropout)),
        (f"{jnp.dtype(dtype).name} operands", jnp.dtype(dtype).name not in _SPLASH_DTYPES),
    )
    refused = tuple(name for name, holds in checks if holds)
    platform = _platform(options, shards)
    runs = options.kernel != "auto" or platform == "tpu" or options.interpret
    if runs and options.kernel == "auto" and refused == ("dropout",):
        in_ring = options.sequence_parallel == "ring" and shards is not None and shards.sequence
        if not in_ring and random_bits.draws_by_element(key):
            return "flash", refused
    if options.kernel == "blockwise" or refused:
        return "blockwise", chosen + refused
    if not runs:
        return "blockwise", (f"splash is for TPUs, and this program is for {platform}",)
    return "splash", chosen


def dense_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    softcap: float | None,
    options: AttentionOptions,
    shards: Shards | None,
) -> DenseTiles | None:
    """Return the dense kernel's tiles where `attend` takes it in place of splash, else None.

    Args:
        q: queries (B, Hq, Sq, D).
        k: keys (B, Hkv, Sk, D).
        v: values (B, Hkv, Sk, Dv).
        mask: as `attend` takes it.
        softcap: as `attend` takes it.
        options: as `attend` takes them; naming a kernel or its blocks rules this kernel out.
        shards: as `usable_shards` returns them.
    """
    if options.kernel != "auto" or options.blocks is not None or softcap is not None:
        return None
    if mask.band() != (None, None) or mask.q_segments is not None:
        return None
    across = 1 if shards is None else math.prod(shards.mesh.shape[a] for a in shards.sequence)
    return dense.choose(
        chip=_chip(options, shards),
        head_dims=(q.shape[3], v.shape[3]),
        dtype=q.dtype.name,
        num_queries=q.shape[2] // (1 if options.sequence_parallel == "ulysses" else across),
        num_keys=k.shape[2] // (across if options.sequence_parallel == "ring" else 1),
    )


def _say_why(
    kernel: str, reasons: tuple[str, ...], options: AttentionOptions, shards: Shards | None
) -> None:
    """Warn, or raise, if splash was wanted but another kernel runs.

    Raises:
        UsageError: the options name splash, and it cannot serve.
    """
    if kernel in ("splash", "flash") or options.kernel == "blockwise":
        return
    reason = next(reason for reason in reasons if reason != CHOSEN)
    if options.kernel == "splash":
        raise not_for_splash(reason)
    if options.interpret or _platform(options, shards) == "tpu":
        _say_once(f"Splash attention cannot serve {reason}: blockwise attention is used, slower")


def not_for_splash(reason: str) -> UsageError:
    """Return the error for options that name splash where it cannot serve."""
    return UsageError(
        f"Splash attention cannot serve {reason}. What to do: leave the kernel to 'auto', or"
        " choose 'blockwise'"
    )


def _platform(options: AttentionOptions, shards: Shards | None) -> str:
    if options.platform is not None:
        return options.platform
    return jax.default_backend() if shards is None else shards.mesh.devices.flat[0].platform


def _chip(options: AttentionOptions, shards: Shards | None) -> str:
    if options.chip is not None:
        return options.chip
    device = jax.devices()[0] if shards is None else shards.mesh.devices.flat[0]
    return chip_of(device.device_kind)


def usable_shards(shards: Shards | None, shape: tuple[int, ...]) -> Shards | None:
    """Keep the axes that divide batch and heads; chips along the others repeat the same work.

    Args:
        shards: axes of a mesh, or None.
        shape: shape of the queries: batch, heads and more.

    Warns:
        AttentionWarning: once for each axis that does not divide a dim.
    """
    if shards is None:
        return None
    kept = {}
    for name, length in (("batch", shape[0]), ("heads", shape[1])):
        kept[name], left = (), length
        for axis in getattr(shards, name):
            size = shards.mesh.shape[axis]
            if left % size:
                _say_once(
                    f"Attention has {name} of {length}, which the mesh axis {axis!r} of {size} does"
                    " not divide: its chips compute the same"
                )
            elif size > 1:
                kept[name], left = (*kept[name], axis), left // size
    sequence = tuple(a for a in shards.sequence if shards.mesh.shape[a] > 1)
    return Shards(shards.mesh, kept["batch"], kept["heads"], sequence)


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, AttentionWarning, stacklevel=4)


def check_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, *, dropout: float, key: Any
) -> None:
    """Raise `UsageError` for shapes that do not go together."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise UsageError(
            "attend needs queries, keys and values of 4 dimensions (batch, heads, sequence, size),"
            f" not {q.shape}, {k.shape} and {v.shape}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UsageError(
            "attend needs queries (B, Hq, Sq, D), keys (B, Hkv, Sk, D) and values (B, Hkv, Sk, Dv),"
            f" not {q.shape}, {k.shape} and {v.shape}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UsageError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads. What to do: give a"
            " number of key heads that divides that of the query heads"
        )
    if (mask.q_segments is None) != (mask.kv_segments is None):
        raise UsageError("A Mask needs q_segments and kv_segments, or neither")
    if dropout and key is None:
        raise UsageError("Dropout needs a key. What to do: pass key=jax.random.key(seed)")
