"""A model that trains in moments, and its batches."""

from typing import Any

import torch
import torch.nn.functional as F


class Small(torch.nn.Module):
    """Batch norm for buffers, dropout for randomness, a frozen parameter."""

    def __init__(self, dropout: float = 0.1, width: int = 16) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.frozen = torch.nn.Linear(width, width).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(width)
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.norm(F.gelu(self.frozen(self.first(x))))))


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """A loss as research code has it."""
    out = model(batch["x"])
    accuracy = (out.argmax(-1) == batch["y"]).float().mean()
    return F.cross_entropy(out, batch["y"]), {"accuracy": accuracy}


def batches(count: int, size: int = 16) -> list[dict[str, torch.Tensor]]:
    """So many of random numbers, the same at each call."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(size, 8, generator=generator),
            "y": torch.randint(0, 4, (size,), generator=generator),
        }
        for _ in range(count)
    ]
