"""Autoencoders of this recipe: ViT-MAE, and a KL-regularised one, with upstream's interface."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.mae_dit.config import Config, Target, instantiate
from recipes.mae_dit.weights import load_named
from tpuport.foundation.errors import UsageError


@dataclass
class Images:
    """Images (B, 3, H, W) in [0, 1], with a condition such as labels (B,)."""

    img: torch.Tensor
    condition: Any = None
    img_path: Any = None
    additional_attr: Any = None


@dataclass
class Encodings:
    """Latents, and what a decoder needs besides."""

    zs: torch.Tensor
    additional_attr: Any = None


@dataclass
class Reconstruction:
    """Reconstructed images (B, 3, H, W) in [0, 1]."""

    xs_recon: torch.Tensor
    additional_attr: Any = None


class MAE(nn.Module):
    """transformers' ViT-MAE without masks: its encoder, and its decoder.

    Args:
        config: Arguments of `ViTMAEConfig`.
        train_encoder: Whether the encoder is trained too.
    """

    def __init__(self, config: dict[str, Any], train_encoder: bool = True) -> None:
        super().__init__()
        from transformers import ViTMAEConfig, ViTMAEForPreTraining

        self.vit: Any = ViTMAEForPreTraining(ViTMAEConfig(**{**config, "mask_ratio": 0.0}))
        self.vit.vit.requires_grad_(train_encoder)
        self.vit.vit.embeddings.position_embeddings.requires_grad_(False)
        self.vit.decoder.decoder_pos_embed.requires_grad_(False)
        self.vit.decoder.mask_token.requires_grad_(False)  # nothing is masked

    def _order(self, count: int) -> torch.Tensor:
        """Return the places of all patches, in order."""
        patches = (self.vit.config.image_size // self.vit.config.patch_size) ** 2
        return torch.arange(patches).expand(count, -1)

    def encode(self, inputs: Any) -> Encodings:
        """Return the latents (B, 1 + patches, width)."""
        noise = self._order(len(inputs.img)).to(inputs.img.dtype)
        return Encodings(self.vit.vit(inputs.img * 2 - 1, noise=noise).last_hidden_state, {})

    def decode(self, encodings: Any) -> Reconstruction:
        """Return the images of latents."""
        zs = encodings.zs
        logits = self.vit.decoder(zs, self._order(len(zs))).logits
        return Reconstruction(self.vit.unpatchify(logits) / 2 + 0.5, {})

    def compute_loss(self, outputs: Any, inputs: Any, **options: Any) -> dict[str, torch.Tensor]:
        """Return the mean absolute error."""
        del options
        loss = (outputs.xs_recon - inputs.img).abs().mean()
        return {"loss_total": loss, "loss_recon": loss, "loss_latent": torch.zeros(())}

    def get_last_layer(self) -> torch.Tensor:
        """Return the weight at which the adaptive weight compares gradients."""
        return self.vit.decoder.decoder_pred.weight


class KLVAE(nn.Module):
    """diffusers' AutoencoderKL.

    Args:
        config: Arguments of `AutoencoderKL`.
        kl_weight: Weight of the divergence from a normal distribution.
        sample: Whether latents are drawn, or the mean of their distribution.
    """

    def __init__(
        self, config: dict[str, Any], kl_weight: float = 1e-6, sample: bool = True
    ) -> None:
        super().__init__()
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        self.vae: Any = AutoencoderKL(**config)
        self.kl_weight, self.sample = kl_weight, sample

    def encode(self, inputs: Any) -> Encodings:
        """Return the latents (B, channels, h, w)."""
        posterior = self.vae.encode(inputs.img * 2 - 1).latent_dist
        zs = posterior.sample() if self.sample else posterior.mode()
        return Encodings(zs, {"kl": posterior.kl()})

    def decode(self, encodings: Any) -> Reconstruction:
        """Return the images of latents."""
        return Reconstruction(
            self.vae.decode(encodings.zs).sample / 2 + 0.5, encodings.additional_attr
        )

    def compute_loss(self, outputs: Any, inputs: Any, **options: Any) -> dict[str, torch.Tensor]:
        """Return the mean absolute error and the weighted divergence."""
        del options
        recon = (outputs.xs_recon - inputs.img).abs().mean()
        latent = outputs.additional_attr["kl"].mean()
        total = recon + self.kl_weight * latent
        return {"loss_total": total, "loss_recon": recon, "loss_latent": latent}

    def get_last_layer(self) -> torch.Tensor:
        """Return the weight at which the adaptive weight compares gradients."""
        return self.vae.decoder.conv_out.weight


class Same(nn.Module):
    """The connector that changes nothing."""

    def forward(self, encodings: Any) -> Any:
        """Return what stage 2 sees."""
        return encodings

    def reverse(self, encodings: Any) -> Any:
        """Return what stage 1 decodes."""
        return encodings


class Grid(nn.Module):
    """The connector from tokens (B, 1 + n*n, width) to (B, width, n, n), without the first."""

    def forward(self, encodings: Any) -> Encodings:
        """Return the tokens as a square."""
        zs = encodings.zs[:, 1:]
        side = round(zs.shape[1] ** 0.5)
        return Encodings(zs.transpose(1, 2).unflatten(2, (side, side)), encodings.additional_attr)

    def reverse(self, encodings: Any) -> Encodings:
        """Return the tokens, with zeros as the first."""
        zs = encodings.zs.flatten(2).transpose(1, 2)
        zs = torch.cat([torch.zeros_like(zs[:, :1]), zs], 1)
        return Encodings(zs, encodings.additional_attr)


class Autoencoder(nn.Module):
    """Stage 1 and its connector, with upstream's names in the state dict.

    Args:
        stage_1: A module with upstream's interface.
        connector: A connector; by default `Same`.
        images: Class of the arguments of `encode`.
        encodings: Class of the arguments of `decode`.
    """

    def __init__(
        self,
        stage_1: nn.Module,
        connector: nn.Module | None = None,
        images: Any = Images,
        encodings: Any = Encodings,
    ) -> None:
        super().__init__()
        self.stage_1_model: Any = stage_1
        self.connector: Any = connector if connector is not None else Same()
        self.images, self.encodings = images, encodings

    def encode(self, images: torch.Tensor) -> Any:
        """Return the encodings that stage 2 sees."""
        inputs = self.images(img=images, condition=None, img_path=None)
        return self.connector(self.stage_1_model.encode(inputs))

    def decode(self, encodings: Any) -> torch.Tensor:
        """Return the images of encodings."""
        return self.stage_1_model.decode(self.connector.reverse(encodings)).xs_recon

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the reconstructions and the model's own losses."""
        outputs = self.stage_1_model.decode(self.connector.reverse(self.encode(images)))
        inputs = self.images(img=images, condition=None, img_path=None)
        return outputs.xs_recon, self.stage_1_model.compute_loss(outputs, inputs)

    def get_last_layer(self) -> torch.Tensor:
        """Return the weight at which the adaptive weight compares gradients."""
        return self.stage_1_model.get_last_layer()


