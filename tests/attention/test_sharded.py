"""Attention over a mesh equals eager PyTorch's, and sends what its way says."""

import dataclasses
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.attention.cases import BLOCKWISE, CASES, SPLASH, Case, ours, torchs
from tests.attention.test_kernels import RTOL, assert_equal
from tpuport.kernels.attention import AttentionOptions, Mask, Shards, attend
from tpuport.kernels.attention.dispatch import AttentionWarning

WAYS = ("all_gather", "ring", "ulysses")


def shards(**axes: int) -> Shards:
    """Over the first devices: batch over `data`, heads over `tensor`, sequence over `sequence`."""
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))]).reshape(*axes.values())
    mesh = Mesh(devices, tuple(axes))
    names = {"data": "batch", "tensor": "heads", "sequence": "sequence"}
    return Shards(mesh, **{names[axis]: (axis,) for axis in axes})


# 300 keys and 200 queries do not divide by 7: padded, and the padding is seen by nobody.
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["causal window, capped", "causal, scattered keys"])
def test_a_sharded_sequence_equals_torch(name: str, way: Any):
    case = dataclasses.replace(CASES[name], heads=(7, 7))
    options = dataclasses.replace(BLOCKWISE, sequence_parallel=way)
    assert_equal(ours(case, options, shards(sequence=7)), torchs(case), RTOL)


@pytest.mark.parametrize(
    ("way", "name"),
    [("all_gather", "causal segments"), ("ring", "padded keys"), ("ulysses", "padded keys")],
)
def test_splash_over_three_axes_equals_torch(way: Any, name: str):
    # Two key heads: over tensor and sequence by "ulysses" there are fewer of them than chips.
    options = dataclasses.replace(SPLASH, sequence_parallel=way)
    found = ours(CASES[name], options, shards(data=2, tensor=2, sequence=2))
    assert_equal(found, torchs(CASES[name]), RTOL)


def test_a_causal_window_in_a_ring_of_splash_equals_torch():
    case = dataclasses.replace(CASES["causal window, capped"], heads=(2, 1))
    options = dataclasses.replace(SPLASH, sequence_parallel="ring")
    assert_equal(ours(case, options, shards(sequence=2)), torchs(case), RTOL)


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_of_its_own_length_is_exchanged_whole(way: Any):
    case = Case(queries=128, keys=128, heads=(8, 8), sizes=(8, 8))
    options = dataclasses.replace(BLOCKWISE, sequence_parallel=way)
    assert_equal(ours(case, options, shards(sequence=4)), torchs(case), RTOL)


# (query heads, key heads, chips): one key head a chip or less, and groups that chips cut through.
@pytest.mark.parametrize("heads", [(8, 2, 4), (6, 2, 2), (12, 4, 6)])
def test_key_heads_that_do_not_divide_are_held_where_they_are_needed(heads: tuple[int, ...]):
    case = Case(queries=40, keys=50, heads=heads[:2])
    assert_equal(ours(case, BLOCKWISE, shards(tensor=heads[2])), torchs(case), RTOL)


def collectives(way: Any, grad: bool, num_kv_heads: int = 8) -> Counter[str]:
    """What the compiled text of a sharded self attention sends, by name."""
    where = shards(data=2, sequence=4)
    spec = NamedSharding(where.mesh, P("data", None, "sequence"))
    q, k = (
        jax.ShapeDtypeStruct((2, h, 64, 8), jnp.float32, sharding=spec) for h in (8, num_kv_heads)
    )
    options = AttentionOptions(kernel="blockwise", sequence_parallel=way)

    def out(q: Any, k: Any, v: Any) -> jax.Array:
        return attend(q, k, v, Mask(causal=True), options=options, shards=where)

    def gradients(q: Any, k: Any, v: Any) -> Any:
        found, pull = jax.vjp(out, q, k, v)
        return pull(found)

    shardings = (spec, spec, spec) if grad else spec
    text = jax.jit(gradients if grad else out, out_shardings=shardings).lower(q, k, k)
    names = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    return Counter(re.findall(rf"= .*? ({names})(?:-start)?\(", text.compile().as_text() or ""))


def test_gathering_sends_keys_and_values_once_and_their_gradients_once():
    assert collectives("all_gather", grad=False) == {"all-gather": 2}
    sent = collectives("all_gather", grad=True)
    assert sent.keys() <= {"all-gather", "reduce-scatter"}
    assert sent["reduce-scatter"] == 2


def test_a_ring_sends_only_to_the_next_chip():
    assert collectives("ring", grad=False) == {"collective-permute": 2 * 3}
    assert collectives("ring", grad=True).keys() == {"collective-permute"}


def test_heads_are_exchanged_by_all_to_all_alone():
    assert collectives("ulysses", grad=False) == {"all-to-all": 4}
    assert collectives("ulysses", grad=True).keys() == {"all-to-all"}


def test_an_axis_that_does_not_divide_is_said_once_and_not_used():
    case = Case(queries=20, keys=20, heads=(3, 3), batch=1)
    with pytest.warns(AttentionWarning, match="heads of 3, which the mesh axis 'tensor' of 2"):
        found = ours(case, BLOCKWISE, shards(tensor=2))
    assert_equal(found, torchs(case), RTOL)
