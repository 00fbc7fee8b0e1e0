"""The smallest program of this recipe, for `tpuport doctor --measure`."""

from typing import Any

import torch

from recipes.hunyuan_video.make_weights import tiny_transformer


def program() -> dict[str, Any]:
    """Return a tiny transformer and the arguments of one call: 2 latent frames of 6 by 8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = tiny_transformer().requires_grad_(False)
        sizes = model.config
        tokens, glyphs = 7, 5
        inputs = {
            "hidden_states": torch.randn(1, sizes.in_channels, 2, 6, 8),
            "timestep": torch.tensor([900.0]),
            "encoder_hidden_states": torch.randn(1, tokens, sizes.text_embed_dim),
            "encoder_attention_mask": torch.ones(1, tokens),
            "encoder_hidden_states_2": torch.randn(1, glyphs, sizes.text_embed_2_dim),
            "encoder_attention_mask_2": torch.ones(1, glyphs),
            "image_embeds": torch.randn(1, 9, sizes.image_embed_dim),
            "return_dict": False,
        }
    return {"model": model, "inputs": inputs}
