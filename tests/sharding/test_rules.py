"""Tables of rules: patterns, order, what is reported, optimizers, converters, plans."""

import json
import re

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.name_patterns import matches
from tpuport.sharding import (
    TABLES,
    Activations,
    NoteKind,
    ShardingRules,
    ShardingWarning,
    SpecRule,
    from_logical_axes,
    from_parallelize_plan,
    from_tp_plan,
    make_mesh,
)

SIZES = {"fsdp": 4, "tensor": 2}


def shapes(**given):
    return {
        name.replace("__", "."): jax.ShapeDtypeStruct(s, np.float32) for name, s in given.items()
    }


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.weight", "layers.3.weight", True),
        ("layers.*.weight", "layers.3.mlp.weight", False),
        ("**.weight", "weight", True),
        ("**.weight", "a.b.weight", True),
        ("**.weight", "a.my_weight", False),
        ("a.**.w", "a.w", True),
        ("a.**", "a", True),
        ("a.**", "ab", False),
        ("**", "", True),
        ("**", "a.b", True),
        ("*_proj.w", "q_proj.w", True),
        ("a+b.w", "aab.w", False),
        (r"re:layers\.[02]\.w", "layers.2.w", True),
        (r"re:layers\.[02]\.w", "layers.20.w", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool):
    assert matches(pattern, name) is expected


def test_the_first_rule_that_matches_decides():
    rules = ShardingRules({"a.w": P("tensor"), "**.w": P("fsdp")})
    params = shapes(a__w=(8, 8), b__w=(8, 8), b__b=(8,))
    assert rules.specs(params) == {"a.w": P("tensor"), "b.w": P("fsdp"), "b.b": P()}
    both = ShardingRules({re.compile(r"b\.[wb]"): "tensor"}) + rules
    assert both.specs(params)["b.b"] == P("tensor")
    changed = rules.override({"**.w": None})
    assert changed.specs(params)["b.w"] == P()
    assert len(changed) == 2
    assert "**.w  P('fsdp')" in str(rules)


def test_what_may_not_be_meant_is_reported_by_name_and_strict_raises_it():
    rules = ShardingRules(
        {"a.w": P("tensor"), "a.*": P("fsdp"), "nope": P("fsdp"), "**.odd": P("fsdp"), "a.w*": P()}
    )
    params = shapes(a__w=(8, 8), a__v=(8,), c__odd=(6, 8), big=(1024, 1024))
    found = {finding.kind: finding for finding in rules.findings(params, SIZES)}
    assert found.keys() == {
        NoteKind.UNMATCHED,
        NoteKind.SHADOWED,
        NoteKind.UNEVEN,
        NoteKind.REPLICATED,
    }
    assert "nope: P('fsdp') matches no parameter" in str(found[NoteKind.UNMATCHED])
    assert "is shadowed: 1 name that it matches (a.w)" in str(found[NoteKind.SHADOWED])
    assert "dim 0 of c.odd has size 6, which fsdp=4 does not divide" in str(found[NoteKind.UNEVEN])
    assert "big (float32[1024, 1024], 4.0 MiB) is replicated on every chip: no rule" in str(
        found[NoteKind.REPLICATED]
    )
    assert rules.specs(params, SIZES)["c.odd"] == P()
    with pytest.raises(UsageError, match=r"(?s)strict.*nope.*big"):
        rules.check(params, SIZES)
    assert ShardingRules({"**": P()}).findings(params, SIZES) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpecRule("a", P("fsdp", "fsdp")), "uses the axis 'fsdp' more than once"),
        (lambda: SpecRule("re:(", P()), "is no regular expression"),
        (lambda: SpecRule("a**.w", P()), r"a \*\* is not a whole part"),
        (lambda: SpecRule("a", 3), "expected a jax.sharding.PartitionSpec"),  # type: ignore[arg-type]
        (lambda: ShardingRules([1]), "Expected a SpecRule or a pair"),
        (
            lambda: ShardingRules({"a": P("rows")}).specs(shapes(a=(4,)), SIZES),
            "the mesh has no axis 'rows'; its axes are fsdp, tensor",
        ),
        (
            lambda: ShardingRules({"a": P(None, "fsdp")}).specs(shapes(a=(4,))),
            r"has 2 dims, and a of shape \[4\] has 1",
        ),
        (lambda: from_tp_plan({"a": "sideways"}), "'a' has the unknown style 'sideways'"),
        (lambda: from_parallelize_plan({"a": "Diagonal"}), "'a' has the style Diagonal"),
        (
            lambda: from_logical_axes({"w": ("mlp",)}, [("embed", "fsdp")]),
            "names the logical axis 'mlp', which has no rule",
        ),
        (
            lambda: from_logical_axes({"w": ("mlp",)}, [("mlp", "rows")]),
            "goes to the unknown mesh axis 'rows'",
        ),
    ],
)
def test_mistakes_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_optimizer_state_follows_parameters():
    params = {"a.w": jax.numpy.ones((8, 8)), "b": jax.numpy.ones(8)}
    rules = ShardingRules({"a.w": P("fsdp", "tensor")})
    state = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)
    specs = rules.for_state(state, params)
    adam, found = state[1][0], specs[1][0]
    assert found.mu == found.nu == {"a.w": P("fsdp", "tensor"), "b": P()}
    assert found.count == P()
    assert jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(
        state
    )
    nested = {"a": {"w": adam.mu["a.w"]}}
    assert rules.for_state(nested, params) == {"a": {"w": P("fsdp", "tensor")}}
    factored = {"a.w": jax.numpy.ones(8)}
    assert rules.for_state(factored, params) == {"a.w": P()}
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    placed = jax.device_put(state, rules.for_state(state, params, mesh))
    assert placed[1][0].mu["a.w"].sharding.spec == P("fsdp", "tensor")


