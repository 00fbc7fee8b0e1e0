"""Class labels: dropout to a null class, for classifier-free guidance, and their check."""

import numpy as np
import torch
from torch import nn

from recipes.mae_dit.stage2.diffusion import DDPM, FlowMatching, Losses
from tpuport.foundation.errors import UsageError


def check_labels(labels: np.ndarray, num_classes: int) -> None:
    """Raise `UsageError` naming the first label that is no class.

    The null class is `num_classes`: as a label of data it would train unconditionally, unnoticed.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise UsageError(
            f"label {labels[wrong[0]]} of sample {wrong[0]} ({len(wrong)} of {len(labels)} like"
            f" it): expected classes from 0 to {num_classes - 1}. What to do: set num_classes as"
            " the data has it"
        )


def drop_labels(
    labels: torch.Tensor, uniform: torch.Tensor, share: float, num_classes: int
) -> torch.Tensor:
    """Return labels (B,), of which those with `uniform` (B,) in [0, 1) below a share are null."""
    return torch.where(uniform < share, num_classes, labels)


class ClassConditional(nn.Module):
    """A denoiser with its loss and class dropout: what stage 2 trains.

    Args:
        denoiser: Called with noisy latents, times (B,) and labels (B,), of which `num_classes` is
            the null class. It drops no labels itself.
        process: The losses.
        num_classes: Classes without the null class.
        dropout: Share of labels that become null.

    Raises:
        UsageError: The share is not below 1.
    """

    def __init__(
        self, denoiser: nn.Module, process: DDPM | FlowMatching, num_classes: int, dropout: float
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise UsageError(f"class_dropout_prob={dropout}: expected at least 0 and below 1")
        self.denoiser, self.process = denoiser, process
        self.num_classes, self.dropout = num_classes, dropout

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        t: torch.Tensor,
        noise: torch.Tensor,
        uniform: torch.Tensor,
    ) -> Losses:
        """Return the losses of latents, see `DDPM.loss`; labels are dropped in training mode."""
        if self.training:
            labels = drop_labels(labels, uniform, self.dropout, self.num_classes)
        return self.process.loss(self.denoiser, x, labels, t, noise)
