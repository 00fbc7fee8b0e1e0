"""Every kernel against float64 in numpy: value and gradients, both dtypes, sizes of no whole block.

The kernels run in Pallas' interpreter. "dense" has splash's backward kernels, and those of splash
and "flash" (dropout) are Pallas too; "blockwise" is plain jax, for what they do not serve.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuport.kernels.attention import AttentionOptions, BlockSizes, Mask, attend, dense
from tpuport.kernels.attention.tiles import DenseTiles

pytestmark = pytest.mark.filterwarnings(
    "ignore::tpuport.kernels.attention.dispatch.AttentionWarning"
)

# Relative to what rounding errors add up to if they are independent. float32 has 24 bits, and sums
# of some hundred terms in another order; bfloat16 rounds operands, weights and partial results.
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
RATE = 0.3


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention and its mask."""

    lengths: tuple[int, int]
    head_dims: tuple[int, int]
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    mask: dict[str, Any] = field(default_factory=dict)
    softcap: float | None = None

    @property
    def name(self) -> str:
        parts = [*self.lengths, *self.head_dims, *self.heads, self.batch, *self.mask]
        return "-".join(map(str, parts)) + ("" if self.softcap is None else "-capped")


def ids(length: int) -> np.ndarray:
    return np.arange(length)[None].astype(np.int32) * 3 // length


# Heads of 40, 64, 72, 80, 96 and 128 numbers; one query, one more and one less than a block of 128,
# whole blocks; groups of heads.
SHAPES = (
    Sizes((1, 131), (40, 40), (4, 2), 2),
    Sizes((129, 127), (72, 72), (3, 1), mask={"causal": True, "offset": 3}),
    Sizes((130, 257), (64, 80), (2, 2), mask={"key_valid": np.arange(257)[None] % 3 > 0}),
    Sizes((256, 128), (128, 96), mask={"window": (30, 9)}, softcap=3.0),
    Sizes((200, 300), (96, 128), mask={"q_segments": ids(200), "kv_segments": ids(300)}),
)
TILES = BlockSizes(128, 128, 128)
OPTIONS = {
    "splash": AttentionOptions("splash", interpret=True, blocks=TILES),
    "dense": AttentionOptions(interpret=True, chip="v6e"),
    "flash": AttentionOptions(interpret=True, blocks=TILES),
    "blockwise": AttentionOptions("blockwise", blocks=BlockSizes(48, 80, 80)),
}


def seen_of(sizes: Sizes) -> np.ndarray:
    """Who attends to whom, written out: (batch, 1, queries, keys)."""
    num_q, num_k = sizes.lengths
    mask, offset = sizes.mask, sizes.mask.get("offset", 0)
    far = np.arange(num_k)[None] - np.arange(num_q)[:, None] - offset
    seen = np.ones((sizes.batch, num_q, num_k), bool)
    if mask.get("causal"):
        seen &= far <= 0
    if "window" in mask:
        seen &= (far >= -mask["window"][0]) & (far <= mask["window"][1])
    if "q_segments" in mask:
        seen &= mask["q_segments"][:, :, None] == mask["kv_segments"][:, None]
    if "key_valid" in mask:
        seen &= mask["key_valid"][:, None]
    return seen[:, None]


def drawn(sizes: Sizes, seed: int = 0) -> list[np.ndarray]:
    """Queries, keys, values and the gradient of the output."""
    rng = np.random.default_rng(seed)
    (hq, hk), (num_q, num_k), (size, out) = sizes.heads, sizes.lengths, sizes.head_dims
    shapes = ((hq, num_q, size), (hk, num_k, size), (hk, num_k, out), (hq, num_q, out))
    return [rng.standard_normal((sizes.batch, *shape), np.float32) for shape in shapes]


Pair = tuple[np.ndarray, np.ndarray]


def product(a: np.ndarray, b: np.ndarray, terms: np.ndarray | None = None) -> Pair:
    """A product, and what its terms add up to if their signs are random."""
    return a @ b, np.sqrt(np.square(a if terms is None else terms) @ np.square(b))


def of_groups(pair: Pair, key_heads: int) -> Pair:
    """The sums over the query heads that share a key head."""
    exact, size = (x.reshape(len(x), key_heads, -1, *x.shape[2:]) for x in pair)
    return exact.sum(2), np.sqrt(np.square(size).sum(2))