def make_autoencoder(config: Config, upstream: Any = None) -> Autoencoder:
    """Return the autoencoder of a configuration: random by its seed, or read from `ckpt_path`.

    Raises:
        UsageError: A class cannot be made, or a file of weights does not fit it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        stage_1 = _made(config.arch.stage_1, upstream)
        connector = (
            None if config.arch.connector is None else _made(config.arch.connector, upstream)
        )
    kinds: tuple[Any, Any] = Images, Encodings
    if upstream is not None and type(stage_1).__module__.startswith("rqvae."):
        from recipes.mae_dit.upstream import import_module

        kinds = (
            import_module(upstream, "rqvae.img_datasets.interfaces").LabeledImageData,
            import_module(upstream, "rqvae.models.interfaces").Stage1Encodings,
        )
        if connector is None:
            connector = import_module(upstream, "rqvae.models.connectors").id_connector()
    made = Autoencoder(stage_1, connector, *kinds)
    parts = {"stage_1": made.stage_1_model, "connector": made.connector, "": made}
    load_named(config.arch, parts)
    return made


def make_stage2(config: Config, upstream: Any = None) -> nn.Module:
    """Return the model of stage 2: random by the seed, or read from `ckpt_path`.

    Raises:
        UsageError: There is no such section, the class cannot be made, or a file does not fit it.
    """
    if config.arch.stage_2 is None:
        raise UsageError("arch.stage_2 is missing, the model of stage 2 with target and params")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        made = _made(config.arch.stage_2, upstream)
    load_named(config.arch, {"stage_2": made, "": nn.ModuleDict({"stage_2_model": made})})
    return made


def _made(target: Target, upstream: Any) -> nn.Module:
    return instantiate(target.target, target.params, upstream)
