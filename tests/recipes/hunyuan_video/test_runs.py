"""Runs from the command line: resumed, killed, refused, and what is left after a fault."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import tpuport
from recipes.hunyuan_video import runs
from recipes.hunyuan_video.__main__ import app
from recipes.hunyuan_video.denoise import Denoiser
from recipes.hunyuan_video.video import psnr, read_video
from tests.recipes.hunyuan_video.short import LENGTH
from tests.recipes.killing import kill_when
from tpuport.foundation.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("short")

SIZE = ("--height", "32", "--width", "48", "--frames", "5", "--precision", "float32")
FAST = ("--guidance", "1", "--steps", "3", "--save-every", "1", *SIZE)
# The command with short chats and slow steps, so that it is not through before it is killed.
SCRIPT = f"""
import time
from functools import partial
from recipes.hunyuan_video import encode, prompts
from recipes.hunyuan_video.__main__ import app
from recipes.hunyuan_video.denoise import Denoiser

encode.tokenize = partial(prompts.tokenize, max_length={LENGTH})
Denoiser.is_full = lambda self, step: time.sleep(0.2) or True
app()
"""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One compile cache for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        yield


def run(*given: Any) -> Result:
    """A command in this process."""
    return CliRunner().invoke(app, list(map(str, given)))


def generate(model: Path, out: Path, *given: str) -> Result:
    """All stages of one small video."""
    return run("generate", model, "--out", out, "--prompt", "rain", *FAST, *given)


def latents(out: Path) -> np.ndarray:
    """What denoising left."""
    return np.asarray(tpuport.load_checkpoint(out / "latents.safetensors")["latents"])


def test_all_at_once_and_one_by_one(model_folder: Path, tmp_path: Path):
    at_once, one_by_one = tmp_path / "a", tmp_path / "b"
    before = sum(array.nbytes for array in jax.live_arrays())
    found = generate(model_folder, at_once)
    assert found.exit_code == 0, found.output
    # Conditions may be kept, but no weights, of which the smallest are 210 kB.
    kept = sum(array.nbytes for array in jax.live_arrays()) - before
    assert kept < 200_000
    frames, about = read_video(at_once / "video.mp4")
    assert frames.shape == (5, 32, 48, 3)
    assert (about["prompt"], about["seed"]) == ("rain", 0)
    assert about["versions"]["tpuport"] == tpuport.__version__

    begun = run("encode", model_folder, "-o", one_by_one, "-p", "rain", *FAST[:4], *SIZE)
    assert begun.exit_code == 0, begun.output
    for stage in ("denoise", "decode"):
        assert run(stage, model_folder, "-o", one_by_one).exit_code == 0
    np.testing.assert_array_equal(latents(at_once), latents(one_by_one))

    both = run("compare", at_once, one_by_one, "-o", tmp_path / "both.mp4")
    assert both.exit_code == 0, both.output
    assert "PSNR inf dB" in both.output
    assert "latents: PSNR inf dB, cosine 1.00000" in both.output
    assert read_video(tmp_path / "both.mp4")[0].shape == (5, 32, 96, 3)
    # As pictures instead.
    assert run("decode", model_folder, "-o", one_by_one, "--output", "png").exit_code == 0
    pictures = sorted((one_by_one / "video").glob("*.png"))
    assert [path.name for path in pictures] == [f"{n:05}.png" for n in range(5)]
    shown = np.stack([np.asarray(Image.open(path)) for path in pictures])
    assert psnr(shown, frames) > 15  # noise, which H.264 blurs
    assert json.loads((one_by_one / "video" / "about.json").read_text())["prompt"] == "rain"
    # What is there is not computed again.
    again = generate(model_folder, at_once)
    assert again.output.count("is there") == 2
    assert "0 compiled" in again.output


# The test of a run that breaks off runs the same lines.
@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(model_folder: Path, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # Frames would say no more, and take longest.
    given = ("--steps", "6", "--output", "latents")
    assert generate(model_folder, whole, *given).exit_code == 0
    partial = killed / "denoising.safetensors"
    command = ("generate", str(model_folder), "-o", str(killed), "-p", "rain", *FAST)
    kill_when(partial.exists, "-c", SCRIPT, *command, *given)
    assert partial.exists()
    assert not (killed / "latents.safetensors").exists()
    found = generate(model_folder, killed, *given)
    assert found.exit_code == 0, found.output
    assert "resumes after step" in found.output
    assert not partial.exists()
    np.testing.assert_array_equal(latents(whole), latents(killed))


@pytest.fixture(scope="module")
def encoded(short: None, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which `encode` is through; do not write there."""
    out = tmp_path_factory.mktemp("encoded") / "run"
    found = run("encode", model_folder, "-o", out, "-p", "rain", *FAST[:4], *SIZE)
    assert found.exit_code == 0, found.output
    return out


