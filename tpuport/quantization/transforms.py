"""What is done to a layer's input before it is rounded, and to its weight to make up for it."""

from typing import Self

import torch


class Transform(torch.nn.Module):
    """A linear map of the last dim whose counterpart on the weight leaves the product as it was."""

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Map a weight `[out, in]`; orthogonal maps do to it what they do to the input."""
        return self(weight)


class Divide(Transform):
    """Divides each channel by its own factor."""

    factors: torch.Tensor

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide an input."""
        return x / self.factors

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Multiply the weight's columns."""
        return weight * self.factors


class Permute(Transform):
    """Puts channels in another order."""

    order: torch.Tensor

    def __init__(self, order: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order.to(torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder the last dim."""
        return torch.index_select(x, -1, self.order)


class Rotate(Transform):
    """Rotates blocks of channels, each by its own matrix or all by one.

    `blocks` is `[n, size, size]`; n is 1 if all blocks share a rotation.
    """

    blocks: torch.Tensor

    def __init__(self, blocks: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("blocks", blocks.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply each block of the last dim by its matrix."""
        parts = x.unflatten(-1, (-1, self.blocks.shape[-1]))
        if self.blocks.shape[0] == 1:
            return torch.matmul(parts, self.blocks[0]).flatten(-2)
        return torch.einsum("...nb,nbc->...nc", parts, self.blocks).flatten(-2)

    def inverse(self) -> Self:
        """Return the rotation back."""
        return type(self)(self.blocks.transpose(-1, -2).contiguous())


def transform_of(buffer: str, value: torch.Tensor) -> Transform:
    """Return the transform that has a buffer of this name."""
    return {"factors": Divide, "order": Permute, "blocks": Rotate}[buffer](value)


def hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's orthogonal matrix of +1 and -1 over sqrt(size), a power of two."""
    made = torch.ones(1, 1)
    while made.shape[0] < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)], 0)
    return made / size**0.5
