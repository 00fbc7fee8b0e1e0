"""Compiled for a TPU that is not there: lists of blocks are arguments, and no scores are left."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.program.small import needs_libtpu
from tpuport.cost import CHIPS
from tpuport.cost.kernels import find_calls
from tpuport.cost.schedule import UnknownTripsError, schedule_call
from tpuport.kernels.attention import Shards, block_sparse, block_sparse_backward
from tpuport.kernels.attention.attend_blocks import attend_blocks
from tpuport.kernels.attention.block_lists import lists_of
from tpuport.sharding.topology import describe

pytestmark = needs_libtpu
CASES: dict[str, dict[str, Any]] = {
    "HunyuanVideo's blocks, on a mesh": {"block": 384, "length": 384 * 12, "sharded": True},
    "masks, odd length": {"block": 128, "length": 1500, "masked": True, "dim": 64},
    "float32": {"block": 128, "length": 1500, "masked": True, "dtype": "float32"},
    "large heads": {"block": 256, "length": 2048, "dim": 256},
}
SLOW = {"float32", "large heads"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_it_compiles_without_scores(name: str):
    case = {"dim": 128, "masked": False, "sharded": False, "dtype": "bfloat16", **CASES[name]}
    block, length = case["block"], case["length"]
    count, heads = -(-length // block), 4
    devices = np.array(describe("v6e-4")).reshape(2, 2)
    mesh = Mesh(devices if case["sharded"] else devices[:1, :1], ("tensor", "sequence"))
    shards = Shards(mesh, (), ("tensor",), ("sequence",)) if case["sharded"] else None
    spec = NamedSharding(mesh, P(None, "tensor", "sequence") if shards else P())
    whole = NamedSharding(mesh, P())

    def shape(sizes: tuple[int, ...], dtype: Any, sharding: Any = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    q = shape((1, heads, length, case["dim"]), case["dtype"], spec)
    seen = shape((1, heads, count, count), bool)
    slots, masks = shape((1, heads, count, count), jnp.int32), shape((8, block, block), bool)

    def run(q: Any, seen: Any, slots: Any, masks: Any, grad: Any) -> Any:
        lists = lists_of(seen)
        if case["masked"]:
            lists = lists._replace(slots=slots, masks=masks)

        def attention(q: Any, k: Any, v: Any) -> jax.Array:
            return attend_blocks(q, k, v, [lists], blocks=(block, block), shards=shards)[0]

        out, pull = jax.vjp(attention, q, q + 1, q + 2)
        return out, pull(grad)

    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(q, seen, slots, masks, q).compile()
    text: Any = compiled.as_text()
    names = {block_sparse.FORWARD, block_sparse_backward.QUERIES, block_sparse_backward.KEYS}
    found = re.findall(r'%\w*?(block_sparse\w*?)_*\.\d+ = .*custom_call_target="tpu_cust', text)
    assert set(found) == names
    assert len(found) == len(names)
    memory: Any = compiled.memory_analysis()
    scores = heads * length**2 * 4 // (4 if shards else 1)
    assert memory.temp_size_in_bytes < scores / 3


@pytest.mark.slow
def test_its_schedule_is_what_the_documentation_says():
    x = jax.ShapeDtypeStruct((1, 1, 384 * 20, 128), jnp.bfloat16)
    seen = jax.ShapeDtypeStruct((1, 1, 20, 20), bool)

    def run(q: Any, k: Any, v: Any, seen: Any) -> jax.Array:
        return attend_blocks(q, k, v, [lists_of(seen)], blocks=(384, 384))[0]

    (call,) = find_calls(jax.make_jaxpr(run)(x, x, x, seen))
    schedule = schedule_call(call, "v6e")
    with pytest.raises(UnknownTripsError):
        schedule.seconds()
    empty, full = (
        dataclasses.replace(schedule, trips=(trips, 0)).cycles_a_step() for trips in (0, 10)
    )
    # A round has eight blocks.
    flops = 10 * 8 * 4 * 384 * 384 * 128
    chip = CHIPS["v6e"]
    share = flops / ((full - empty) / chip.clock_hz) / chip.bf16_flops
    assert share == pytest.approx(0.50, rel=0.03)
    assert empty < 0.3 * (full - empty) / 10