@pytest.fixture
def begun(encoded: Path, tmp_path: Path) -> Path:
    """The same, to go on with."""
    return shutil.copytree(encoded, tmp_path / "begun")


def test_a_run_that_breaks_off_goes_on(
    model_folder: Path, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = shutil.copytree(begun, tmp_path / "whole")
    given = ("denoise", model_folder, "--save-every", "1", "-o")
    assert run(*given, whole).exit_code == 0

    def breaks_off(self: Denoiser, step: int) -> bool:
        if step == 2:
            raise KeyboardInterrupt
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Denoiser, "is_full", breaks_off)
        assert run(*given, begun).exit_code != 0
    partial = begun / "denoising.safetensors"
    assert partial.exists()
    assert not (begun / "latents.safetensors").exists()
    found = run(*given, begun)
    assert found.exit_code == 0, found.output
    assert "resumes after step" in found.output
    assert not partial.exists()
    np.testing.assert_array_equal(latents(whole), latents(begun))


# test_caching.py goes on from what is saved, without files.
@pytest.mark.slow
def test_a_run_that_continues_results_goes_on(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From their differences, which are saved beside the latents."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    given = ("--steps", "6", "--cache", "taylorcache", "--cache-start", "1")
    given = (*given, "--cache-end", "6", "--cache-interval", "2", "--output", "latents")
    assert generate(model_folder, whole, *given).exit_code == 0
    known = Denoiser.is_full

    def breaks_off(self: Denoiser, step: int) -> bool:
        if step == 4:
            raise KeyboardInterrupt
        return known(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Denoiser, "is_full", breaks_off)
        assert generate(model_folder, broken, *given).exit_code != 0
    saved = tpuport.load_checkpoint(broken / "denoising.safetensors")
    assert {*saved} == {"latents", "steps", "differences.0.0"}
    found = generate(model_folder, broken, *given)
    assert "resumes after step 3" in found.output
    np.testing.assert_array_equal(latents(whole), latents(broken))


def test_other_options_are_not_gone_on_with(model_folder: Path, begun: Path, tmp_path: Path):
    given = ("--seed", "3", *FAST[:4], *SIZE)
    found = run("encode", model_folder, "-o", begun, "-p", "snow", *given)
    assert found.exit_code == 2
    assert "prompts was ['rain'], is ['snow']; seed was 0, is 3" in found.output
    # Nor another model.
    other = shutil.copytree(model_folder, tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text())
    (other / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 2.0}))
    found = run("denoise", other, "-o", begun)
    assert found.exit_code == 2
    assert "model was" in found.output


@pytest.mark.parametrize(
    ("stage", "message"),
    [("denoise", "run `encode` first"), ("decode", "run `denoise` first")],
)
def test_a_stage_names_the_one_before(
    model_folder: Path, begun: Path, tmp_path: Path, stage: str, message: str
):
    if stage == "denoise":
        (begun / "conditions.safetensors").unlink()
    found = run(stage, model_folder, "-o", begun)
    assert found.exit_code == 2
    assert message in found.output
    missing = run(stage, model_folder, "-o", tmp_path / "none")
    assert missing.exit_code == 2
    assert "run.json cannot be read" in missing.output


