"""`python -m recipes.openpi compile`: a policy call and its parts, for chips that are not there."""

import jax
import pytest

import tpuport
from recipes.openpi.compile import PARTS, compile_parts, milliseconds
from tests.program.small import needs_libtpu
from tpuport.foundation.errors import UsageError


@needs_libtpu
@pytest.mark.slow
def test_parts_are_compiled_from_shapes():
    reports = dict(compile_parts("tiny-pi0"))
    assert all(report.fits for report in reports.values())
    flops = {part: report.work.chip_flops for part, report in reports.items() if report.work}
    # The loop of the call is counted once.
    parts = sum(flops[part] for part in PARTS[:3])
    assert flops["call"] == pytest.approx(parts, rel=0.1)
    assert milliseconds(reports) > 0
    assert milliseconds({"vision": reports["vision"]}) is None


@pytest.mark.parametrize("size", ["tiny-pi0", "tiny-pi05"])
def test_each_part_asks_for_its_program(size: str, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def noted(ported, topology, *, inputs, method, **named):
        del ported, named
        asked[method] = [leaf.shape for leaf in jax.tree.leaves(inputs)]
        return topology

    monkeypatch.setattr(tpuport, "compile_for", noted)
    found = dict(compile_parts(size, "v5e-1", batch=2, cameras=1))
    assert found == dict.fromkeys(PARTS, "v5e-1")
    assert list(asked) == ["image_tokens", "prefix_keys", "flow_step", "sample_actions"]
    assert asked["image_tokens"] == [(2, 1, 56, 56, 3)]
    length = 16 + (128 if size == "tiny-pi05" else 48)
    assert asked["flow_step"][:6] == [(2, 1, length, 16)] * 6
    assert (2, 16, 64) in asked["prefix_keys"]


def test_what_is_not_there_is_named():
    with pytest.raises(UsageError, match="part='vison': expected one of vision"):
        next(compile_parts(parts=("vison",)))
    with pytest.raises(UsageError, match="scheme='w1': expected one of w8a8"):
        next(compile_parts("tiny-pi0", scheme="w1"))
