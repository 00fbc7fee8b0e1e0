"""Run one of pytorch/xla's examples untouched, in a small size, and print its losses.

    tpuport run --path CHECKOUT/examples tests/upstream/torch_xla_example.py SCRIPT [ARGUMENTS]

The examples train large models on zeros for hundreds of steps. Here the defaults of their
configuration are small, the data is random, and torchvision's network is a small one with the same
kinds of layers.
"""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

STEPS = 3
ROWS, LENGTH, SIDE, WORDS = 16, 8, 16, 64


class BasicBlock(nn.Module):
    """Two convolutions with BatchNorm, and what goes around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


def resnet() -> nn.Module:
    """Return a small residual network."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    stem = (nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*stem, BasicBlock(8), BasicBlock(8), *head)


def torchvision() -> ModuleType:
    """Return a module with what the examples take from torchvision."""
    package, models, blocks = (ModuleType(f"torchvision{n}") for n in ("", ".models", ".r"))
    package.models, models.resnet50, models.resnet = models, resnet, blocks  # type: ignore[attr-defined]
    blocks.BasicBlock = blocks.Bottleneck = BasicBlock  # type: ignore[attr-defined]
    return package


def small(data: Any) -> Any:
    """Return random data for zeros: images with labels, or words with words."""
    generator = torch.Generator().manual_seed(1)
    x, y = data
    if x.is_floating_point():
        labels = torch.randint(10, (ROWS,), generator=generator)
        return torch.randn(ROWS, 3, SIDE, SIDE, generator=generator), labels
    assert y.shape == x.shape
    return tuple(torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))


def shrink(examples: Path) -> None:
    """Make the examples' defaults small."""
    import torch_xla.utils.utils as xu

    whole = xu.SampleGenerator
    xu.SampleGenerator = lambda data, sample_count: whole(small(data), STEPS)
    sys.modules.setdefault("torchvision", torchvision())
    sys.path.insert(0, str(examples))
    import decoder_only_model
    import train_decoder_only_base
    import train_resnet_base

    config = decoder_only_model.DecoderOnlyConfig
    config.__init__.__defaults__ = (32, 2, 4, 2, 64, WORDS, False, False)
    base = train_decoder_only_base.TrainDecoderOnlyBase
    model = base.__init__.__defaults__[0]
    base.__init__.__defaults__ = (model, STEPS, config())
    whole_init = train_resnet_base.TrainResNetBase.__init__

    def init(self: Any) -> None:
        whole_init(self)
        self.num_steps = STEPS

    train_resnet_base.TrainResNetBase.__init__ = init


def losses(examples: Path, script: str, arguments: list[str]) -> list[float]:
    """Run a script as the main program, and return the loss of each backward pass."""
    found: list[float] = []
    backward = torch.Tensor.backward
    before, argv = (list(sys.path), dict(sys.modules)), sys.argv

    def recorded(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # A function mode calls it again, without gradients of its own.
        if "inside" not in vars(recorded):
            recorded.inside = True
            found.append(self.item())
            backward(self, *args, **kwargs)
            del recorded.inside
        else:
            backward(self, *args, **kwargs)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]
    sys.argv = [str(examples / script), *arguments]
    try:
        shrink(examples)
        sys.path.insert(0, str((examples / script).parent))
        torch.manual_seed(0)
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        torch.Tensor.backward, sys.argv, sys.path = backward, argv, before[0]
        for name in set(sys.modules) - set(before[1]):
            if getattr(sys.modules[name], "__file__", None) is None or (
                str(examples) in str(sys.modules[name].__file__)
            ):
                if not name.startswith("torch_xla"):
                    del sys.modules[name]
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    root = next(parent for parent in place.parents if parent.name == "examples")
    text = json.dumps(losses(root, str(place.relative_to(root)), sys.argv[2:]))
    sys.stdout.write(f"losses {text}\n")
