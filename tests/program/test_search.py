"""Looking for a mesh and rules: what is tried, how it is ranked, when it stops."""

import json
from dataclasses import replace
from typing import Any

import jax
import pytest
import torch

import tpuport
from tests.program.small import batch, needs_libtpu, on_meta, squared
from tpuport.aot import search as searching
from tpuport.aot.search import candidates, factorisations, search
from tpuport.cost.records import Estimate, Part
from tpuport.foundation.errors import UsageError
from tpuport.tracing.attention.options import choice


def test_meshes_have_every_chip():
    assert list(factorisations(8, ("fsdp",))) == [{"fsdp": 8}]
    assert list(factorisations(8, ("fsdp", "tensor"))) == [
        {"fsdp": 2, "tensor": 4},
        {"fsdp": 4, "tensor": 2},
        {"tensor": 8},
    ]


def test_what_comes_to_the_same_is_tried_once_and_experts_need_experts():
    tried = list(candidates(on_meta(), 4))
    assert ("fsdp", {"fsdp": 4}) in tried
    assert not any(rules == "expert_parallel" for rules, _ in tried)
    # Without fsdp, a preset with it cuts what tensor_parallel cuts, on the same mesh.
    alone = {"tensor": 4}
    for rules in ("tensor_parallel", "fsdp_tensor_parallel"):
        assert list(candidates(on_meta(), 4, {rules: ("data", "tensor")}))[-1] == (rules, alone)
    assert [rules for rules, mesh in tried if mesh == alone] == ["fsdp_tensor_parallel"]


@needs_libtpu
def test_those_that_fit_are_ranked_by_their_time():
    told: list[str] = []
    found = search(
        on_meta(),
        "v5e-4",
        inputs=batch(),
        train=squared,
        presets={"fsdp": ("fsdp",), "ddp": ("data",)},
        progress=lambda done, total, name: told.append(f"{done}/{total} {name}"),
    )
    assert told[0] == "0/2 fsdp on fsdp=4"
    assert [trial.rules for trial in found.trials] == ["fsdp", "ddp"]
    ranked = [trial.seconds for trial in found.ranked]
    assert len(ranked) == 2
    assert ranked == sorted(ranked)
    assert found.best is found.ranked[0]
    assert "2 of 2 tried fit" in str(found)
    assert json.loads(found.to_json())["trials"][1]["report"]["rules"] == "ddp"


@needs_libtpu
def test_time_that_is_up_is_said(tmp_path):
    presets = {"fsdp": ("fsdp",), "ddp": ("data",)}
    inputs, given = batch(1 << 30), {"train": squared, "presets": presets}
    found = search(on_meta(), "v5e-4", inputs=inputs, seconds=0.0, **given)
    assert (len(found.trials), found.left, found.best) == (1, 1, None)
    assert "0 of 1 tried fit, 1 not tried for want of time" in str(found)
    assert "does not fit" in str(found)
    found.save(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["left"] == 1
    page = found.save(tmp_path / "s.html").read_text()
    assert "0 of 1 tried fit" in page
    with pytest.raises(UsageError, match=r"ending in \.json, \.html or \.txt, got .*s\.md"):
        found.save(tmp_path / "s.md")


@needs_libtpu
def test_a_trial_that_fails_is_told_with_its_reason():
    found = search(on_meta(), "v5e-4", inputs=batch(), presets={"fsdp": ("fsdp",)}, train=True)
    (trial,) = found.trials
    assert trial.report is None
    assert "the loss has shape [16, 8]" in trial.error
    assert found.ranked == []
    with pytest.raises(ValueError, match="no TPU topology"):
        search(on_meta(), "v6e-7", inputs=batch())


class Attending(torch.nn.Module):
    """Attention whose heads divide the chips."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(512, 512)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (4, 128)).transpose(1, 2)
            found = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            x = x + found.transpose(1, 2).flatten(2)
        return x


# Seconds of a step by what is chosen for attention: the ring is best, and smaller blocks for it.
SECONDS = {"by ring": 2.0, "by ulysses": 3.0, "by ring blocks 1024 x 2048 x 1024": 1.0}


@needs_libtpu
def test_attention_is_tried_in_other_ways_and_the_best_with_other_blocks(monkeypatch):
    chosen: list[Any] = []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        chosen.append(choice())
        if not made:
            made.append(tpuport.compile_for(*args, **kwargs, kernel_times=False))
        name = told[-1].partition(", ")[2]
        part = Part("kernels", SECONDS.get(name, 4.0), "")
        return replace(made[0], estimate=Estimate((part,), ()))

    made: list[Any] = []
    told: list[str] = []
    monkeypatch.setattr(searching, "compile_for", compiled)
    with torch.device("meta"):
        ported = tpuport.convert(Attending().to(torch.bfloat16))
    given: dict[str, Any] = {
        "inputs": (jax.ShapeDtypeStruct((4, 1024, 512), "bfloat16"),),
        "presets": {"sequence_parallel": ("sequence",)},
        "progress": lambda done, total, name: told.append(name),
    }
    found = search(ported, "v5e-4", **given)
    blocks = ["3072 x 2048 x 1024", "2048 x 2048 x 1024", "1024 x 2048 x 1024", "1024 x 1024 x 512"]
    attention = ["", "by ulysses", "by ring", *(f"by ring blocks {sizes}" for sizes in blocks)]
    assert [trial.attention for trial in found.trials] == attention
    assert chosen[0] is None
    assert [one.options.sequence_parallel for one in chosen[1:]] == ["ulysses", *["ring"] * 5]
    assert [one.options.blocks.q for one in chosen[3:]] == [3072, 2048, 1024, 1024]
    assert found.best is not None
    assert found.best.attention == "by ring blocks 1024 x 2048 x 1024"
    assert "by ring blocks 1024 x 2048 x 1024" in " ".join(str(found).split())

    with tpuport.attention_options(sequence_parallel="all_gather"):
        assert len(search(ported, "v5e-4", **given).trials) == 1
