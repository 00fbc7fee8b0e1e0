"""Compiled for a TPU that is not there: the dense kernel is taken, and is faster than splash."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.program.small import needs_libtpu
from tpuport.cost import CHIPS, count_jaxpr
from tpuport.cost.kernels import find_calls
from tpuport.cost.schedule import schedule_call
from tpuport.kernels.attention import AttentionOptions, BlockSizes, Mask, Shards, attend, dense
from tpuport.kernels.attention.blocks import table
from tpuport.kernels.attention.tiles import DenseTiles
from tpuport.sharding.topology import describe

V6E = AttentionOptions(platform="tpu", chip="v6e")
# What the table of splash's blocks is for.
LENGTH = 49152


def traced(options: AttentionOptions = V6E, length: int = LENGTH, dim: int = 128, **mask: Any):
    x = jax.ShapeDtypeStruct((1, 1, length, dim), jnp.bfloat16)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, Mask(**mask), options=options)

    return jax.make_jaxpr(run)(x, x, x)


@pytest.mark.parametrize(
    ("case", "is_taken"),
    [
        ({}, True),
        ({"key_valid": jnp.arange(LENGTH)[None] < 40_000}, True),
        ({"causal": True}, False),
        ({"window": (100, 100)}, False),
        (
            {"q_segments": jnp.zeros((1, 49152), int), "kv_segments": jnp.zeros((1, 49152), int)},
            False,
        ),
        ({"length": 2048}, False),
        ({"dim": 64}, False),
        ({"options": AttentionOptions("splash", platform="tpu", chip="v6e")}, False),
        ({"options": AttentionOptions(platform="tpu", chip="v5e")}, False),
        (
            {
                "options": AttentionOptions(
                    platform="tpu", chip="v6e", blocks=BlockSizes(512, 512, 512)
                )
            },
            False,
        ),
    ],
)
def test_it_is_taken_where_it_is_faster(case: dict[str, Any], is_taken: bool):
    found = {call.name for call in find_calls(traced(**case))}
    assert (found == {dense.NAME}) == is_taken


def test_blocks_waste_few_keys():
    for length in (9_000, 30_000, 49_152, 112_856, 113_585):
        tiles = dense.choose(
            chip="v6e",
            head_dims=(128, 128),
            dtype="bfloat16",
            num_queries=length,
            num_keys=length,
        )
        assert tiles is not None
        assert tiles.kv % 256 == 0
        assert -length % tiles.kv < 0.04 * length


def test_its_work_is_counted():
    (kernel,) = count_jaxpr(traced()).kernels
    # Queries and keys in whole blocks.
    assert 1 <= kernel.flops / (4 * 128 * LENGTH**2) < 1.02
    assert kernel.exact


def test_a_branch_that_is_seldom_taken_is_not_in_the_estimate():
    (call,) = find_calls(traced())
    # The loop in which a block is computed again.
    assert call.trips == (0,)
    # The first product is over twice the numbers of a head.
    assert 1 <= call.products / (6 * 128 * LENGTH**2) < 1.02


@pytest.mark.slow
@needs_libtpu
def test_its_schedule_is_shorter_than_splashs_best():
    (call,) = find_calls(traced())
    seconds = schedule_call(call, "v6e").seconds()
    kind = {"chip": "v6e", "head_dim": 128, "dtype": "bfloat16", "mask": "full"}
    splash = min(entry["seconds"] for entry in table() if kind.items() <= entry.items())
    share = 4 * 128 * LENGTH**2 / seconds / CHIPS["v6e"].bf16_flops
    assert seconds < 0.63 * splash
    assert share == pytest.approx(dense.TUNED["v6e", 128, "bfloat16"].share_of_peak, rel=0.03)


@needs_libtpu
def test_it_compiles_for_v6e_without_a_matrix_of_scores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense, "choose", lambda **sizes: DenseTiles(q=256, kv=512, kv_tile=256))
    devices = np.array(describe("v6e-8")).reshape(2, 4)
    shards = Shards(Mesh(devices, ("data", "sequence")), ("data",), (), ("sequence",))
    spec = NamedSharding(shards.mesh, P("data", None, "sequence"))
    shape = jax.ShapeDtypeStruct((2, 4, 1500, 128), jnp.bfloat16, sharding=spec)
    valid = jax.ShapeDtypeStruct((2, 1500), jnp.bool_, sharding=NamedSharding(shards.mesh, P()))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
        mask = Mask(key_valid=valid)
        return attend(
            q, k, v, mask, options=AttentionOptions(sequence_parallel="ulysses"), shards=shards
        )

    compiled = jax.jit(run).lower(shape, shape, shape, valid).compile()
    text = compiled.as_text() or ""
    names = re.findall(r'%(\w+)\.\d+ = .*custom_call_target="tpu_custom_call"', text)
    assert names == [dense.NAME]
    assert not re.search(r"\[(\d+,)*(1500|1536),(1500|1536)\]", text)