def test_a_tp_plan_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))
    plan = model.config.base_model_tp_plan
    assert plan
    specs = from_tp_plan(plan, prefix="model.").specs(model)
    assert specs["model.layers.1.self_attn.q_proj.weight"] == P("tensor", None)
    assert specs["model.layers.0.mlp.down_proj.weight"] == P(None, "tensor")
    assert specs["model.norm.weight"] == P()


def test_every_style_of_transformers_is_known():
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    styles = list(ALL_PARALLEL_STYLES)
    assert "colwise" in styles
    for style in styles:
        from_tp_plan({"a.b": style})


def test_a_plan_of_parallelize_module():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    rules = from_parallelize_plan(
        {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}
    )
    params = shapes(up__weight=(8, 4), up__bias=(8,), down__weight=(4, 8), down__bias=(4,))
    assert list(rules.specs(params).values()) == [
        P("tensor", None), P("tensor"), P(None, "tensor"), P(),
    ]  # fmt: skip
    assert rules.activations.spec("norm") == P(("data", "fsdp"), "tensor")


def test_logical_axes_of_maxtext():
    axis_rules = [
        ("embed", ("fsdp", "context")), ("mlp", "tensor"), ("mlp", "fsdp"), ("norm", None),
    ]  # fmt: skip
    rules = from_logical_axes(
        {"w": ("mlp", "embed"), "v": ("mlp", "mlp"), "n": ("norm",)}, axis_rules
    )
    assert [rule.spec for rule in rules] == [
        P("tensor", ("fsdp", "sequence")), P("tensor", "fsdp"), P(None),
    ]  # fmt: skip


def test_a_plan_shows_what_a_chip_holds(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    rules = ShardingRules({"0.weight": P("fsdp"), "gone": P()}, name="mine")
    plan = rules.plan(model, SIZES)
    assert (plan.num_bytes, plan.bytes_a_chip) == (4 * 1096, 4 * (1096 - 512 + 128))
    assert "Sequential: 4.3 KiB, 2.8 KiB a chip" in str(plan)
    assert "P('fsdp')" in str(plan)
    read = json.loads(plan.to_json())
    assert read["parameters"][0]["spec"] == ["fsdp"]
    assert [f["kind"] for f in read["findings"]] == ["matches nothing"]
    plan.save(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "Module tree, coloured by spec" in page
    assert "matches no parameter" in page
    # A piece of a bar without a colour of its own would be black.
    pieces = set(re.findall(r'class="stage (\w+)"', page))
    assert "rest" in pieces
    assert [name for name in pieces if f".{name} {{ fill:" not in page] == []


def test_activations_are_constrained_and_keep_their_values():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    ported = tpuport.convert(model)
    x = torch.randn(8, 4)
    rules = ShardingRules(
        {"**": P()}, activations={"0": P("data", "tensor")}, inputs={"0": P("data")}
    )
    tpuport.shard(ported, {"data": 4, "tensor": 2}, rules)
    out = ported(x)
    np.testing.assert_allclose(out.numpy(), model(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    text = str(jax.make_jaxpr(lambda p: ported.apply(p, {}, None, x))(ported.params))
    assert "sharding_constraint" in text
    odd = tpuport.convert(model)
    tpuport.shard(odd, {"data": 4, "tensor": 2}, rules)
    with pytest.warns(ShardingWarning, match="dim 0 of the output of 0 has size 3, which data=4"):
        odd(torch.randn(3, 4))


def test_findings_warn_unless_they_are_raised():
    ported = tpuport.convert(torch.nn.Linear(4, 4))
    with pytest.warns(ShardingWarning, match="1 finding about the sharding of Linear, first"):
        plan = tpuport.shard(ported, {"fsdp": 8}, {"nope": P()})
    assert ported.sharding is plan
    with pytest.raises(UsageError, match="nope"):
        tpuport.shard(ported, {"fsdp": 8}, {"nope": P()}, strict=True)
    with pytest.warns(ShardingWarning, match="'blocks' matches no module"):
        tpuport.shard(ported, {"fsdp": 8}, ShardingRules(activations=Activations({"blocks": P()})))


def test_ready_tables_fit_their_families():
    import diffusers
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        models = {
            "llama": LlamaForCausalLM(LlamaConfig(num_hidden_layers=2)),
            "qwen2": Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2)),
            "hunyuan_video15": diffusers.HunyuanVideo15Transformer3DModel(num_layers=2),
            "wan": diffusers.WanTransformer3DModel(num_layers=2),
            "flux": diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=2),
        }
    for name, model in models.items():
        plan = TABLES[name].plan(model, {"fsdp": 2, "tensor": 4})
        assert plan.bytes_a_chip < plan.num_bytes / 6, name
        assert {f.kind for f in plan.findings} <= {NoteKind.REPLICATED}
