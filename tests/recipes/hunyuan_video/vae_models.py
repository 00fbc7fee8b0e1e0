"""Small VAEs with random weights for the tests of decoding."""

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    AutoencoderKLHunyuanVideo15,
)

# A level that doubles frames and one that does not, of which the published one has two each.
FACTOR = 4
CONFIG = {
    "latent_channels": 4,
    "block_out_channels": (8, 8, 16),
    "layers_per_block": 0,
    "spatial_compression_ratio": FACTOR,
    "temporal_compression_ratio": 2,
}
TILE = 4  # latents along a side; the overlap is one


def small_vae(seed: int = 0) -> AutoencoderKLHunyuanVideo15:
    """Weights away from what they start as, so that norms and biases count."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoencoderKLHunyuanVideo15(**CONFIG)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        small = noise * 0.1 if weight.shape[1:].numel() == 1 else noise * 0.6
        weight.data = weight.data + small / max(1, weight[0].numel()) ** 0.5
    model.enable_tiling(FACTOR * TILE, FACTOR * TILE, TILE, TILE, 0.25)
    return model


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    """Numbers to decode or encode."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def difference(got: object, want: torch.Tensor) -> float:
    """The largest difference relative to the largest element."""
    have = torch.tensor(got.astype("float32").__array__())  # pyright: ignore
    assert have.shape == want.shape
    assert torch.isfinite(have).all()
    return float((have - want.float()).abs().max() / want.float().abs().max())
