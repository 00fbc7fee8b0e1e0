"""`python -m recipes.openpi compile`: a policy call and its parts, for chips that are not there."""

import jax
import pytest

import tpuport
from recipes.openpi.compile import PARTS, compile_parts, milliseconds
from recipes.openpi.config import config_of
from tests.program.small import needs_libtpu
from tpuport.foundation.errors import UsageError


# The token of π0's state attends to no action, which is neither a band nor segments.
@pytest.mark.filterwarnings(
    "ignore:Splash attention cannot serve an arbitrary mask"
    ":tpuport.kernels.attention.dispatch.AttentionWarning"
)
@needs_libtpu
@pytest.mark.slow
def test_parts_are_compiled_from_shapes():
    reports = dict(compile_parts("tiny-pi0"))
    assert all(report.fits for report in reports.values())
    flops = {part: report.work.chip_flops for part, report in reports.items() if report.work}
    # The loop of the call is counted once. Of the language model's last layer only keys and values
    # are read, so a program may leave out its other products, if the layers are not a loop.
    config = config_of("tiny-pi0")
    sizes, tokens = config.language, 3 * config.vision.num_tokens + config.max_token_len
    unread = 2 * tokens * sizes.width * (2 * sizes.heads * sizes.head_dim + 3 * sizes.mlp)
    parts = sum(flops[part] for part in PARTS[:3])
    assert 0.98 * (parts - unread) < flops["call"] < 1.02 * parts
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
