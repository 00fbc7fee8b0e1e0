"""Convolutions with spectral norms (Miyato et al. 2018, arXiv:1802.05957).

They have the names of weights of `torch.nn.utils.spectral_norm` and compute what it does. That one
writes the divided weight to an attribute at each call, which a training step has no place for.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_EPSILON = 1e-12


class _Spectral(nn.Module):
    """A weight that is divided by an estimate of its largest singular value.

    A call in training mode moves the estimate by one power iteration.
    """

    weight_u: torch.Tensor
    weight_v: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weight = self._parameters.pop("weight")
        assert weight is not None
        self.weight_orig = weight
        height, width = weight.flatten(1).shape
        for name, size in (("weight_u", height), ("weight_v", width)):
            start = F.normalize(torch.randn(size), dim=0, eps=_EPSILON)
            self.register_buffer(name, start)

    def normalised(self) -> torch.Tensor:
        """Return the divided weight."""
        matrix = self.weight_orig.flatten(1)
        if self.training:
            with torch.no_grad():
                v = F.normalize(matrix.T @ self.weight_u, dim=0, eps=_EPSILON)
                self.weight_v.copy_(v)
                self.weight_u.copy_(F.normalize(matrix @ v, dim=0, eps=_EPSILON))
        # Copies, as a second call of a step writes to what the gradient of the first one reads.
        u, v = self.weight_u.clone(), self.weight_v.clone()
        return self.weight_orig / torch.dot(u, matrix @ v)


class SpectralConv1d(_Spectral, nn.Conv1d):
    """A convolution of sequences with a spectral norm; see `torch.nn.Conv1d`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the convolution of sequences (B, C, L)."""
        return self._conv_forward(input, self.normalised(), self.bias)


class SpectralConv2d(_Spectral, nn.Conv2d):
    """A convolution of images with a spectral norm; see `torch.nn.Conv2d`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the convolution of images (B, C, H, W)."""
        return self._conv_forward(input, self.normalised(), self.bias)
