"""Compilation of steps at full size from shapes alone, without a TPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import torch

import tpuport
from recipes.mae_dit.config import (
    Arch,
    Config,
    Dataset,
    Discriminator,
    DiscriminatorArch,
    Experiment,
    Gan,
    GanLoss,
    Optimizer,
    Target,
    Transforms,
    Warmup,
)
from recipes.mae_dit.discriminator import make_discriminator
from recipes.mae_dit.evaluation.lpips import LPIPS
from recipes.mae_dit.losses import Stage1, gan_of
from recipes.mae_dit.models import make_autoencoder, make_stage2
from recipes.mae_dit.stage1 import Stage1Steps
from recipes.mae_dit.stage2.training import Stage2, make_step
from tpuport.aot.report import CompileReport
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

# Only the schedule of the learning rate depends on it.
_STEPS_PER_EPOCH = 1000
_PIXELS = 256
_ADAM = Optimizer("adamw", 1e-4, Warmup(1, 1, 1e-4, mode="fix"), clip_grad_norm=1.0)
_VIT_B = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": _PIXELS,
    "patch_size": 16,
    "decoder_num_attention_heads": 16,
    "decoder_hidden_size": 512,
    "decoder_num_hidden_layers": 8,
    "decoder_intermediate_size": 2048,
}
# DiT-XL/2 in latents of a KL-VAE, and upstream's wide one in those of ViT-B.
_DITS = {
    "dit-xl": {"input_size": 32, "patch_size": 2, "in_channels": 4, "hidden_size": 1152}
    | {"depth": 28, "num_heads": 16},
    "dit-wide": {"input_size": 16, "patch_size": 1, "in_channels": 768, "hidden_size": 1024}
    | {"depth": 12, "num_heads": 16},
}
_DISCRIMINATOR = DiscriminatorArch(num_layers=3, ndf=64)


@dataclass(frozen=True)
class How:
    """How a step is compiled.

    Attributes:
        topology: TPU slice.
        batch: Images of an update over all chips.
        accumulate: Parts of an update.
        mesh: Axes of the mesh.
        rules: How weights are spread, see `tpuport.shard`.
        quick: See `tpuport.compile_for`.
        kernel_times: See `tpuport.compile_for`.
    """

    topology: str = "v6e-8"
    batch: int = 1024
    accumulate: int = 1
    mesh: str = "fsdp"
    rules: str = "fsdp"
    quick: bool = True
    kernel_times: bool = True


def _config(how: How, stage_1: Target, **parts: Any) -> Config:
    arch = Arch(stage_1, ema=0.9999, **parts)
    experiment = Experiment(how.batch // how.accumulate, 100, how.accumulate)
    gan = Gan(Discriminator(_DISCRIMINATOR, _ADAM), GanLoss(0.75, 1.0, 0, disc_upd_start=0))
    transforms = Transforms(f"imagenetMAE{_PIXELS}x{_PIXELS}")
    return Config(Dataset("imagenet", transforms), arch, _ADAM, experiment, gan)


def _settle(ported: PortedModel) -> None:
    """Compute in bfloat16 with weights in float32, and keep the inputs of blocks only."""
    tpuport.cast(ported, "bf16_master")
    tpuport.remat(ported, "full")


def _compiled(step: Any, batch: dict[str, jax.ShapeDtypeStruct], how: How) -> CompileReport:
    return tpuport.compile_for(
        step,
        how.topology,
        inputs=(batch,),
        mesh={how.mesh: -1},
        rules=how.rules,
        quick=how.quick,
        kernel_times=how.kernel_times,
    )


def _stage1(how: How, part: str) -> CompileReport:
    """Compile the step of the autoencoder with all losses, or that of the discriminator."""
    target = Target("recipes.mae_dit.models.MAE", {"config": _VIT_B})
    config = _config(how, target, connector=Target("recipes.mae_dit.models.Grid"))
    gan = gan_of(config)
    model = make_autoencoder(config)
    modules = Stage1(model, make_discriminator(gan.disc.arch), LPIPS(), gan)
    steps = Stage1Steps(modules, config, _STEPS_PER_EPOCH, on=_settle)
    shape = (how.batch, 3, _PIXELS, _PIXELS)
    return _compiled(
        steps.of(0).steps[part], {"image": jax.ShapeDtypeStruct(shape, "float32")}, how
    )


def _stage2(how: How, name: str) -> CompileReport:
    """Compile the step of a diffusion transformer on cached latents."""
    params = {**_DITS[name], "num_classes": 1000}
    target = Target("recipes.mae_dit.stage2.models.DiT", params)
    config = _config(how, Target("recipes.mae_dit.models.MAE"), stage_2=target)
    with torch.device("meta"):
        modules = Stage2(make_stage2(config))
    step = make_step(modules, config, _STEPS_PER_EPOCH, on=_settle)
    side, channels = params["input_size"], params["in_channels"]
    batch = {
        "latent": jax.ShapeDtypeStruct((how.batch, channels, side, side), "float32"),
        "label": jax.ShapeDtypeStruct((how.batch,), "int32"),
    }
    return _compiled(step, batch, how)


PROGRAMS: dict[str, Callable[[How], CompileReport]] = {
    "stage1": lambda how: _stage1(how, "generator"),
    "discriminator": lambda how: _stage1(how, "discriminator"),
    **{name: lambda how, name=name: _stage2(how, name) for name in _DITS},
}


def compile_program(name: str, how: How) -> CompileReport:
    """Compile one program in bfloat16, with weights in float32.

    Args:
        name: "stage1" (ViT-B/16 at 256 pixels with all losses), "discriminator", "dit-xl" or
            "dit-wide".
        how: How to compile it.

    Raises:
        UsageError: There is no such program, or the batch does not divide into parts.
        MissingExtraError: libtpu is not installed.
    """
    if name not in PROGRAMS:
        raise UsageError(f"program={name!r}: expected one of {', '.join(PROGRAMS)}")
    if how.accumulate < 1 or how.batch % how.accumulate:
        raise UsageError(
            f"batch={how.batch} does not divide into accumulate={how.accumulate} parts"
        )
    return PROGRAMS[name](how)
