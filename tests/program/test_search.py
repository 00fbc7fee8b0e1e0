"""Looking for a mesh and rules: what is tried, how it is ranked, when it stops."""

import json

import pytest

from tests.program.small import batch, needs_libtpu, on_meta, squared
from tpuport.errors import UsageError
from tpuport.program.search import candidates, factorisations, search


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
    assert len(tried) == len({(rules, str(mesh)) for rules, mesh in tried})


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
