"""Each attention kernel against a reference in float64 on the host, and its time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpuport.aot.work import kernel_seconds
from tpuport.cost import KernelCompileError, count_jaxpr
from tpuport.cost.schedule import UnknownTripsError
from tpuport.foundation.errors import MissingExtraError
from tpuport.kernels.attention import AttentionOptions, BlockSizes, Mask, Shards, attend
from tpuport.kernels.attention.dispatch import dense_tiles
from tpuport.kernels.attention.problem import AttentionProblem, Parts
from tpuport.kernels.attention.sharded import attention
from tpuport.kernels.attention.tiles import DenseTiles, KernelTiles
from tpuport.measurement.bench import Bench, noise
from tpuport.measurement.records import Quantity, Result

# bf16 keeps 8 bits: operands, weights and two partial results are rounded to them.
LIMITS = {"bfloat16": 2e-2, "float32": 1e-4}
_NAMES = ("output", "gradient of queries", "gradient of keys", "gradient of values")
_TILE = 128
AXIS = "sequence"


@dataclass(frozen=True)
class KernelCheck:
    """One comparison of a kernel with its reference.

    Attributes:
        name: Name of the comparison.
        kernel: "splash", "blockwise", "dense" or "flash".
        mask: Name of a mask in `MASKS`.
        dtype: Dtype of queries, keys and values.
        softcap: See `attend`.
        strategy: How the sequence is sharded over all devices; None for one device.
        dropout: Share of the weights that is dropped.
    """

    name: str
    kernel: str
    mask: str = "full"
    dtype: str = "bfloat16"
    softcap: float | None = None
    strategy: Any = None
    dropout: float = 0.0


CHECKS = (
    KernelCheck("splash", "splash"),
    KernelCheck("splash, float32", "splash", "causal", "float32"),
    KernelCheck("splash, causal", "splash", "causal", softcap=5.0),
    KernelCheck("splash, window", "splash", "window"),
    KernelCheck("splash, segments", "splash", "segments"),
    KernelCheck("splash, padding", "splash", "padding"),
    KernelCheck("dense", "dense"),
    KernelCheck("dropout", "flash", "causal", "float32", dropout=0.25),
    KernelCheck("blockwise", "blockwise", "causal"),
    KernelCheck("blockwise, bias", "blockwise", "bias", "float32"),
)
SHARDED = (
    KernelCheck("all_gather", "splash", "causal", strategy="all_gather"),
    KernelCheck("ring", "splash", "causal", strategy="ring"),
    KernelCheck("ulysses", "splash", "causal", strategy="ulysses"),
)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention.

    Attributes:
        batch: Examples.
        heads: Query heads and key heads.
        lengths: Queries and keys.
        head_dim: Size of a head.
    """

    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    head_dim: int

    def arrays(self) -> list[np.ndarray]:
        """Draw queries, keys, values and the gradient of the output."""
        (hq, hkv), (sq, sk), rest = self.heads, self.lengths, (self.head_dim,)
        shapes = ((hq, sq), (hkv, sk), (hkv, sk), (hq, sq))
        return [noise((self.batch, *s, *rest), seed) for seed, s in enumerate(shapes)]


def shape_of(check: KernelCheck, bench: Bench) -> AttentionShape:
    """Return the sizes of a comparison: no whole blocks, unless the sequence is sharded."""
    head_dim = bench.size(128, 16)
    if check.strategy is not None:
        count = bench.device.count
        length = count * bench.size(512, 24)
        return AttentionShape(1, (count, count), (length, length), head_dim)
    key_heads = bench.size(2, 1)
    heads = key_heads if check.kernel == "dense" else 2 * key_heads
    return AttentionShape(
        1, (heads, key_heads), (bench.size(1000, 100), bench.size(1500, 140)), head_dim
    )


