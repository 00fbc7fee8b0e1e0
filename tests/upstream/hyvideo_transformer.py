"""A training and sampling step of HunyuanVideo-1.5's own transformer, as a script for CUDA.

Plain PyTorch: nothing here knows of tpuport. `tpuport run --package hyvideo hyvideo_transformer.py`
runs it as it is. Prints one line of JSON.
"""

import argparse
import json
import sys

import torch
from hyvideo.models.transformers.hunyuanvideo_1_5_transformer import (
    HunyuanVideo_1_5_DiffusionTransformer,
)

# The 720p configuration, smaller: heads of 16 instead of 128 channels, 2 instead of 54 blocks.
CONFIG = {
    "patch_size": [1, 1, 1],
    "in_channels": 4,
    "concat_condition": True,
    "out_channels": 4,
    "hidden_size": 32,
    "heads_num": 2,
    "mm_double_blocks_depth": 2,
    "mm_single_blocks_depth": 0,
    "rope_dim_list": [4, 6, 6],
    "text_states_dim": 24,
    "glyph_byT5_v2": True,
    "vision_projection": "linear",
    "vision_states_dim": 20,
    "use_cond_type_embedding": True,
    "is_reshape_temporal_channels": False,
}
TEXT_ROWS, GLYPH_ROWS, VISION_ROWS = 9, 5, 6


def build(device, dtype=torch.float32, **changes):
    """The transformer with random weights, also where a new one has zeros."""
    torch.manual_seed(0)
    model = HunyuanVideo_1_5_DiffusionTransformer(**{**CONFIG, **changes})
    draw = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=draw)
        if weight.dim() > 1:
            noise = noise / weight[0].numel() ** 0.5
        else:
            noise = weight.detach() + 0.1 * noise
        weight.data.copy_(noise)
    return model.to(device=device, dtype=dtype)


def inputs(device, dtype=torch.float32, batch=2, size=(3, 4, 5), vision="i2v", **more):
    """Arguments of one call, with padded rows of text and glyphs."""
    draw = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=draw).to(device=device, dtype=dtype)

    def first(rows, *counts):
        valid = [[1] * n + [0] * (rows - n) for n in counts[:batch]]
        return torch.tensor(valid, dtype=torch.int64, device=device)

    channels = 2 * CONFIG["in_channels"] + 1
    states = normal(batch, VISION_ROWS, CONFIG["vision_states_dim"])
    return {
        "hidden_states": normal(batch, channels, *size),
        "timestep": torch.tensor([999.0, 250.5][:batch], device=device),
        "text_states": normal(batch, TEXT_ROWS, CONFIG["text_states_dim"]),
        "text_states_2": None,
        "encoder_attention_mask": first(TEXT_ROWS, 4, 7),
        "vision_states": {"i2v": states, "t2v": torch.zeros_like(states), "none": None}[vision],
        "mask_type": "i2v" if vision == "i2v" else "t2v",
        "extra_kwargs": {
            "byt5_text_states": normal(batch, GLYPH_ROWS, 1472),
            "byt5_text_mask": first(GLYPH_ROWS, 3, 0),
        },
        **more,
    }


def main():
    """Sample once and take two steps of training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--attn_mode", default="flash")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    model = build(options.device, attn_mode=options.attn_mode)
    found = {"samples": {}, "losses": []}
    for vision in ("none", "t2v", "i2v"):
        with torch.no_grad():
            noise, _ = model(**inputs(options.device, vision=vision))
        found["samples"][vision] = [noise.mean().item(), noise.std().item()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        noise, _ = model(**inputs(options.device))
        loss = (noise - 1).square().mean()
        loss.backward()
        found["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
