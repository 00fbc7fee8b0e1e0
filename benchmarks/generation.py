"""`python -m benchmarks.generation`: tokens a second of `generate`, for two small Llamas.

Prints the table of docs/generation.md. Eager transformers, the port and a decode loop written by
hand in JAX take turns in one process; the clock is the CPU's, and the tokens have to be equal.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tpuport

PROMPT, NEW, ROUNDS = 16, 64, 15
# Width, layers, heads and tokens of the vocabulary.
SIZES = {"tiny": (64, 2, 4, 256), "small": (384, 6, 6, 4096)}
Run = Callable[[torch.Tensor], np.ndarray]


def llama(width: int, layers: int, heads: int, tokens: int) -> Any:
    """Make a Llama that never ends a sequence."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokens, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class ByHand:
    """The same Llama in JAX: a program for the prompt, and one for all new tokens."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.width, self.epsilon = config.hidden_size // self.heads, config.rms_norm_eps
        self.length = -(-(PROMPT + NEW) // 64) * 64
        held = {k: jnp.asarray(v.numpy()) for k, v in model.state_dict().items()}
        # Once, as a product with a transposed weight takes longer on a CPU.
        self.weights = {k: v if v.ndim < 2 or "embed" in k else v.T for k, v in held.items()}
        self.prefill, self.decode = jax.jit(self._prefill), jax.jit(self._decode)

    def __call__(self, ids: torch.Tensor) -> np.ndarray:
        """Return the new tokens."""
        return np.asarray(self.decode(self.weights, *self.prefill(self.weights, ids.numpy())))

    def _prefill(self, weights: Any, ids: jax.Array) -> Any:
        shape = (ids.shape[0], self.length, self.heads, self.width)
        return self._forward(weights, ids, 0, [(jnp.zeros(shape),) * 2] * self.layers)

    def _decode(self, weights: Any, token: jax.Array, caches: Any) -> jax.Array:
        out = jnp.zeros((token.shape[0], NEW), jnp.int32).at[:, 0].set(token)

        def step(state: Any) -> Any:
            number, token, caches, out = state
            token, caches = self._forward(weights, token[:, None], PROMPT + number - 1, caches)
            return number + 1, token, caches, out.at[:, number].set(token)

        return jax.lax.while_loop(lambda s: s[0] < NEW, step, (1, token, caches, out))[-1]

    def _forward(self, weights: Any, ids: jax.Array, start: Any, caches: Any) -> Any:
        places = start + jnp.arange(ids.shape[1])
        x, after = weights["model.embed_tokens.weight"][ids], []
        for index, cache in enumerate(caches):
            part = {k.removeprefix(f"model.layers.{index}."): v for k, v in weights.items()}
            y = self._norm(x, part["input_layernorm.weight"])
            y, cache = self._attention(part, y, places, cache)
            after.append(cache)
            x = x + y @ part["self_attn.o_proj.weight"]
            y = self._norm(x, part["post_attention_layernorm.weight"])
            gate = jax.nn.silu(y @ part["mlp.gate_proj.weight"])
            x = x + (gate * (y @ part["mlp.up_proj.weight"])) @ part["mlp.down_proj.weight"]
        x = self._norm(x[:, -1], weights["model.norm.weight"])
        return (x @ weights["lm_head.weight"]).argmax(-1).astype(jnp.int32), after

    def _attention(self, part: Any, x: jax.Array, places: jax.Array, cache: Any) -> Any:
        shape = (*x.shape[:2], self.heads, self.width)
        q, k, v = ((x @ part[f"self_attn.{n}_proj.weight"]).reshape(shape) for n in "qkv")
        at = (0, places[0], 0, 0)
        k = jax.lax.dynamic_update_slice(cache[0], self._turned(k, places), at)
        v = jax.lax.dynamic_update_slice(cache[1], v, at)
        scores = jnp.einsum("bthd,bshd->bhts", self._turned(q, places), k) / self.width**0.5
        seen = jnp.arange(self.length)[None] <= places[:, None]
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        return jnp.einsum("bhts,bshd->bthd", shares, v).reshape(x.shape), (k, v)

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * scale

    def _turned(self, x: jax.Array, places: jax.Array) -> jax.Array:
        angles = places[:, None] / 10000 ** (jnp.arange(0, self.width, 2) / self.width)
        angles = jnp.concatenate([angles, angles], -1)[None, :, None]
        low, high = jnp.split(x, 2, -1)
        return x * jnp.cos(angles) + jnp.concatenate([-high, low], -1) * jnp.sin(angles)


def contestants(model: Any) -> dict[str, Run]:
    """Return what is measured, by name."""
    ported = tpuport.convert(model, methods=("generate",), verify=False)

    def generated(generate: Any, ids: torch.Tensor) -> np.ndarray:
        mask = torch.ones_like(ids)
        out = generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        return tpuport.to_numpy(out)[:, PROMPT:]

    return {
        "eager": lambda ids: generated(model.generate, ids),
        "ported": lambda ids: generated(ported.generate, ids),
        "by hand": ByHand(model),
    }


def seconds(runs: dict[str, Run], ids: torch.Tensor) -> dict[str, float]:
    """Return the median of the CPU's seconds for a call of each.

    Raises:
        ValueError: The tokens differ.
    """
    first = {name: run(ids) for name, run in runs.items()}
    if any(not np.array_equal(found, first["eager"]) for found in first.values()):
        msg = "the tokens differ"
        raise ValueError(msg)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            started = time.process_time()
            run(ids)
            found[name].append(time.process_time() - started)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| Llama | batch | tokens a second | against eager | against JAX by hand |")
    print("|---|---|---|---|---|")
    for name, size in SIZES.items():
        model = llama(*size)
        for batch in (1, 8):
            ids = torch.randint(2, size[-1], (batch, PROMPT))
            took = seconds(contestants(model), ids)
            rate = batch * NEW / took["ported"]
            eager, hand = (took[other] / took["ported"] for other in ("eager", "by hand"))
            print(f"| {name} | {batch} | {rate:,.0f} | {eager:.2f} | {hand:.2f} |", flush=True)


if __name__ == "__main__":
    main()
