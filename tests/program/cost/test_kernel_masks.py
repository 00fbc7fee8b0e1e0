"""Shares of a splash kernel's steps that compute, where its mask is a constant of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tpuport.cost import count_jaxpr
from tpuport.cost.kernels import find_calls

SIZE, BLOCK = 2048, 256
CAUSAL = 8 * 9 / 2 / 64
Q = jax.ShapeDtypeStruct((2, SIZE, 128), jnp.bfloat16)


def kernel(mask):
    names = (
        *("block_q", "block_kv", "block_kv_compute", "block_q_dq", "block_kv_dq"),
        *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"),
    )
    blocks = splash.BlockSizes(**dict.fromkeys(names, BLOCK))
    return splash.make_splash_mha_single_device(masks.MultiHeadMask([mask] * 2), block_sizes=blocks)


@pytest.fixture(scope="module")
def causal():
    return kernel(masks.CausalMask((SIZE, SIZE)))


def shares(function, *args) -> list[float | None]:
    return [call.active for call in find_calls(jax.make_jaxpr(function)(*args))]


def test_without_a_mask_every_step():
    assert shares(kernel(masks.FullMask((SIZE, SIZE))), Q, Q, Q) == [1.0]


def test_a_causal_mask_forward_and_backward(causal):
    assert shares(causal, Q, Q, Q) == [CAUSAL]

    def loss(q, k, v):
        return jax.jit(causal)(q, k, v).astype(jnp.float32).sum()

    assert shares(jax.grad(loss, (0, 1, 2)), Q, Q, Q) == [CAUSAL] * 3


def test_within_scan_remat_and_shard_map(causal):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def step(q, _):
        spread = jax.shard_map(
            lambda q: causal(q, q, q), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        return jax.checkpoint(spread)(q), None

    assert shares(lambda q: jax.lax.scan(step, q, None, length=3)[0], Q) == [CAUSAL]


def test_flops_are_of_the_steps_that_compute(causal):
    found = count_jaxpr(jax.make_jaxpr(causal)(Q, Q, Q))
    assert found.flops == round(CAUSAL * 4 * 2 * SIZE * SIZE * 128)
    assert found.kernels[0].exact


def test_a_mask_that_is_an_argument_is_not_known(causal):
    def attend(block_mask, q):
        info = causal.fwd_mask_info._replace(block_mask=block_mask)
        other = splash.SplashAttentionKernel(info, None, None, **causal.kwargs)
        return other(q, q, q)

    block_mask = jax.ShapeDtypeStruct(causal.fwd_mask_info.block_mask.shape, jnp.int8)
    assert shares(attend, block_mask, Q) == [None]
    found = count_jaxpr(jax.make_jaxpr(attend)(block_mask, Q))
    assert not found.kernels[0].exact
    assert found.flops == 4 * 2 * SIZE * SIZE * 128


def test_calls_are_in_the_order_of_the_program(causal):
    full = kernel(masks.FullMask((SIZE, SIZE)))

    def both(q):
        return jax.jit(causal)(jax.jit(full)(q, q, q), q, q)

    assert shares(both, Q) == [1.0, CAUSAL]
