"""Wan, Flux, LTX-Video, Mochi and CogVideoX in the denoise loop, against their pipelines in eager
PyTorch.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import tpuport
from recipes.hunyuan_video.__main__ import app
from recipes.hunyuan_video.caching import StepCache
from recipes.hunyuan_video.other_models import Flow, denoise_latents
from recipes.quiet import quietly
from tests.recipes.hunyuan_video.eager import relative
from tpuport.foundation.errors import UsageError

STEPS = 4


def _scheduler(**config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _saved(folder: Path, network: str, scheduler: Any, **config: Any) -> Path:
    """Save a transformer with random weights and a scheduler, as diffusers lays them out."""
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    getattr(diffusers, network)(**config).save_pretrained(folder / "transformer")
    scheduler.save_pretrained(folder / "scheduler")
    return folder


def _pipeline(name: str, folder: Path, network: str, scheduler: Any, **parts: Any) -> Any:
    """Return diffusers' pipeline around a saved transformer, without what prepares its inputs."""
    diffusers: Any = importlib.import_module("diffusers")
    parts = {"vae": None, "text_encoder": None, "tokenizer": None} | parts
    with quietly():
        pipe = getattr(diffusers, name)(
            scheduler=scheduler, transformer=_read(folder, network), **parts
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _prompts(given: dict[str, Any]) -> dict[str, Any]:
    """Return the prompts of a call of a pipeline from those of its transformer."""
    names = {"encoder_hidden_states": "prompt_embeds"}
    names |= {"encoder_attention_mask": "prompt_attention_mask"}
    names |= {f"negative_{ours}": f"negative_{theirs}" for ours, theirs in names.items()}
    return {names[name]: value for name, value in given.items() if name in names}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(
        tmp_path_factory.mktemp("wan"),
        "WanTransformer3DModel",
        _scheduler(shift=3.0),
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(
        tmp_path_factory.mktemp("flux"),
        "FluxTransformer2DModel",
        _scheduler(use_dynamic_shifting=True),
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=24,
        guidance_embeds=True,
        axes_dims_rope=[4, 4, 8],
    )


def _read(folder: Path, kind: str) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    with quietly():
        return getattr(diffusers, kind).from_pretrained(folder / "transformer").eval()


LATENTS = _random(2, 4, 3, 8, 8, seed=1)
PROMPTS = {
    "encoder_hidden_states": _random(2, 7, 16, seed=2),
    "negative_encoder_hidden_states": _random(2, 7, 16, seed=3),
}


def wan_pipeline(folder: Path, guidance: float) -> torch.Tensor:
    diffusers: Any = importlib.import_module("diffusers")
    with quietly():
        vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1]).eval()
    scheduler = _scheduler(shift=3.0)
    pipe = _pipeline("WanPipeline", folder, "WanTransformer3DModel", scheduler, vae=vae)
    return pipe(
        **_prompts(PROMPTS),
        latents=LATENTS.clone(),
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        output_type="latent",
    ).frames


@pytest.fixture(scope="module")
def guided(wan: Path) -> torch.Tensor:
    return wan_pipeline(wan, 5.0)


def test_wan_gives_what_its_pipeline_gives(wan: Path, guided: torch.Tensor):
    flow = Flow(STEPS, 5.0, calls=2, precision="float32")
    found = denoise_latents(wan, LATENTS.numpy(), _as_arrays(PROMPTS), flow)
    assert relative(found, guided) < 1e-4


# test_flux_gives_what_its_pipeline_gives has no guidance.
@pytest.mark.slow
def test_wan_without_guidance(wan: Path):
    flow = Flow(STEPS, precision="float32")
    found = denoise_latents(wan, LATENTS.numpy(), _as_arrays(PROMPTS), flow)
    assert relative(found, wan_pipeline(wan, 1.0)) < 1e-4