def truncated(model: Path) -> None:
    path = model / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def missing_shard(model: Path) -> None:
    folder = model / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    index = {"weight_map": {"proj_out.bias": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
    name = "diffusion_pytorch_model.safetensors.index.json"
    (folder / name).write_text(json.dumps(index))


def wrong_sizes(model: Path) -> None:
    path = model / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 4}))


def defaults(model: Path) -> None:
    (model / "transformer" / "config.json").write_text('{"num_attention_heads": "many"}')


def other_pipeline(model: Path) -> None:
    path = model / "model_index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "transformer": ["os", "system"]}))


def no_vocabulary(model: Path) -> None:
    shutil.rmtree(model / "tokenizer")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "diffusion_pytorch_model.safetensors"),
        (missing_shard, "diffusion_pytorch_model-00001-of-00002.safetensors"),
        (wrong_sizes, "missing in the checkpoint: transformer_blocks.3"),
        (defaults, "is no configuration of diffusers.HunyuanVideo15Transformer3DModel"),
        (other_pipeline, "transformer is os.system, expected diffusers.HunyuanVideo15"),
        (no_vocabulary, "has no tokenizer. What to do: download the complete folder"),
    ],
)
def test_a_damaged_model_is_named(model_folder: Path, tmp_path: Path, damage: Any, message: str):
    model = shutil.copytree(model_folder, tmp_path / "model")
    damage(model)
    found = generate(model, tmp_path / "out")
    assert found.exit_code == 2, found.output
    assert message in found.output.replace("\n", " ")
    assert "Traceback" not in found.output
    # What came before the damage is kept.
    begun = damage in (truncated, missing_shard, wrong_sizes, defaults)
    assert (tmp_path / "out" / "conditions.safetensors").is_file() == begun


def test_a_full_disk_loses_no_stage(
    model_folder: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
):
    save, message = tpuport.save_checkpoint, "latents.safetensors was not saved: the disk is full"

    def full(path: Path, *args: Any, **options: Any) -> None:
        raise CheckpointError(message)

    monkeypatch.setattr(runs.tpuport, "save_checkpoint", full)
    found = run("denoise", model_folder, "-o", begun)
    assert (found.exit_code, message in found.output) == (2, True)
    monkeypatch.setattr(runs.tpuport, "save_checkpoint", save)
    assert (begun / "conditions.safetensors").is_file()
    assert run("denoise", model_folder, "-o", begun).exit_code == 0


def test_what_is_no_model_is_said(tmp_path: Path):
    found = generate(tmp_path, tmp_path / "out")
    assert found.exit_code == 2
    assert "model_index.json cannot be read" in found.output
    assert "make-weights" in found.output


# test_caching.py has the cache; the first test here compares, the second leaves latents alone.
@pytest.mark.slow
def test_latents_are_enough_by_choice(model_folder: Path, tmp_path: Path):
    """And they tell how far a run that reuses blocks' results is from one that does not."""
    full, cached = tmp_path / "full", tmp_path / "cached"
    assert generate(model_folder, full, "--output", "latents").exit_code == 0
    assert not list(full.glob("video*"))
    options = ("--cache", "deepcache", "--cache-start", "1", "--cache-interval", "2")
    found = generate(model_folder, cached, "--output", "latents", *options)
    assert found.exit_code == 0, found.output
    decibels, cosine = runs.latents_apart(full / runs.LATENTS, cached / runs.LATENTS) or (0, 0)
    assert 5 < decibels < 80
    assert 0.9 < cosine < 1
    both = run("compare", full, cached, "-o", tmp_path / "both.mp4")
    assert both.exit_code == 0, both.output
    assert f"latents: PSNR {decibels:.1f} dB" in both.output
    assert not (tmp_path / "both.mp4").exists()
    refused = generate(model_folder, cached, "--output", "latents")
    assert refused.exit_code == 2
    assert "cache" in refused.output
