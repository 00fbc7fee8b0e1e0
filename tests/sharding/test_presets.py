"""Every preset gives what one device gives, and communicates what it is meant to."""

import copy
import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from tests.sharding import tiny
from tpuport.foundation.errors import UsageError
from tpuport.sharding import PRESETS, count_collectives, make_mesh
from tpuport.sharding.layer_roles import LayerRole, uses_of

MESHES = {
    "replicated": {"data": 8},
    "ddp": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor_parallel": {"data": 2, "tensor": 4},
    "fsdp_tensor_parallel": {"fsdp": 2, "tensor": 4},
    "sequence_parallel": {"fsdp": 4, "sequence": 2},
}
GATHER, REDUCE = "all-gather", "all-reduce"
PERMUTE = "collective-permute"
# On CPU a reduce-scatter is an all-reduce and a slice.
KINDS = {
    "replicated": set(),
    "ddp": {REDUCE},
    "fsdp": {GATHER, REDUCE},
    "tensor_parallel": {REDUCE},
    "fsdp_tensor_parallel": {GATHER, REDUCE},
    "sequence_parallel": {GATHER, REDUCE},
}


def added(made: tiny.Tiny, ported: Any, preset: str) -> set[str]:
    """The kinds that a model's structure adds to what its preset means."""
    specs = {name: str(value.sharding.spec) for name, value in ported.params.items()}
    more = set()
    if "tensor" in MESHES[preset] and any(
        "fsdp" in s and "tensor" not in s for s in specs.values()
    ):
        # A weight that is spread along fsdp alone is the same on each chip along tensor. It is
        # gathered in two steps: by all chips, after a permute.
        more.add(PERMUTE)
    modulations = [n for n, use in uses_of(made.model).items() if use.role is LayerRole.MODULATION]
    if any("tensor" in specs[name] for name in modulations):
        # Chunks of a modulation are not the chips', so its output is gathered.
        more.add(GATHER)
    if "sequence" not in MESHES[preset]:
        return more
    # A copy: a step in eager mode would move the buffers of norms.
    model, lengths = copy.deepcopy(made.model), set()
    for norm in model.modules():
        if isinstance(norm, torch.nn.LayerNorm):
            norm.register_forward_hook(lambda _, given, out: lengths.add(out.shape[1]))
    outputs = jax.tree.leaves(model(*made.args, **made.kwargs))
    if any(length % MESHES[preset]["sequence"] for length in lengths if length > 1):
        # A class token more than chips divide: parts move from chip to chip at cuts and joins.
        more |= {PERMUTE, "all-to-all"}
    if any(torch.is_tensor(x) and x.ndim > 3 for x in outputs):
        # Tokens that are cut are put together to an image: its rows are not those of the chips.
        more.add(PERMUTE)
    return more


def numpy_of(value: Any) -> Any:
    return jax.numpy.asarray(value.numpy()) if isinstance(value, torch.Tensor) else value


@functools.cache
def model_and_reference(name: str) -> tuple[tiny.Tiny, Any]:
    torch.manual_seed(0)
    made = tiny.MODELS.get(name, tiny.mixture)()
    ported = tpuport.convert(made.model)
    return made, compiled_step(made, ported)[1]


def compiled_step(made: tiny.Tiny, ported: Any) -> tuple[str, Any]:
    """The text of a compiled step, and the loss, buffers and gradients that it gives."""
    static = {k: v for k, v in made.kwargs.items() if not isinstance(v, torch.Tensor)}
    tensors = {k: numpy_of(v) for k, v in made.kwargs.items() if k not in static}
    args = [numpy_of(a) for a in made.args]
    shardings = None
    if ported.sharding is not None:
        placement = ported._placement
        args = placement.arguments(args, [f"[0][{i}]" for i in range(len(args))])
        names = [f"[1].{name}" for name in tensors]
        tensors = dict(
            zip(tensors, placement.arguments(list(tensors.values()), names), strict=True)
        )
        params = {n: placement.shardings[n] for n in ported.params}
        shardings = ((None, {n: placement.shardings[n] for n in ported.buffers}), params)

    def step(params: Any, buffers: Any, args: Any, tensors: Any) -> Any:
        def loss(params: Any) -> Any:
            out, after = ported.apply(params, buffers, None, *args, **tensors, **static)
            return made.loss(out), after

        return jax.value_and_grad(loss, has_aux=True)(params)

    given = (ported.params, ported.buffers, args, tensors)
    compiled = jax.jit(step, out_shardings=shardings).lower(*given).compile()
    (loss, buffers), grads = compiled(*given)
    return str(compiled.as_text()), jax.device_get((loss, buffers, grads))


