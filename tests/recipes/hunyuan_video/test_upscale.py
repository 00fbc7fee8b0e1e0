"""Super-resolution: what upstream's own pipeline gives in eager PyTorch, step by step."""

import importlib
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import tpuport
from recipes.hunyuan_video.__main__ import app
from recipes.hunyuan_video.decode import decode_video, port_vae
from recipes.hunyuan_video.generate import How
from recipes.hunyuan_video.make_weights import make_weights
from recipes.hunyuan_video.options import RESOLUTIONS, Options, size_of
from recipes.hunyuan_video.runs import Run
from recipes.hunyuan_video.upscale import (
    SOURCES,
    Larger,
    begin_upscaling,
    larger_size,
    upscale,
)
from recipes.hunyuan_video.upstream import open_components
from recipes.hunyuan_video.video import read_video
from tests.recipes.hunyuan_video.eager import relative
from tpuport.foundation.errors import UsageError

pytestmark = [
    pytest.mark.usefixtures("short"),
    pytest.mark.skipif(
        importlib.util.find_spec("hyvideo") is None,
        reason="waits for hyvideo: pip install --no-deps hyvideo-fork",
    ),
]

SIDES = 80, 128  # of squares, in place of 640 and 960, or 960 and 1440
CHANNELS, TEXT, TOKENS, GLYPHS = 8, 32, 9, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Upstream's folder, and one compile cache for all tests here."""
    folder = tmp_path_factory.mktemp("upscale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
        yield make_weights(folder / "model", layout="upstream")


def encoded() -> dict[str, np.ndarray]:
    """What `encode` writes, with padded rows."""
    draw = np.random.default_rng(1)
    return {
        "text": draw.standard_normal((1, TOKENS, TEXT), np.float32),
        "text_mask": np.array([[1] * 7 + [0] * 2]),
        "glyph": draw.standard_normal((1, GLYPHS, 1472), np.float32),
        "glyph_mask": np.array([[1] * 4 + [0] * 2]),
    }


def small_run(model: Path, out: Path, **given: Any) -> Run:
    """A run of which `denoise` has ended."""
    options = Options(("rain",), frames=5, precision="float32", seed=3, **given)
    low = Run.begin(model, out, options)
    height, width = low.components.size_of(options)
    shape = (1, CHANNELS, options.latent_frames, height // 16, width // 16)
    latents = np.random.default_rng(2).standard_normal(shape, np.float32)
    low.write(low.conditions, encoded())
    low.write(low.latents, {"latents": latents})
    return low


def larger_latents(
    low: Run, run: Run, breaks_off: int = 0, output: str = "latents"
) -> dict[int, np.ndarray]:
    """The latents by the number of steps that were done."""
    found: dict[int, np.ndarray] = {}

    def on_step(done: int, total: int) -> None:
        if run.partial.exists():
            found[done - 1] = np.array(tpuport.load_checkpoint(run.partial)["latents"])
        if done == breaks_off:
            raise KeyboardInterrupt

    upscale(low, run, How(1, output=output, on_step=on_step, say=lambda line: None))
    found[run.options.steps] = np.array(tpuport.load_checkpoint(run.latents)["latents"])
    return found


def by_upstream(
    low: Run, run: Run, patch: pytest.MonkeyPatch, output: str
) -> tuple[list[torch.Tensor], Any]:
    """The latents after each step, and the video, in the sizes that `small_sizes` has."""
    from tests.recipes.hunyuan_video.upstream_larger import (
        larger_pipeline,
        latents_of_steps,
        upstream_module,
    )

    resolution, image = run.options.resolution, run.options.image
    with run.components.tracing():
        sizes = upstream_module().SizeMap
        for name in RESOLUTIONS.keys() & sizes.keys():
            patch.setitem(sizes, name, RESOLUTIONS[name])
        pipeline = larger_pipeline(run.components, resolution, encoded())
        pipeline.target_size_config[resolution]["bucket_hw_base_size"] = RESOLUTIONS[resolution]
        latents = torch.from_numpy(np.array(low.read(low.latents, "denoise")["latents"]))
        return latents_of_steps(
            pipeline,
            low.options.seed,
            prompt="rain",
            video_length=low.options.frames,
            lq_latents=latents,
            reference_image=image,
            output_type=output,
        )


def compared(found: dict[int, np.ndarray], wanted: list[torch.Tensor], steps: int) -> None:
    """The latents after each step."""
    assert len(wanted) == steps
    for number, latents in enumerate(wanted, start=1):
        assert relative(found[number], latents) < 2e-5, number


def test_720p_is_that_of_upstream(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The decoded video, too."""
    monkeypatch.setitem(RESOLUTIONS, "480p", SIDES[0])
    monkeypatch.setitem(RESOLUTIONS, "720p", SIDES[1])
    low = small_run(model, tmp_path / "run", resolution="480p", version="720p_t2v")
    run = begin_upscaling(low, Larger("720p"))
    assert low.components.size_of(low.options) == (48, 96)
    assert size_of(run.options) == (80, 160)
    found = larger_latents(low, run, output="mp4")
    wanted, video = by_upstream(low, run, monkeypatch, "pt")
    compared(found, wanted, 6)
    frames, about = read_video(tmp_path / "run" / "720p" / "video.mp4")
    assert (frames.shape, about["version"]) == ((5, 80, 160, 3), "720p_sr_distilled")
    with run.components.tracing():
        vae = port_vae(run.components.module("vae", torch.float32), "float32")
        run.components.load(vae.ported, "vae")
        decoded = np.array(decode_video(vae, found[6]))
    assert relative(np.clip(decoded / 2 + 0.5, 0, 1), video) < 1e-4


def test_an_image_to_1080p_is_that_of_upstream(
    model: Path, tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a transformer that takes the next timestep, too."""
    monkeypatch.setitem(RESOLUTIONS, "720p", SIDES[0])
    monkeypatch.setitem(RESOLUTIONS, "1080p", SIDES[1])
    low = small_run(model, tmp_path / "run", task="i2v", image=str(picture), version="720p_i2v")
    run = begin_upscaling(low, Larger())
    assert run.folder.name == "1080p"
    found = larger_latents(low, run)
    wanted, _ = by_upstream(low, run, monkeypatch, "latent")
    compared(found, wanted, 8)


def test_sizes_and_images_are_those_of_upstream(model: Path, tmp_path: Path):
    """For every shape, and for images whose middle is between two pixels."""
    from tests.recipes.hunyuan_video.upstream_larger import upstream_module

    with tpuport.porting("hyvideo", absent=["loguru"], port_modules=False):
        upstream = upstream_module()
        data: Any = importlib.import_module("hyvideo.utils.data_utils")
    for resolution, (source, _) in SOURCES.items():
        sizes = (upstream.SizeMap[name] for name in (source, resolution))
        mapped = upstream.BucketMap(*sizes, 16, 16).hr_bucket_map
        assert len(mapped) > 20
        for (width, height), wanted in mapped.items():
            assert larger_size(resolution, height, width)[::-1] == wanted
    assert larger_size("1080p", 720, 1280) == (1072, 1904)

    nearest = upstream.HunyuanVideo_1_5_SR_Pipeline.get_closest_resolution_given_original_size
    settings = SimpleNamespace(target_size_config={
        name: {"bucket_hw_base_size": RESOLUTIONS[name], "bucket_hw_bucket_stride": 16}
        for name in SOURCES
    })  # fmt: skip
    pixels = np.random.default_rng(0).integers(0, 256, (99, 173, 3), dtype=np.uint8)
    components = open_components(model, "float32", "720p_i2v")
    for height, width in ((99, 173), (57, 61), (60, 17), (31, 100)):
        image = Image.fromarray(pixels[:height, :width])
        image.save(tmp_path / "image.png")
        for resolution in SOURCES:
            wanted = nearest(settings, image.size, resolution)
            given = {"resolution": resolution, "image": str(tmp_path / "image.png"), "task": "i2v"}
            assert components.size_of(Options(("rain",), **given)) == wanted
        for size in ((48, 64), (80, 32), (64, 64)):
            wanted = data.resize_and_center_crop(np.asarray(image), size[1], size[0])
            np.testing.assert_array_equal(np.asarray(components.fitted(image, size)), wanted)


def command(*given: Any) -> Result:
    """A command in this process."""
    return CliRunner().invoke(app, list(map(str, given)))


SMALL = ("--height", 32, "--width", 48, "--frames", 1, "--precision", "float32")
BEGUN = ("--guidance", 1, "--steps", 2, "--prompt", "rain")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--version", "1080p_sr_distilled"), "only makes the video of a run larger"),
        (("--version", "720p_t2v", "--super-resolution", "1080p"), "48x32 has no shape of 720p"),
    ],
)
def test_generate_refuses_before_it_computes(
    model: Path, tmp_path: Path, given: tuple[str, ...], message: str
):
    found = command("generate", model, "-o", tmp_path / "run", *BEGUN, *SMALL, *given)
    assert (found.exit_code, message in found.output) == (2, True), found.output
    assert not (tmp_path / "run" / "conditions.safetensors").exists()


def test_upscale_refuses_what_it_cannot_make_larger(
    model: Path, model_folder: Path, tmp_path: Path
):
    out = tmp_path / "run"
    options: dict[str, Any] = {"height": 32, "width": 48, "version": "720p_t2v"}
    low = small_run(model, out, **options)
    found = command("upscale", model, "-o", out)
    assert "`upscale` with --height and" in found.output
    size = "--height", 48, "--width", 64
    sr = tmp_path / "less"
    shutil.copytree(model, sr, ignore=shutil.ignore_patterns("1080p_sr_distilled"))
    # A model without it has the same digest.
    found = command("upscale", sr, "-o", out, *size)
    assert "add transformer/1080p_sr_distilled and upsampler/1080p_sr_distilled" in found.output
    run = begin_upscaling(low, Larger(height=48, width=64))
    run.write(run.conditions, encoded())
    low.write(low.latents, {"latents": np.ones((1, CHANNELS, 2, 2, 3), np.float32)})
    found = command("upscale", model, "-o", out, *size)
    assert "low_resolution was" in found.output
    run.conditions.unlink()
    found = command("denoise", model, "-o", run.folder)
    assert "run `upscale` first" in found.output
    low.latents.unlink()
    found = command("upscale", model, "-o", out, *size)
    assert "run `denoise` first" in found.output

    other = small_run(model_folder, tmp_path / "other", height=32, width=48)
    with pytest.raises(UsageError, match="version='': upstream makes nothing larger of it"):
        begin_upscaling(other, Larger())
    with pytest.raises(UsageError, match="is not in upstream's layout"):
        begin_upscaling(other, Larger("720p", height=48, width=64))
    with pytest.raises(UsageError, match="super_resolution='360p': expected one of 720p, 1080p"):
        Larger("360p")


# test_runs.py has it for the same stage of the small video.
@pytest.mark.slow
def test_a_larger_run_that_breaks_off_goes_on(model: Path, tmp_path: Path):
    low = small_run(model, tmp_path / "run", height=32, width=48, version="720p_t2v")
    wanted = Larger("720p", height=48, width=80)
    found = larger_latents(low, begin_upscaling(low, wanted))
    shutil.rmtree(tmp_path / "run" / "720p")
    with pytest.raises(KeyboardInterrupt):
        larger_latents(low, begin_upscaling(low, wanted), breaks_off=4)
    again = larger_latents(low, begin_upscaling(low, wanted))
    assert {*found} == {1, 2, 3, 4, 5, 6}
    assert {*again} == {3, 4, 5, 6}  # the third was read
    np.testing.assert_array_equal(again[6], found[6])


# The stages are compared with upstream above, one by one.
@pytest.mark.slow
def test_generate_makes_the_larger_video_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As upstream does; spread over eight devices it is the same."""
    monkeypatch.setitem(RESOLUTIONS, "720p", 48)
    monkeypatch.setitem(RESOLUTIONS, "1080p", 64)
    given = ("generate", model, *BEGUN, "--version", "720p_t2v", "--frames", 1)
    given += ("--super-resolution", "1080p", "--aspect", "1:1", "--precision", "float32")
    one, eight = tmp_path / "one", tmp_path / "eight"
    found = command(*given, "-o", one)
    assert found.exit_code == 0, found.output
    assert {path.name for path in one.iterdir()} == {
        "1080p", "conditions.safetensors", "latents.safetensors", "run.json"
    }  # fmt: skip
    about = json.loads((one / "1080p" / "run.json").read_text())
    assert (about["steps"], about["guidance"], about["height"]) == (8, 1.0, 64)
    assert read_video(one / "1080p" / "video.mp4")[0].shape == (1, 64, 64, 3)
    found = command(*given, "-o", eight, "--spread", "sequence")
    assert found.exit_code == 0, found.output
    first, second = (
        tpuport.load_checkpoint(out / "1080p" / "latents.safetensors")["latents"]
        for out in (one, eight)
    )
    assert relative(np.array(first), torch.from_numpy(np.array(second))) < 1e-4