def test_flux_gives_what_its_pipeline_gives(flux: Path):
    """Packed latents, coordinates without rows, a schedule shifted by the number of tokens."""
    embeds, pooled = _random(2, 5, 32, seed=4), _random(2, 24, seed=5)
    latents = _random(2, 24, 16, seed=6)
    scheduler, others = _scheduler(use_dynamic_shifting=True), ("text_encoder_2", "tokenizer_2")
    pipe = _pipeline(
        "FluxPipeline", flux, "FluxTransformer2DModel", scheduler, **dict.fromkeys(others)
    )
    wanted = pipe(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        latents=latents.clone(),
        height=64,
        width=96,
        num_inference_steps=STEPS,
        guidance_scale=3.5,
        output_type="latent",
    ).images
    conditions = {
        "encoder_hidden_states": embeds,
        "pooled_projections": pooled,
        "guidance": torch.full((2,), 3.5),
        "txt_ids": torch.zeros(5, 3),
        "img_ids": pipe._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32),
    }
    flow = Flow(STEPS, precision="float32")
    found = denoise_latents(flux, latents.numpy(), _as_arrays(conditions), flow)
    assert relative(found, wanted) < 1e-4
    with pytest.raises(UsageError, match="more than one list of blocks"):
        denoise_latents(
            flux, latents.numpy(), _as_arrays(conditions), Flow(2, cache=StepCache("teacache"))
        )


def masks(*counts: int) -> torch.Tensor:
    """Which tokens of each prompt count."""
    return (torch.arange(7) < torch.tensor(counts)[:, None]).long()


def test_ltx_gives_what_its_pipeline_gives(tmp_path: Path):
    """Packed tokens, coordinates that all rows share, masked prompts, a stretched schedule."""
    config: dict[str, Any] = {"use_dynamic_shifting": True, "shift_terminal": 0.1}
    config |= {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024}
    scheduler = _scheduler(**config)
    _saved(
        tmp_path,
        "LTXVideoTransformer3DModel",
        scheduler,
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        num_layers=2,
    )
    frames, height, width = 3, 2, 4
    latents = _random(2, frames * height * width, 8, seed=7)
    pipe = _pipeline("LTXPipeline", tmp_path, "LTXVideoTransformer3DModel", scheduler)
    given = {**PROMPTS, "encoder_attention_mask": masks(7, 4)}
    given["negative_encoder_attention_mask"] = masks(2, 2)
    wanted = pipe(
        **_prompts(given),
        latents=latents.clone(),
        height=32 * height,
        width=32 * width,
        num_frames=8 * (frames - 1) + 1,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        output_type="latent",
    ).frames
    places = torch.meshgrid(
        *(torch.arange(float(n)) for n in (frames, height, width)), indexing="ij"
    )
    scales = torch.tensor([8 / 25, 32.0, 32.0])[:, None]
    given["video_coords"] = (torch.stack(places).flatten(1) * scales)[None]
    flow = Flow(STEPS, 3.0, precision="float32")
    found = denoise_latents(tmp_path, latents.numpy(), _as_arrays(given), flow)
    assert relative(found, wanted) < 1e-4


# Its pooling of prompts asks for an autocast to float32, which does nothing on a CPU.
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
def test_mochi_gives_what_its_pipeline_gives(tmp_path: Path):
    """Sigmas that rise, in steps that grow; prompts of which only some tokens are attended to."""
    scheduler = _scheduler(invert_sigmas=True)
    _saved(
        tmp_path,
        "MochiTransformer3DModel",
        scheduler,
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=7,
    )
    pipe = _pipeline("MochiPipeline", tmp_path, "MochiTransformer3DModel", scheduler)
    given = {**PROMPTS, "encoder_attention_mask": masks(7, 4).bool()}
    given["negative_encoder_attention_mask"] = masks(2, 2).bool()
    wanted = pipe(
        **_prompts(given),
        latents=LATENTS.clone(),
        height=64,
        width=64,
        num_frames=13,
        num_inference_steps=STEPS,
        guidance_scale=4.5,
        output_type="latent",
    ).frames
    flow = Flow(STEPS, 4.5, precision="float32")
    found = denoise_latents(tmp_path, LATENTS.numpy(), _as_arrays(given), flow)
    assert relative(found, wanted) < 1e-4
    with pytest.raises(UsageError, match="steps=1: expected at least 2 for Mochi"):
        denoise_latents(tmp_path, LATENTS.numpy(), _as_arrays(given), Flow(1, 4.5))


