"""A step of denoising is compiled for chips that are not there."""

from typing import Any

import pytest

import tpuport
from recipes.hunyuan_video import compile
from recipes.hunyuan_video.compile import (
    compile_denoise,
    compile_upscale,
    make_transformer,
    step_shapes,
)
from recipes.hunyuan_video.options import Options
from tests.program.small import needs_libtpu
from tpuport.foundation.errors import UsageError

SMALL = {"num_layers": 1, "num_attention_heads": 4, "num_refiner_layers": 1}


def test_its_program_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(tpuport, "compile_for", lambda *a, **named: asked.append((*a, named)))
    compile_denoise("sequence", "v6e-4", 5, 128, 128, model=make_transformer(**SMALL), quick=False)
    compile_denoise("auto", "v6e-8", 5, 128, 128, model=make_transformer(**SMALL), calls=2)
    compile_denoise("auto", "v6e-8", 5, 128, 128, model=make_transformer(**SMALL), guidance=1.0)
    found: list[Any] = [
        (topology, named["mesh"], named["quick"], *named["inputs"][0][3:])
        for _, topology, named in asked
    ]
    assert found == [
        ("v6e-4", {"sequence": 4}, False, 6.0, 1),
        ("v6e-8", {"data": 2, "sequence": 4}, True, 6.0, 2),
        ("v6e-8", {"sequence": 8}, True, 1.0, 1),
    ]
    assert {named["method"] for *_, named in asked} == {"denoise_step"}
    rows = [named["inputs"][0][2]["text"].shape[0] for *_, named in asked]
    assert rows == [2, 2, 1]


# Above it is asked for; openpilot/test_compile.py compiles a step, and test_spreading.py runs this.
@pytest.mark.slow
@needs_libtpu
def test_a_step_is_spread_over_the_chips(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile, "MAX_LENGTH", 200)  # libtpu takes half as long
    model = make_transformer(**SMALL)
    report = compile_denoise("sequence", "v6e-4", 5, 128, 128, model=model, kernel_times=False)
    assert (report.what, report.num_chips, report.quick) == ("denoise_step", 4, True)
    assert report.fits
    work = report.work
    assert work is not None
    assert all(one.kernel != "full scores" for one in work.attention)
    moved = {one.kind for one in work.collectives}
    assert "all-to-all" in moved
    assert moved <= {"all-to-all", "all-gather", "all-reduce", "collective-permute"}


def test_the_published_sizes_are_the_default():
    model = make_transformer()
    assert sum(weight.numel() for weight in model.parameters()) == 8_326_608_160
    latents, times, conditions = step_shapes(121, 720, 1280)
    assert latents.shape == (1, 32, 31, 45, 80)
    assert times.shape == (4,)
    assert conditions["condition"].shape == (2, 33, 31, 45, 80)
    assert conditions["text"].shape == (2, 1000, 3584)
    assert conditions["picture"].shape == (2, 0, 1152)
    conditions = step_shapes(121, 720, 1280, guidance=False, i2v=True)[2]
    assert conditions["picture"].shape == (1, 729, 1152)


def test_super_resolution_has_more_channels(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(tpuport, "compile_for", lambda *a, **named: asked.append((*a, named)))
    options = Options(("",), resolution="1080p", frames=5)
    compile_upscale(options)
    ((ported, topology, named),) = asked
    assert ported.module.config.in_channels == 3 * 32 + 2
    latents, _, conditions, guidance, calls = named["inputs"][0]
    assert (topology, named["mesh"], guidance, calls) == ("v6e-8", {"sequence": 8}, 1.0, 1)
    assert latents.shape == (1, 32, 2, 67, 119)
    channels = {name: conditions[name].shape[1] for name in ("condition", "low")}
    assert channels == {"condition": 33, "low": 33}
    with pytest.raises(UsageError, match="super_resolution='480p': expected one of 720p, 1080p"):
        compile_upscale(Options(("",), resolution="480p"))


def test_another_way_is_refused():
    with pytest.raises(UsageError, match="spread='rows': expected one of sequence"):
        compile_denoise("rows", "v6e-4")