def check_equal(found: Any, expected: Any) -> None:
    """Relative 1e-5; gradients that are zero but for rounding are measured by the others."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, other in ((found[1], expected[1]), (found[2], expected[2])):
        assert one.keys() == other.keys()
        scale = max((np.abs(v).max() for v in other.values() if v.dtype.kind == "f"), default=1)
        for name, value in other.items():
            atol = 1e-5 * max(float(np.abs(value).max()), 1e-2 * float(scale))
            np.testing.assert_allclose(one[name], value, rtol=0, atol=atol, err_msg=name)


def sharded(made: tiny.Tiny, preset: str, mesh_axes: dict[str, int]) -> Any:
    ported = tpuport.convert(made.model)
    mesh = make_mesh(mesh_axes)
    small = {"min_size": 512} if "fsdp" in preset or preset.startswith(("seq", "exp")) else {}
    plan = tpuport.shard(ported, mesh, PRESETS[preset](ported, mesh, **small))
    assert plan.findings == ()
    return ported


# The video model takes as long as the three others, which run with each preset. It runs with those
# of two axes.
LONG = {("video", preset) for preset in ("replicated", "ddp", "fsdp", "tensor_parallel")}


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(name, preset, marks=[pytest.mark.slow] * ((name, preset) in LONG))
        for name in tiny.MODELS
        for preset in MESHES
    ],
)
def test_a_preset_gives_what_one_device_gives(name: str, preset: str):
    made, expected = model_and_reference(name)
    ported = sharded(made, preset, MESHES[preset])
    text, found = compiled_step(made, ported)
    check_equal(found, expected)
    assert set(count_collectives(text)) == KINDS[preset] | added(made, ported, preset)


def test_experts_are_spread():
    made, expected = model_and_reference("mixture")
    ported = sharded(made, "expert_parallel", {"data": 2, "expert": 4})
    weights = {n: v for n, v in ported.params.items() if "experts" in n}
    assert weights
    for value in weights.values():
        assert value.sharding.spec == jax.sharding.PartitionSpec("expert")
    text, found = compiled_step(made, ported)
    check_equal(found, expected)
    assert set(count_collectives(text)) == {REDUCE, GATHER, PERMUTE}


def test_what_a_preset_spreads_takes_less_of_each_chip():
    made, _ = model_and_reference("decoder")
    whole = sum(p.numel() * 4 for p in made.model.parameters())
    chip = sharded(made, "fsdp", {"fsdp": 8}).sharding.bytes_a_chip
    assert whole / 8 < chip < whole / 7.5
    one = sharded(made, "fsdp", {"fsdp": 8})
    held = sum(v.addressable_shards[0].data.nbytes for v in one.params.values())
    buffers = sum(v.addressable_shards[0].data.nbytes for v in one.buffers.values())
    assert held + buffers == chip


def test_calls_run_on_the_mesh_and_compile_once():
    made, _ = model_and_reference("convolutions")
    alone = tpuport.convert(made.model)
    spread = sharded(made, "ddp", {"data": 8})
    for _ in range(3):
        want, got = alone(*made.args), spread(*made.args)
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
    for name, value in alone.buffers.items():
        np.testing.assert_allclose(spread.buffers[name], value, rtol=1e-5, atol=1e-6)
        assert len(spread.buffers[name].sharding.device_set) == 8
    (compiled,) = spread._cache.values()
    assert compiled.run._jitted._cache_size() == 1
    assert spread.report.retraces == []


def test_loading_puts_weights_where_they_belong():
    made, _ = model_and_reference("vit")
    ported = sharded(made, "fsdp", {"fsdp": 8})
    before = {n: v.sharding for n, v in ported.params.items()}
    ported.load(made.model.state_dict())
    assert {n: v.sharding for n, v in ported.params.items()} == before


def test_there_are_no_other_presets():
    ported = tpuport.convert(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="There is no preset 'zero'; there are replicated, ddp"):
        tpuport.shard(ported, {"data": -1}, "zero")
    with pytest.raises(UsageError, match=r"what tpuport.convert.model. gives, got a Linear"):
        tpuport.shard(torch.nn.Linear(2, 2), {"data": -1})  # pyright: ignore[reportArgumentType]
