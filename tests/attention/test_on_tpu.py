"""Compiled for a TPU that is not there: the kernel is in the program, and no matrix of scores."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.kernels.attention import AttentionOptions, BlockSizes, Mask, Shards, attend
from tpuport.sharding.topology import describe

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="waits for libtpu: pip install tpuport[tpu]"
)


@needs_libtpu
def test_sharded_attention_compiles_for_v6e_without_a_matrix_of_scores():
    devices = np.array(describe("v6e-8")).reshape(2, 4)
    shards = Shards(Mesh(devices, ("data", "sequence")), ("data",), (), ("sequence",))
    spec = NamedSharding(shards.mesh, P("data", None, "sequence"))
    shape = jax.ShapeDtypeStruct((2, 4, 1500, 80), jnp.bfloat16, sharding=spec)
    valid = jax.ShapeDtypeStruct((2, 1500), jnp.bool_, sharding=NamedSharding(shards.mesh, P()))
    # What platform and chip this is for is read from the mesh.
    options = AttentionOptions(sequence_parallel="ulysses", blocks=BlockSizes(512, 512, 256))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
        return attend(q, k, v, Mask(key_valid=valid), options=options, shards=shards)

    compiled = jax.jit(run).lower(shape, shape, shape, valid).compile()
    text = compiled.as_text() or ""
    # One call for the blocks that are valid whole, one for that in which the keys end.
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 2
    assert len(re.findall(r"= .*? all-to-all(?:-start)?\(", text)) == 4
    assert not re.search(r"\[(\d+,)*(1500|1536),(1500|1536)\]", text)
    memory = compiled.memory_analysis()
    assert memory is not None
    # One head's scores alone, in fp32, are 9 MB.
    assert memory.temp_size_in_bytes < 9e6


@needs_libtpu
def test_packed_documents_compile_for_v6e_with_ids_at_their_edges_alone():
    (device, *_) = describe("v6e-8")
    spec = NamedSharding(Mesh(np.array([device]), ("one",)), P())
    shape = jax.ShapeDtypeStruct((2, 2, 1500, 64), jnp.bfloat16, sharding=spec)
    ids = jax.ShapeDtypeStruct((2, 1500), jnp.int32, sharding=spec)
    options = AttentionOptions(
        "splash", platform="tpu", chip="v6e", blocks=BlockSizes(256, 256, 256)
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        mask = Mask(causal=True, q_segments=ids, kv_segments=ids)
        return attend(q, k, v, mask, options=options)

    text = jax.jit(run).lower(shape, shape, shape, ids).compile().as_text() or ""
    names = re.findall(r'%(\w+)\.\d+ = .*custom_call_target="tpu_custom_call"', text)
    assert sorted(names) == ["splash_mha_fwd_residuals", "splash_mha_fwd_segmented_residuals"]
    assert not re.search(r"\[(\d+,)*(1500|1536),(1500|1536)\]", text)
