"""`python -m recipes.recogdrive compile`: each program, for chips that are not there."""

from dataclasses import replace

import jax
import pytest

import tpuport
from recipes.recogdrive.compile import STAGES, compile_stage
from recipes.recogdrive.planner import SIZES
from tests.program.small import needs_libtpu
from tpuport.foundation.errors import UsageError
from tpuport.training import TrainStep

TRAINED = {"finetune", "train", "grpo"}


# What they ask for is tested below; openpilot/test_compile.py and tests/program compile steps.
@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_program_is_compiled_from_shapes(stage: str, monkeypatch: pytest.MonkeyPatch):
    # One block of each kind.
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], layers=2))
    report = compile_stage(stage, "tiny", kernel_times=False)
    assert (report.fits, report.num_chips, report.quick) == (True, 4, True)
    assert (report.memory.optimizer > 0) == (stage in TRAINED)
    assert report.work is not None
    # No chip computes what another one does, too.
    assert report.work.chip_flops * 4 < 1.05 * sum(one.flops for one in report.work.products)
    assert all(one.kernel != "full scores" for one in report.work.attention)
    moved = {kind for kind, size in report.work.bytes_by_kind().items() if size > 4096}
    assert moved <= {
        # The rows of a spread embedding go to the chips of their samples by all-to-all.
        "finetune": {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
        | {"collective-permute"},
        "train": {"all-reduce"},
        "grpo": {"all-reduce"},
    }.get(stage, set())


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_asks_for_its_program(stage: str, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(
        tpuport, "compile_for", lambda *given, **named: asked.append((given, named))
    )
    compile_stage(stage, "tiny", batch=8, quick=False, kernel_times=False)
    (((what, topology), named),) = asked
    assert isinstance(what, TrainStep) == (stage in TRAINED)
    assert (topology, named["quick"], named["kernel_times"]) == ("v6e-4", False, False)
    assert named["rules"] == ("fsdp" if stage == "finetune" else "ddp")
    methods = {"cache": "last_hidden_states", "sample": "sampled", "chains": "sampled_chains"}
    assert named.get("method") == methods.get(stage)
    shapes = [leaf.shape for leaf in jax.tree.leaves(named["inputs"]) if hasattr(leaf, "shape")]
    assert len(shapes) > 4
    assert {shape[0] for shape in shapes} == {8}


@pytest.mark.parametrize(("stage", "size"), [("trian", "small"), ("train", "medium")])
def test_what_is_not_there_is_named(stage: str, size: str):
    with pytest.raises(UsageError, match=r"(stage='trian'|size='medium'): expected one of"):
        compile_stage(stage, size)