def reference(
    arrays: list[np.ndarray], seen: np.ndarray, softcap: float | None, kept: Any
) -> list[Pair]:
    """Output and gradients in float64."""
    q, k, v, grad = arrays
    groups, scale = k.shape[1], q.shape[3] ** -0.5
    k_all, v_all = (np.repeat(x, q.shape[1] // groups, 1) for x in (k, v))
    scores, slope = q @ k_all.swapaxes(2, 3) * scale, np.float64(scale)
    if softcap is not None:
        bent = np.tanh(scores / softcap)
        scores, slope = softcap * bent, scale * (1 - bent**2)
    scores = np.where(seen, scores, -1e300)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    d_weights = grad @ v_all.swapaxes(2, 3) * kept
    mean = (d_weights * weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - mean) * slope
    # Both are rounded before their difference is taken, which may be zero.
    terms = weights * (np.abs(d_weights) + np.abs(mean)) * slope
    weights = weights * kept
    return [
        product(weights, v_all),
        product(d_scores, k_all, terms),
        of_groups(product(d_scores.swapaxes(2, 3), q, terms.swapaxes(2, 3)), groups),
        of_groups(product(weights.swapaxes(2, 3), grad), groups),
    ]


def check(kernel: str, dtype: str, all_sizes: list[Sizes], options: AttentionOptions) -> None:
    """Compare a kernel with the reference, in one program for all sizes."""
    dropout = RATE if kernel == "flash" else 0.0
    key = jax.random.key(5)
    given = [[jnp.asarray(x, dtype) for x in drawn(sizes)] for sizes in all_sizes]

    def one(sizes: Sizes, q: Any, k: Any, v: Any, grad: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> jax.Array:
            drops = {"dropout": dropout, "key": key} if dropout else {}
            mask = Mask(**sizes.mask)
            return attend(q, k, v, mask, softcap=sizes.softcap, options=options, **drops)

        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(grad)

    run = jax.jit(lambda given: [one(s, *x) for s, x in zip(all_sizes, given, strict=True)])
    for sizes, arrays, found in zip(all_sizes, given, run(given), strict=True):
        kept: Any = 1.0
        if dropout:
            shape = (sizes.batch, sizes.heads[0], *sizes.lengths)
            kept = np.asarray(jax.random.bernoulli(key, 1 - dropout, shape), np.float64)
            kept /= 1 - dropout
        exact = [np.asarray(x, np.float64) for x in arrays]
        wanted = reference(exact, seen_of(sizes), sizes.softcap, kept)
        for name, one_found, (other, size) in zip(
            ("out", "dq", "dk", "dv"), found, wanted, strict=True
        ):
            assert one_found.dtype == dtype
            error = np.abs(np.asarray(one_found, np.float64) - other).max()
            limit = LIMITS[dtype] * max(np.abs(other).max(), size.max(), 1e-30)
            assert error <= limit, (kernel, dtype, sizes.name, name, error, limit)


# Both dtypes have all sizes when the slow tests run, too.
@pytest.mark.parametrize(
    ("dtype", "places"),
    [
        ("float32", (0, 1, 4)),
        ("bfloat16", (2, 3)),
        pytest.param("float32", (2, 3), marks=pytest.mark.slow),
        pytest.param("bfloat16", (0, 1, 4), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kernel", OPTIONS)
def test_values_and_gradients_are_those_of_float64(
    kernel: str, dtype: str, places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dense, "choose", lambda **_: DenseTiles(128, 256, 128))
    shapes = [SHAPES[place] for place in places]
    if kernel == "dense":
        # It serves no band and no segments, which would be splash's.
        padding = [{key: x for key, x in one.mask.items() if key == "key_valid"} for one in shapes]
        shapes = [
            dataclasses.replace(one, mask=mask, softcap=None)
            for one, mask in zip(shapes, padding, strict=True)
        ]
    check(kernel, dtype, shapes, OPTIONS[kernel])


LENGTHS = (1, 2, 7, 63, 127, 128, 129, 200, 255, 256, 257, 300, 385, 513)
HEAD_DIMS = (1, 8, 40, 64, 72, 80, 96, 128, 256)
BLOCKS = {
    "splash": ((128, 128, 128), (128, 256, 128), (256, 256, 256)),
    "dense": ((128, 128, 128), (128, 256, 128), (256, 384, 128)),
    "flash": ((128, 128, 128), (256, 64, 64), (128, 192, 192), (384, 512, 512)),
    "blockwise": ((48, 80, 80), (512, 1024, 1024), (1, 7, 7)),
}


def random_sizes(kernel: str, rng: np.random.Generator) -> Sizes:
    """Sizes with a mask that the kernel serves."""
    num_q, num_k = (int(rng.choice(LENGTHS)) for _ in range(2))
    batch, key_heads = (int(rng.integers(1, 3)) for _ in range(2))
    valid = rng.random((batch, num_k)) < rng.choice([0.1, 0.5, 0.9])
    offset = int(rng.choice([0, num_k - num_q, 5, -3]))
    window = tuple(int(n) for n in rng.integers(0, 60, 2))
    ids_of = [np.sort(rng.integers(0, 3, (batch, n)), 1).astype(np.int32) for n in (num_q, num_k)]
    masks: list[dict[str, Any]] = [
        {},
        {"key_valid": valid},
        {"key_valid": np.arange(num_k)[None] < rng.integers(1, num_k + 1)},
        {"causal": True, "offset": offset},
        {"window": window, "offset": offset},
        {"causal": True, "offset": offset, "key_valid": valid},
        {"q_segments": ids_of[0], "kv_segments": ids_of[1]},
    ]
    is_dense = kernel == "dense"
    # Its first product has other uses for four numbers of a head, so that one must have them.
    head_dims = HEAD_DIMS[1:] if is_dense else HEAD_DIMS
    return Sizes(
        (num_q, num_k),
        (int(rng.choice(head_dims)), int(rng.choice(HEAD_DIMS))),
        (key_heads * int(rng.integers(1, 4)), key_heads),
        batch,
        masks[int(rng.integers(3 if is_dense else len(masks)))],
        None if is_dense or rng.random() < 0.7 else 3.0,
    )


# The test above runs the same lines.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kernel", OPTIONS)
def test_random_sizes(kernel: str, dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(seed)
    blocks = BLOCKS[kernel][seed % len(BLOCKS[kernel])]
    options = OPTIONS[kernel]
    if kernel == "dense":
        monkeypatch.setattr(dense, "choose", lambda **_: DenseTiles(*blocks))
    else:
        options = dataclasses.replace(options, blocks=BlockSizes(*blocks))
    check(kernel, dtype, [random_sizes(kernel, rng) for _ in range(2)], options)
