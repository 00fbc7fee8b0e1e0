"""The programs of `benchmarks.gpu`: those that are compared, and those that are timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.dit_stack import DiTStack
from benchmarks.models import FirstOutput

Args = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Checked:
    """A module on the CPU and the arguments of several calls; `draws` if it draws numbers."""

    name: str
    module: nn.Module
    inputs: tuple[Args, ...]
    draws: bool = False


@dataclass(frozen=True)
class Timed:
    """A module on the CPU in train mode that returns one tensor, and the arguments of a call."""

    name: str
    module: nn.Module
    args: Args


def loss(model: Callable[..., Any], args: Args) -> torch.Tensor:
    """Return the mean of the squared output, in float32."""
    return model(*args).float().square().mean()


class ConvNet(nn.Module):
    """Residual convolutions with batch normalization, and a linear layer over the mean."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
                *(nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [B, 3, H, W] to [B, 10]."""
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Branching(nn.Module):
    """A branch on a value, a write through a mask, a selection by a mask, and a number read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Map [N, width] and a mask [N] to [width]."""
        x = x.clone()
        x[~valid] = 0.0
        x = x / x.abs().max() if x.abs().max() > 3.0 else self.head(x)
        kept = self.head(x[valid])
        return kept.sum(0) / valid.sum().item()


class Counting(nn.Module):
    """Integers of 64 bits, sorting, and writes at indices that may repeat."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Map [N] and indices [N] to [N]."""
        hashed = (index * 2654435761 ^ 805459861) % x.shape[0]
        spread = torch.zeros_like(x).index_add_(0, hashed, x)
        order = torch.argsort(spread, stable=True)
        return spread[order].cumsum(0) + torch.sort(x, descending=True).values


def mlp(width: int, layers: int, *, dropout: float = 0.0) -> nn.Module:
    """Return linear layers with GELU, and dropout if there is any."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU()]
        parts += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*parts, nn.Linear(width, width))


def llama(width: int, layers: int, *, attention: str = "sdpa") -> nn.Module:
    """Return a Llama with drawn weights, whose output is the last hidden state."""
    from transformers import LlamaConfig, LlamaModel

    kernel: dict[str, Any] = {"attn_implementation": attention}
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        intermediate_size=11 * width // 4,
        use_cache=False,
        **kernel,
    )
    return FirstOutput(LlamaModel(config), "input_ids")


def checked(*, quick: bool = False) -> list[Checked]:
    """Return the programs that are compared with eager PyTorch on the CPU, call by call."""
    torch.manual_seed(0)
    wide, calls = (32, 2) if quick else (256, 3)

    def drawn(*shape: int) -> tuple[Args, ...]:
        return tuple((torch.randn(shape),) for _ in range(calls))

    def ids() -> tuple[Args, ...]:
        return tuple((torch.randint(0, 1000, (2, wide // 4)),) for _ in range(calls))

    plain = drawn(16, wide)
    masks = tuple(torch.arange(16) % (n + 2) > 0 for n in range(2 * calls))
    branching = tuple(
        (torch.randn(16, wide) * (0.1 if n % 2 else 10.0), mask) for n, mask in enumerate(masks)
    )
    width = max(128, wide)
    tokens = tuple((torch.randn(2, wide // 2, wide), torch.randn(2, wide)) for _ in range(calls))
    halves = tuple(tuple(x.bfloat16() for x in args) for args in tokens)
    return [
        Checked("MLP", mlp(wide, 3), plain),
        Checked("MLP, bfloat16", mlp(wide, 3).bfloat16(), ((plain[0][0].bfloat16(),),)),
        Checked("convolutions and batch norm, train", ConvNet(32, 2), drawn(8, 3, 32, 32)),
        Checked("convolutions and batch norm, eval", ConvNet(32, 2).eval(), drawn(8, 3, 32, 32)),
        Checked("Llama of transformers", llama(width, 2).eval(), ids()),
        Checked("Llama, eager attention", llama(width, 2, attention="eager").eval(), ids()),
        Checked("DiT blocks", DiTStack(2, wide, 4), tokens),
        Checked("DiT blocks, bfloat16", DiTStack(2, wide, 4).bfloat16(), halves),
        Checked("branch and masks", Branching(wide), branching),
        Checked("int64, sort, scatter", Counting(), _counted(calls)),
        Checked("dropout", mlp(wide, 2, dropout=0.3), plain, draws=True),
        Checked("LSTM", Recurrent(wide), drawn(4, 12, wide)),
    ]


class Recurrent(nn.Module):
    """An LSTM of two layers, whose output is that of the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, T, width] to [B, width]."""
        return self.cells(x)[0][:, -1]


def _counted(calls: int) -> tuple[Args, ...]:
    return tuple((torch.randn(100), torch.randint(0, 2**31 - 1, (100,))) for _ in range(calls))


def timed(*, quick: bool = False) -> list[Timed]:
    """Return the programs whose calls and training steps are timed."""
    torch.manual_seed(0)
    if quick:
        return [
            Timed("MLP", mlp(16, 2), (torch.randn(4, 16),)),
            Timed("convolutions", ConvNet(8, 1), (torch.randn(2, 3, 16, 16),)),
            Timed("Llama", llama(128, 1), (torch.randint(0, 1000, (2, 8)),)),
            Timed("DiT", DiTStack(1, 16, 2), (torch.randn(2, 8, 16), torch.randn(2, 16))),
        ]
    return [
        Timed("Llama, 8 layers", llama(1024, 8), (torch.randint(0, 1000, (8, 512)),)),
        Timed(
            "DiT, 12 blocks",
            DiTStack(12, 768, 12),
            (torch.randn(32, 256, 768), torch.randn(32, 768)),
        ),
        Timed("convolutions, 8 blocks", ConvNet(128, 8), (torch.randn(64, 3, 64, 64),)),
        Timed("MLP, 8 layers", mlp(4096, 8), (torch.randn(4096, 4096),)),
    ]
