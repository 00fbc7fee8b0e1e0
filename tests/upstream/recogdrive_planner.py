"""Trains a small planner of ReCogDrive and samples trajectories from it, on a CUDA device.

Plain PyTorch, with zorrofox/recogdrive on PYTHONPATH. Prints what it found as JSON.
"""

import argparse
import json
import sys

import torch
from navsim.agents.recogdrive.recogdrive_diffusion_planner import (
    GRPOConfig,
    ReCogDriveDiffusionPlanner,
    ReCogDriveDiffusionPlannerConfig,
)
from transformers.feature_extraction_utils import BatchFeature

DIT = {
    "num_heads": 2,
    "head_dim": 16,
    "num_layers": 2,
    "output_dim": 24,
    "dropout": 0.0,
    "attention_bias": True,
    "norm_eps": 1e-5,
    "interleave_attention": True,
}


def build(sampler):
    torch.manual_seed(0)
    config = ReCogDriveDiffusionPlannerConfig(
        diffusion_model_cfg=DIT,
        input_embedding_dim=32,
        hidden_size=40,
        vlm_size="small",
        sampling_method=sampler,
    )
    planner = ReCogDriveDiffusionPlanner(config)
    for parameter in planner.parameters():
        if parameter.requires_grad:  # the output layers start at zero, which would hide everything
            torch.nn.init.normal_(parameter, std=0.1)
    # `sample_chain` and `get_logprobs` read what only training by reinforcement sets.
    for name, value in vars(GRPOConfig()).items():
        if isinstance(value, float):
            setattr(planner, name, value)
    return planner.cuda()


def features():
    generator = torch.Generator().manual_seed(7)
    draw = lambda *size: torch.randn(size, generator=generator).cuda()  # noqa: E731
    return draw(2, 5, 1536), draw(2, 12), draw(2, 8), draw(2, 8, 3), draw(2, 6, 8, 3)


def inputs():
    tokens, history, status, action, _ = features()
    return tokens, BatchFeature({"his_traj": history, "status_feature": status, "action": action})


def train(planner, steps, lr=1e-3):
    wanted = [p for p in planner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=lr, weight_decay=1e-4, betas=(0.9, 0.95))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = planner(*inputs()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sampler", default="ddim")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    planner = build(options.sampler)
    losses = train(planner, options.steps)
    planner.eval()
    with torch.no_grad():
        trajectories = [planner.get_action(*inputs()).pred_traj for _ in range(2)]
    found = {
        "device": str(trajectories[0].device),
        "losses": losses,
        "finite": all(t.isfinite().all().item() for t in trajectories),
        "fresh": not torch.equal(*trajectories),
        "shape": list(trajectories[0].shape),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
