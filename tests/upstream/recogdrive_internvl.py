"""Fine-tunes a small InternVLChatModel of ReCogDrive, on a CUDA device.

Plain PyTorch, with zorrofox/recogdrive/internvl_chat on PYTHONPATH. Prints what it found as JSON.
"""

import argparse
import json
import sys

import torch
from internvl.model.internvl_chat import InternVLChatConfig, InternVLChatModel

IMAGE = 77
VISION = {
    "architectures": ["InternVisionModel"],
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "image_size": 28,
    "patch_size": 7,
}
LANGUAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
}
# InternLM2 as InternVL2 configures it; without a scaling it does not build on transformers 5.
MORE = {"InternLM2ForCausalLM": {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}}}


def build(language="Qwen2ForCausalLM", drop_path=0.0, flash=False):
    torch.manual_seed(0)
    config = InternVLChatConfig(
        vision_config={**VISION, "drop_path_rate": drop_path},
        llm_config={"architectures": [language], **LANGUAGE, **MORE.get(language, {})},
        template="internvl2_5",
        force_image_size=28,
        downsample_ratio=0.5,
        ps_version="v2",
    )
    model = InternVLChatModel(config, use_flash_attn=flash)
    model.img_context_token_id = IMAGE
    return model.train().cuda()


def batch(*flags, left=False, dtype=torch.float32):
    """Two samples with one tile of four tokens each, and a tile of pixels for each flag."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, IMAGE, (2, 24), generator=generator)
    tokens[0, 2:6] = tokens[1, 5:9] = IMAGE
    tokens[1, slice(0, 4) if left else slice(18, 24)] = 0
    labels = tokens.masked_fill((tokens == 0) | (tokens == IMAGE), -100)
    made = {
        "pixel_values": torch.randn(len(flags), 3, 28, 28, generator=generator).to(dtype),
        "input_ids": tokens,
        "attention_mask": tokens != 0,
        "image_flags": torch.tensor(flags)[:, None],
        "labels": labels,
    }
    return {name: value.cuda() for name, value in made.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--language", default="Qwen2ForCausalLM")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    model = build(options.language, drop_path=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        out = model(**batch(1, 0, 1))
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    found = {
        "device": str(out.logits.device),
        "losses": losses,
        "left": model(**batch(1, 0, 1, left=True)).loss.item(),
        "misaligned": model(**batch(1, 1, 1)).loss.item(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
