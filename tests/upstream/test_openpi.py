"""The recipe's π0 and π0.5 compute what openpi's own PI0Pytorch computes, from the same file.

Waits for a checkout, TPUPORT_UPSTREAM_OPENPI=/path/to/openpi (Physical-Intelligence/openpi at
15a9616), and for a Python with transformers 4.53.2 beside tpuport, TPUPORT_OPENPI_PYTHON.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.openpi.config import Config, Transformer, Vision
from recipes.openpi.model import make_policy, policy_loss
from recipes.openpi.weights import write_weights

CHECKOUT = os.environ.get("TPUPORT_UPSTREAM_OPENPI", "")
PYTHON = os.environ.get("TPUPORT_OPENPI_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="TPUPORT_UPSTREAM_OPENPI names no checkout"),
    pytest.mark.skipif(not PYTHON, reason="TPUPORT_OPENPI_PYTHON names no Python"),
]
# openpi's class has eight heads, three cameras and pictures of 224 pixels in its code.
SIZES = Config(
    action_dim=6,
    action_horizon=4,
    max_token_len=7,
    vocab_size=40,
    language=Transformer(16, 3, 24, head_dim=8),
    expert=Transformer(12, 3, 20, head_dim=8),
    vision=Vision(12, 2, 20, heads=2),
)


def batch_of(generator: torch.Generator) -> dict[str, torch.Tensor]:
    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    images = torch.randint(0, 256, (2, 3, 224, 224, 3), generator=generator, dtype=torch.uint8)
    return {
        "images": images,
        "image_masks": torch.tensor([[True, False, True], [True, True, False]]),
        "tokens": torch.randint(0, 40, (2, 7), generator=generator),
        "token_mask": torch.arange(7)[None] < torch.tensor([[4], [7]]),
        "state": draw(2, 6),
        "actions": draw(2, 4, 6),
        "noise": draw(2, 4, 6),
        "time": torch.rand(2, generator=generator),
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-2)).item()


@pytest.mark.parametrize("pi05", [False, True])
def test_both_compute_the_same(pi05: bool, tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    policy = make_policy(replace(SIZES, pi05=pi05))
    for name, parameter in policy.named_parameters():
        # With scales near zero the encoder's activation would be a line, whichever it is.
        scale = name.endswith(("layer_norm1.weight", "layer_norm2.weight"))
        torch.nn.init.normal_(parameter, float(scale) * 2, 0.2, generator=generator)
    batch = batch_of(generator)
    write_weights(tmp_path, policy)
    torch.save(batch, tmp_path / "batch.pt")
    driver = Path(__file__).with_name("openpi_policy.py")
    environment = {**os.environ, "PYTHONPATH": str(driver.parents[2])}
    command = [PYTHON, str(driver), CHECKOUT, str(tmp_path)]
    subprocess.run(command, check=True, env=environment)
    theirs = torch.load(tmp_path / "found.pt")
    loss = policy_loss(policy, batch)
    loss.backward()
    assert relative(loss.detach(), theirs["loss"]) < 1e-6
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            assert relative(parameter.grad, theirs["grads"][name]) < 1e-4, name
    with torch.no_grad():
        images = policy.encode_images(batch["images"])
        actions = policy.sample_actions(batch, batch["noise"], 10)
    # The loss averages over hundreds of image tokens, and hides small errors of the encoder.
    assert relative(images, theirs["images"]) < 1e-5
    assert relative(actions, theirs["actions"]) < 1e-5
    # The untouched class as programs.
    assert relative(theirs["ported_loss"], theirs["loss"]) < 1e-6
    assert relative(theirs["ported_actions"], theirs["actions"]) < 1e-5
