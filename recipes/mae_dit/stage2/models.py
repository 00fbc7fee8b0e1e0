"""Stage 2 with upstream's interface: a denoiser, its loss, and the settings of its sampler."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from recipes.mae_dit.stage2 import transformer
from recipes.mae_dit.stage2.conditioning import ClassConditional
from recipes.mae_dit.stage2.diffusion import DDPM, FlowMatching, Schedule, ScheduleName
from tpuport.foundation.errors import UsageError

Process = Literal["ddpm", "flow"]
STEPS = 1000
# Denoisers embed times from 0 to about this.
_TIMES = {"ddpm": 1.0, "flow": 1000.0}


@dataclass(frozen=True)
class Settings:
    """What a model trains on, and how it samples by default, as upstream names it.

    Attributes:
        num_classes: Classes of the data.
        class_dropout_prob: Share of labels that become that of no class.
        learn_sigma: Whether variances are learnt.
        process: Diffusion ("ddpm"), or flow matching.
        noise_schedule: Schedule of the diffusion.
        cfg: Scale of classifier-free guidance; below 1 there is none.
        inference_step: Steps of the sampler.
    """

    num_classes: int
    class_dropout_prob: float = 0.1
    learn_sigma: bool = True
    process: Process = "ddpm"
    noise_schedule: ScheduleName = "linear"
    cfg: float = 0.0
    inference_step: int = 250

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if self.process not in _TIMES:
            raise UsageError(f"process={self.process!r}: expected {' or '.join(_TIMES)}")
        if self.process == "flow" and self.learn_sigma:
            raise UsageError(
                "process='flow' has no variances. What to do: set learn_sigma to false"
            )

    def channels(self, count: int) -> int:
        """Return the channels that a denoiser of `count` channels returns."""
        return 2 * count if self.learn_sigma else count

    @property
    def schedule(self) -> Schedule:
        """Return the forward process of the diffusion."""
        return Schedule.named(self.noise_schedule, STEPS)


@dataclass
class Prediction:
    """What `forward` returns; as in upstream's DiT, the loss makes the prediction."""

    zs_pred: torch.Tensor
    zs_degraded: torch.Tensor | None = None
    additional_attr: Any = None


class Diffusion(nn.Module):
    """A denoiser with upstream's interface of stage 2.

    Args:
        denoiser: See `ClassConditional`.
        settings: What it trains on.
    """

    def __init__(self, denoiser: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.settings, process = settings, FlowMatching()
        if settings.process == "ddpm":
            process = DDPM(settings.schedule, learn_sigma=settings.learn_sigma)
        self.conditional = ClassConditional(
            denoiser, process, settings.num_classes, settings.class_dropout_prob
        )

    @property
    def denoiser(self) -> nn.Module:
        """Return the denoiser."""
        return self.conditional.denoiser

    def forward(self, encodings: Any, inputs: Any) -> Prediction:
        """Return the latents."""
        del inputs
        return Prediction(encodings.zs, encodings.zs, {})

    def compute_loss(
        self, encodings: Any, output: Any, inputs: Any, **options: Any
    ) -> dict[str, torch.Tensor]:
        """Return the mean loss of latents with labels `inputs.condition`.

        Times, noise and the numbers of class dropout are drawn, or those of
        `inputs.additional_attr` (t, noise, uniform).
        """
        del output, options
        zs, given = encodings.zs, inputs.additional_attr or {}
        t, noise, uniform = given.get("t"), given.get("noise"), given.get("uniform")
        if t is None:
            flow = self.settings.process == "flow"
            t = torch.rand(len(zs)) if flow else torch.randint(0, STEPS, (len(zs),))
        noise = torch.randn_like(zs) if noise is None else noise
        uniform = torch.rand(len(zs)) if uniform is None else uniform
        found = self.conditional(zs, inputs.condition, t, noise, uniform)
        return {
            "loss_total": found.total.mean(),
            "error": found.error.mean(),
            "bound": found.bound.mean(),
        }


class DiT(Diffusion):
    """This recipe's diffusion transformer.

    Args:
        input_size: Side of the latents.
        patch_size: Side of a patch.
        in_channels: Channels of the latents.
        hidden_size: Width.
        depth: Blocks.
        num_heads: Heads of attention.
        mlp_ratio: Relative width of a block's two layers.
        settings: See `Settings`.
    """

    def __init__(
        self,
        input_size: int,
        patch_size: int,
        in_channels: int,
        hidden_size: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        **settings: Any,
    ) -> None:
        found = Settings(**settings)
        denoiser = transformer.Transformer(
            input_size=input_size,
            patch_size=patch_size,
            in_channels=in_channels,
            out_channels=found.channels(in_channels),
            hidden_size=hidden_size,
            depth=depth,
            num_heads=num_heads,
            num_classes=found.num_classes,
            mlp_ratio=mlp_ratio,
            time_scale=_TIMES[found.process],
        )
        super().__init__(denoiser, found)


class DiffusersDiT(Diffusion):
    """diffusers' DiT.

    Args:
        config: Arguments of `DiTTransformer2DModel`; outputs and classes are set by `settings`.
        settings: See `Settings`.
    """

    def __init__(self, config: dict[str, Any], **settings: Any) -> None:
        found = Settings(**settings)
        channels = found.channels(config.get("in_channels", 4))
        denoiser = transformer.DiffusersTransformer(
            config, found.num_classes, channels, _TIMES[found.process]
        )
        super().__init__(denoiser, found)
