"""The decoding of a video is compiled for chips that are not there."""

from typing import Any

import pytest
import torch

import tpuport
from recipes.hunyuan_video.compile_decode import compile_decode, published_vae
from recipes.hunyuan_video.decode import decode_latents, factors
from tests.program.small import needs_libtpu
from tests.recipes.hunyuan_video.vae_models import FACTOR, TILE, small_vae
from tpuport.foundation.errors import UsageError


def test_its_program_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(tpuport, "compile_for", lambda *a, **named: asked.append((*a, named)))
    height = 3 * TILE * FACTOR
    compile_decode("v6e-4", 1, height, 3 * FACTOR, model=small_vae(), quick=True)
    ((_, topology, named),) = asked
    (latents,) = named["inputs"]
    assert latents.shape == (1, small_vae().config.latent_channels, 1, 3 * TILE, 3)
    assert (topology, named["mesh"], named["quick"]) == ("v6e-4", {"data": -1}, True)
    assert named["method"] is decode_latents


# Above it is asked for, and test_decode.py spreads tiles over devices.
@pytest.mark.slow
@needs_libtpu
def test_tiles_are_spread_over_the_chips():
    height = 3 * TILE * FACTOR  # tiles 0, 3, 6 and 9 along it, the last of them one of three rows
    report = compile_decode("v6e-4", 1, height, 3 * FACTOR, model=small_vae(), quick=True)
    assert (report.what, report.topology, report.num_chips) == ("decode_latents", "v6e-4", 4)
    assert report.fits
    assert report.work is not None
    assert all(one.kernel != "full scores" for one in report.work.attention)
    # Results are gathered, and nothing that is computed on the way.
    assert {one.kind for one in report.work.collectives} <= {"all-gather", "all-reduce"}
    video = 3 * height * 3 * FACTOR * 2
    assert sum(one.bytes for one in report.work.collectives) < 3 * video


@pytest.mark.parametrize(("frames", "height", "width"), [(2, 16, 16), (0, 16, 16), (3, 18, 16)])
def test_a_size_that_no_video_has(frames: int, height: int, width: int):
    with pytest.raises(UsageError, match=rf"frames={frames}, height={height}, .* a multiple of 2"):
        compile_decode("v6e-4", frames, height, width, model=small_vae())


def test_the_published_configuration_is_the_default():
    model = published_vae()
    assert {weight.device for weight in model.parameters()} == {torch.device("meta")}
    assert factors(model) == (4, 16)
    decoder = sum(weight.numel() for weight in model.decoder.parameters())
    assert round(decoder / 1e6) == 871