def compare(check: KernelCheck, bench: Bench) -> Iterator[Result]:
    """Compare output and gradients with the reference, by the largest error."""
    shape = shape_of(check, bench)
    rounded = [np.asarray(jnp.asarray(x, check.dtype), np.float64) for x in shape.arrays()]
    mask, seen = MASKS[check.mask](shape)
    kept: Any = 1.0
    if check.dropout:
        scores = (shape.batch, shape.heads[0], *shape.lengths)
        drawn = jax.random.bernoulli(_key(), 1 - check.dropout, scores)
        kept = np.asarray(drawn, np.float64) / (1 - check.dropout)
    wanted = reference(rounded, seen, check.softcap, kept)
    found = run_check(check, bench, shape, mask)
    errors = [_error(one, other) for one, other in zip(found, wanted, strict=True)]
    worst = max(range(len(errors)), key=lambda i: errors[i])
    words = f"{_NAMES[worst]} of {shape.lengths[0]} queries, {shape.lengths[1]} keys"
    if check.strategy is not None:
        words += f" on {bench.device.count} devices"
    limit = LIMITS[check.dtype]
    name = check.name if check.dtype in check.name else f"{check.name}, {check.dtype}"
    yield Result(f"kernel {check.name}", name, Quantity.ERROR, errors[worst], "", limit, words)


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest error, relative to the largest number; infinite where one is no number."""
    if not np.isfinite(found).all():
        return math.inf
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def run_check(
    check: KernelCheck, bench: Bench, shape: AttentionShape, mask: Mask
) -> list[np.ndarray]:
    """Return output and gradients of the kernel that is asked for."""
    q, k, v, grad = (jnp.asarray(x, check.dtype) for x in shape.arrays())

    @jax.jit
    def run(q: Any, k: Any, v: Any, grad: Any) -> Any:
        out, pull = jax.vjp(attention_of(check, bench, shape, mask), q, k, v)
        return out, *pull(grad)

    with jax.default_matmul_precision("highest"):
        return [np.asarray(x, np.float64) for x in run(q, k, v, grad)]


def attention_of(
    check: KernelCheck, bench: Bench, shape: AttentionShape, mask: Mask
) -> Callable[..., jax.Array]:
    """Return attention by the kernel that is asked for, as a function of queries, keys, values."""
    interpret = bench.device.platform != "tpu"
    if check.kernel == "dense":
        return lambda q, k, v: attention(_dense_problem(shape, interpret), q, k, v, Parts())
    kernel: Any = "auto" if check.kernel == "flash" else check.kernel
    options = AttentionOptions(kernel, interpret=interpret and kernel != "blockwise")
    if bench.small:
        options = replace(options, blocks=BlockSizes(_TILE, _TILE, _TILE))
    shards = None
    if check.strategy is not None:
        mesh = Mesh(np.array(bench.devices), (AXIS,))
        shards = Shards(mesh, sequence=(AXIS,))
        options = replace(options, sequence_parallel=check.strategy)
    given = {"softcap": check.softcap, "options": options, "shards": shards}
    drop = {"dropout": check.dropout, "key": _key()} if check.dropout else {}
    return lambda q, k, v: attend(q, k, v, mask, **given, **drop)


def _key() -> jax.Array:
    """Return the random key of dropout."""
    return jax.random.key(0)


def _dense_problem(shape: AttentionShape, interpret: bool) -> AttentionProblem:
    """Return a problem for the dense kernel with tiles so small that every chip holds them."""
    tiles = KernelTiles(_TILE, _TILE, _TILE, _TILE, _TILE)
    return AttentionProblem(
        *("dense", shape.head_dim**-0.5, None, None, None, *shape.lengths, tiles),
        dense=DenseTiles(q=_TILE, kv=2 * _TILE, kv_tile=_TILE),
        interpret=interpret,
        precision="default",
    )


def reference(
    arrays: list[np.ndarray], seen: np.ndarray, softcap: float | None, kept: Any = 1.0
) -> list[np.ndarray]:
    """Compute output and gradients of attention in float64 from the matrix of scores.

    Args:
        arrays: Queries, keys, values, and the gradient of the output.
        seen: Booleans, or a bias, that broadcast to (batch, heads, queries, keys). Each query sees
            a key.
        softcap: See `attend`.
        kept: Factors of the weights after the softmax.
    """
    q, k, v, grad = arrays
    share, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    k_all, v_all = (np.repeat(x, share, 1) for x in (k, v))
    scores = np.einsum("bhqd,bhkd->bhqk", q, k_all) * scale
    slope: Any = 1.0
    if softcap is not None:
        bent = np.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    scores = np.where(seen, scores, -np.inf) if seen.dtype == bool else scores + seen
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights * kept @ v_all
    d_weights = grad @ v_all.swapaxes(2, 3) * kept
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * slope * scale
    dk, dv = d_scores.swapaxes(2, 3) @ q, (weights * kept).swapaxes(2, 3) @ grad
    together = (x.reshape(*k.shape[:2], share, *k.shape[2:]).sum(2) for x in (dk, dv))
    return [out, d_scores @ k_all, *together]


def _everything(shape: AttentionShape) -> tuple[Mask, np.ndarray]:
    return Mask(), np.ones((1, 1, 1, 1), bool)


def _distance(shape: AttentionShape) -> np.ndarray:
    num_q, num_k = shape.lengths
    return np.arange(num_k)[None] - np.arange(num_q)[:, None]


def _causal(shape: AttentionShape) -> tuple[Mask, np.ndarray]:
    return Mask(causal=True), _distance(shape) <= 0


def _window(shape: AttentionShape) -> tuple[Mask, np.ndarray]:
    left, far = shape.lengths[1] // 4, _distance(shape)
    return Mask(window=(left, left)), (far >= -left) & (far <= left)


def _segments(shape: AttentionShape) -> tuple[Mask, np.ndarray]:
    num_q, num_k = shape.lengths
    q, k = (np.sort(np.arange(n) % 3)[None].astype(np.int32) for n in (num_q, num_k))
    mask = Mask(q_segments=jnp.asarray(q), kv_segments=jnp.asarray(k))
    return mask, q[:, None, :, None] == k[:, None, None, :]


def _padding(shape: AttentionShape) -> tuple[Mask, np.ndarray]:
    valid = np.arange(shape.lengths[1])[None] % 3 > 0
    return Mask(key_valid=jnp.asarray(valid)), valid[:, None, None, :]


def _bias(shape: AttentionShape) -> tuple[Mask, np.ndarray]:
    bias = noise((1, shape.heads[0], *shape.lengths), 9)
    held = jnp.asarray(bias)

    def blocks(q: Any, num_q: int, k: Any, num_k: int) -> jax.Array:
        return jax.lax.dynamic_slice(held, (0, 0, q, k), (1, held.shape[1], num_q, num_k))

    return Mask(blocks=blocks), bias.astype(np.float64)


MASKS: dict[str, Callable[[AttentionShape], tuple[Mask, np.ndarray]]] = {
    "full": _everything,
    "causal": _causal,
    "window": _window,
    "segments": _segments,
    "padding": _padding,
    "bias": _bias,
}


def times(bench: Bench) -> Iterator[Result]:
    """Measure a long forward pass of each kernel against the schedule that libtpu makes of it."""
    length, head_dim = bench.size(32768, 128), bench.size(128, 16)
    q = jnp.asarray(noise((1, 1, length, head_dim)), jnp.bfloat16)
    on_tpu = bench.device.platform == "tpu"
    for name, options, mask in (
        ("auto", AttentionOptions(interpret=not on_tpu), Mask()),
        ("splash", AttentionOptions("splash", interpret=not on_tpu), Mask()),
        ("splash", AttentionOptions("splash", interpret=not on_tpu), Mask(causal=True)),
    ):
        taken = dense_tiles(q, q, q, mask, softcap=None, options=options, shards=None)
        if name == "auto" and taken is None:
            continue

        def run(x: Any, k: Any, options: Any = options, mask: Mask = mask) -> jax.Array:
            return attend(x, k, k, mask, options=options)

        expected, words = _scheduled(run, q, bench)
        shown = f"{'dense' if taken else 'splash'}, {mask.kind}, {length} tokens"
        seconds = bench.seconds(run, q, q)
        yield Result(
            *("kernel times", shown, Quantity.SECONDS, seconds, "s", expected, words),
            feeds="kernel_factor",
        )


def _scheduled(run: Any, q: Any, bench: Bench) -> tuple[float | None, str]:
    """Return the time by libtpu's schedule of the kernel, or why there is none."""
    if bench.device.platform != "tpu" or bench.chip is None:
        return None, "only a TPU has a schedule to compare with"
    jaxpr = jax.make_jaxpr(run)(q, q)
    try:
        return kernel_seconds(jaxpr, count_jaxpr(jaxpr), bench.chip.name, 1), "libtpu's schedule"
    except (KernelCompileError, UnknownTripsError, MissingExtraError) as error:
        return None, f"no schedule: {str(error).splitlines()[0]}"
