"""Attention as eager PyTorch computes it, with masks written out, to hold the kernels against."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.kernels.attention import AttentionOptions, BlockSizes, Mask, Shards, attend

SMALL = BlockSizes(q=128, kv=128, kv_compute=128)
SPLASH = AttentionOptions(kernel="splash", interpret=True, blocks=SMALL)
# Tiles that divide none of the lengths in these tests, and are smaller.
BLOCKWISE = AttentionOptions(kernel="blockwise", blocks=BlockSizes(q=48, kv=80, kv_compute=80))
FULL = AttentionOptions(kernel="full")


@dataclass(frozen=True)
class Case:
    """Shapes of one attention, its mask by structure, and the same mask written out."""

    mask: dict[str, Any] = field(default_factory=dict)
    seen: Any = True  # broadcasts to (batch, 1, queries, keys)
    queries: int = 200
    keys: int = 300
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 8)
    batch: int = 2
    dtype: str = "float32"
    softcap: float | None = None
    scale: float | None = None

    def arrays(self) -> list[np.ndarray]:
        """Queries, keys, values and the gradient of the output."""
        rng = np.random.default_rng(0)
        (hq, hkv), (d, dv) = self.heads, self.sizes
        shapes = (
            (self.batch, hq, self.queries, d),
            (self.batch, hkv, self.keys, d),
            (self.batch, hkv, self.keys, dv),
            (self.batch, hq, self.queries, dv),
        )
        return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def ours(
    case: Case,
    options: AttentionOptions,
    shards: Shards | None = None,
    *,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> list[np.ndarray]:
    """Output and gradients of q, k, v by `attend`, jitted."""

    def run(q: Any, k: Any, v: Any, mask: dict[str, Any], grad: Any, key: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> Any:
            return attend(
                *(q, k, v, Mask(**{**case.mask, **mask})),
                scale=case.scale,
                softcap=case.softcap,
                dropout=dropout,
                key=key,
                options=options,
                shards=shards,
            )

        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(grad)

    # Arrays of the mask are arguments, as they are in a model; numpy's are known while tracing.
    traced = {name: value for name, value in case.mask.items() if isinstance(value, jax.Array)}
    q, k, v, grad = (jnp.asarray(x, case.dtype) for x in case.arrays())
    found = jax.jit(run)(q, k, v, traced, grad, key)
    assert {x.dtype.name for x in found} == {case.dtype}
    return [np.asarray(x, np.float32) for x in found]


def torchs(case: Case) -> list[np.ndarray]:
    """The same by `torch.nn.functional.scaled_dot_product_attention` on the CPU, in fp32."""
    q, k, v, grad = (
        torch.from_numpy(np.array(jnp.asarray(x, case.dtype), np.float32)) for x in case.arrays()
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    shape = (case.batch, 1, case.queries, case.keys)
    seen = torch.from_numpy(np.broadcast_to(case.seen, shape).copy())
    if case.softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            *inputs, attn_mask=seen, scale=case.scale, enable_gqa=True
        )
    else:
        # torch has no soft cap: as transformers' Gemma 2 computes it.
        share = case.heads[0] // case.heads[1]
        k_all, v_all = (x.repeat_interleave(share, 1) for x in (k, v))
        scale = case.scale or case.sizes[0] ** -0.5
        scores = torch.tanh(q @ k_all.mT * scale / case.softcap) * case.softcap
        out = torch.where(seen, scores, -torch.inf).softmax(-1) @ v_all
    out.backward(grad)
    return [x.detach().numpy() for x in (out, *(x.grad for x in inputs))]


def ids(length: int, num: int) -> np.ndarray:
    """(2, length): rising segment ids."""
    return np.sort(np.random.default_rng(length).integers(0, num, (2, length)), 1).astype(np.int32)


_J_MINUS_I = np.arange(300)[None, :] - np.arange(200)[:, None]
_Q_IDS, _K_IDS = ids(200, 4), ids(300, 3)
_SAME = (_Q_IDS[:, :, None] == _K_IDS[:, None, :])[:, None]
_COUNTED = np.arange(300)[None] < np.array([[250], [77]])
_SCATTERED = np.random.default_rng(1).random((2, 300)) < 0.5
_EMPTY = _COUNTED & np.array([[True], [False]])
_QUERIES = np.random.default_rng(2).random((2, 200)) < 0.7


def _keys(valid: np.ndarray) -> np.ndarray:
    return valid[:, None, None, :]


CASES = {
    "full": Case(),
    "odd sizes": Case(queries=1, keys=131, heads=(3, 3), sizes=(72, 80), batch=1),
    "causal": Case({"causal": True}, _J_MINUS_I <= 0),
    "first rows empty": Case({"causal": True, "offset": -150}, _J_MINUS_I <= -150),
    "window": Case(
        {"window": (40, 10), "offset": 50}, (_J_MINUS_I >= 10) & (_J_MINUS_I <= 60), heads=(4, 1)
    ),
    "causal window, capped": Case(
        {"causal": True, "window": (60, None), "offset": 100},
        (_J_MINUS_I >= 40) & (_J_MINUS_I <= 100),
        softcap=2.0,
        scale=0.7,
    ),
    "causal segments": Case(
        {
            "causal": True,
            "offset": 100,
            "q_segments": jnp.asarray(_Q_IDS),
            "kv_segments": jnp.asarray(_K_IDS),
        },
        (_J_MINUS_I <= 100) & _SAME,
    ),
    "padded keys": Case({"key_valid": jnp.asarray(_COUNTED)}, _keys(_COUNTED)),
    "known padded keys": Case({"key_valid": _COUNTED[:1]}, _keys(_COUNTED[:1])),
    "one example empty": Case({"key_valid": jnp.asarray(_EMPTY)}, _keys(_EMPTY)),
    "scattered keys": Case({"key_valid": jnp.asarray(_SCATTERED)}, _keys(_SCATTERED)),
    "causal, scattered keys": Case(
        {"causal": True, "offset": 100, "key_valid": jnp.asarray(_SCATTERED)},
        (_J_MINUS_I <= 100) & _keys(_SCATTERED),
    ),
    "padded queries": Case(
        {"query_valid": jnp.asarray(_QUERIES)}, _QUERIES[:, None, :, None], batch=2
    ),
}