# Steps that divide the thousand of training, and some that do not.
@pytest.mark.parametrize(("steps", "rotary"), [(4, True), (7, False)])
def test_cogvideox_gives_what_its_pipeline_gives(steps: int, rotary: bool, tmp_path: Path):
    """A velocity in place of a flow: DDIM's steps, from noise alone."""
    config: dict[str, Any] = {"prediction_type": "v_prediction", "snr_shift_scale": 1.0}
    config |= {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    diffusers: Any = importlib.import_module("diffusers")
    scheduler = diffusers.CogVideoXDDIMScheduler(**config)
    _saved(
        tmp_path,
        "CogVideoXTransformer3DModel",
        scheduler,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=rotary,
    )
    pipe = _pipeline("CogVideoXPipeline", tmp_path, "CogVideoXTransformer3DModel", scheduler)
    latents = LATENTS.transpose(1, 2)
    wanted = pipe(
        **_prompts(PROMPTS),
        latents=latents.clone(),
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=steps,
        guidance_scale=6.0,
        output_type="latent",
    ).frames
    given = dict(PROMPTS)
    if rotary:
        pair = pipe._prepare_rotary_positional_embeddings(64, 64, 3, torch.device("cpu"))
        given |= dict(zip(("rotary_cos", "rotary_sin"), pair, strict=True))
    flow = Flow(steps, 6.0, precision="float32")
    found = denoise_latents(tmp_path, latents.numpy(), _as_arrays(given), flow)
    assert relative(found, wanted) < 1e-4
    cached = Flow(steps, 6.0, precision="float32", cache=StepCache("teacache", 1, 3, 2))
    again = denoise_latents(tmp_path, latents.numpy(), _as_arrays(given), cached)
    # Steps that reuse what an earlier one found give another result, of the same video.
    assert 1e-4 < relative(again, wanted) < 0.3
    with pytest.raises(UsageError, match=r"shift=3.0: expected none for CogVideoX"):
        denoise_latents(tmp_path, latents.numpy(), _as_arrays(given), Flow(2, 6.0, 3.0))


def _as_arrays(conditions: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in conditions.items()}


def test_the_command_reuses_blocks_of_wan(wan: Path, guided: torch.Tensor, tmp_path: Path):
    inputs, out = tmp_path / "inputs.safetensors", tmp_path / "found" / "latents.safetensors"
    save_file({"latents": LATENTS, **PROMPTS}, inputs)
    steps = ("--steps", "4", "--guidance", "5", "--precision", "float32")
    cache = ("--cache", "teacache", "--cache-start", "1", "--cache-end", "3")
    given = ["denoise-latents", str(wan), str(inputs), "-o", str(out), *steps]
    done = CliRunner().invoke(app, [*given, *cache])
    assert done.exit_code == 0, done.output
    cached = np.asarray(tpuport.load_checkpoint(out)["latents"])
    assert 1e-3 < relative(cached, guided) < 0.3

    wrong = CliRunner().invoke(app, [*given, "--class", "UNet2DConditionModel"])
    assert wrong.exit_code == 2
    assert "expected one of HunyuanVideo15Transformer3DModel" in " ".join(wrong.output.split())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["latents", "encoder_hidden_states"], "negative_encoder_hidden_states is missing"),
        (["encoder_hidden_states"], "has encoder_hidden_states: expected latents"),
    ],
)
def test_what_is_missing_is_named(wan: Path, tmp_path: Path, names: list[str], said: str):
    inputs = tmp_path / "inputs.safetensors"
    save_file({n: v for n, v in {"latents": LATENTS, **PROMPTS}.items() if n in names}, inputs)
    given = ["denoise-latents", str(wan), str(inputs), "-o", str(tmp_path / "o"), "--guidance", "5"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_other_predictions_are_refused(wan: Path, tmp_path: Path):
    (tmp_path / "transformer").symlink_to(wan / "transformer")
    (tmp_path / "scheduler").mkdir()
    config = tmp_path / "scheduler" / "scheduler_config.json"
    config.write_text('{"prediction_type": "v_prediction"}')
    with pytest.raises(UsageError, match="prediction_type='v_prediction', expected a flow"):
        denoise_latents(tmp_path, LATENTS.numpy(), _as_arrays(PROMPTS), Flow(2))
