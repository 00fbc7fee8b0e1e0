"""DuQuant: permutations and block rotations that spread outliers, in its two published forms."""

import numpy as np
import torch

from tpuport.quantization.scheme import QuantizationScheme
from tpuport.quantization.transforms import Permute, Rotate, Transform


def from_weight(weight: torch.Tensor, scheme: QuantizationScheme) -> list[Transform]:
    """Return the permutation and rotations of the openpi fork, from the weight alone.

    Channels are ordered by energy, largest and smallest in turn; then each block is rotated by the
    left singular vectors of its part of the weight.
    """
    order = _alternating((weight.float() ** 2).mean(0))
    blocks = weight.float()[:, order].t().unflatten(0, (-1, scheme.block))
    return [Permute(order), Rotate(_left_vectors(blocks))]


def output_rotation(weight: torch.Tensor, scheme: QuantizationScheme) -> Rotate:
    """Return the rotation of output channels of the openpi fork."""
    vectors = _left_vectors(weight.float().unflatten(0, (-1, scheme.block)))
    return Rotate(vectors.transpose(-1, -2).contiguous())


def _left_vectors(blocks: torch.Tensor) -> torch.Tensor:
    """Return the left singular vectors of `[n, size, columns]`, `[n, size, size]`."""
    return torch.stack([torch.linalg.svd(one, full_matrices=True)[0] for one in blocks])


def _alternating(energy: torch.Tensor) -> torch.Tensor:
    """Return the order largest, smallest, second largest, second smallest and so on."""
    order = torch.argsort(-energy, stable=True)
    half = (len(order) + 1) // 2
    made = torch.empty_like(order)
    made[::2], made[1::2] = order[:half], order[half:].flip(0)
    return made


def from_inputs(rows: torch.Tensor, scheme: QuantizationScheme) -> list[Transform]:
    """Return rotation, permutation and second rotation of the paper's code, from inputs.

    Args:
        rows: `[n, in_features]`, inputs with their outliers.
        scheme: its block, steps and seed.
    """
    draw = torch.Generator().manual_seed(scheme.seed)
    first = _greedy(rows, scheme, draw)
    moved = torch.matmul(rows.reshape(-1, scheme.block), first).reshape(rows.shape)
    order = _zigzag(moved.abs().amax(0), scheme.block)
    second = _greedy(moved[:, order], scheme, draw)
    return [Rotate(first[None]), Permute(order), Rotate(second[None])]


def _greedy(rows: torch.Tensor, scheme: QuantizationScheme, draw: torch.Generator) -> torch.Tensor:
    """Return the product of rotations, each of the largest element, with the least range."""
    parts, size = rows.reshape(-1, scheme.block), scheme.block
    base = _even_rotation(size) @ _random_rest(size, draw)
    made = best = torch.eye(size)
    least = None
    for step in range(scheme.rotation_steps + 1):
        top, bottom = int(parts.argmax()), int(parts.argmin())
        high, low = parts.view(-1)[top], parts.view(-1)[bottom]
        if least is None or high - low < least:
            least, best = high - low, made
        if step < scheme.rotation_steps:
            # The published code exchanges by the number of the row, where the paper has the column.
            row = (top if high.abs() > low.abs() else bottom) // size
            rotation = _exchanged(base, row % size)
            parts, made = parts @ rotation, made @ rotation
    return best


def _exchanged(matrix: torch.Tensor, index: int) -> torch.Tensor:
    order = torch.arange(len(matrix))
    order[0], order[index] = index, 0
    return matrix[order][:, order]


def _even_rotation(size: int) -> torch.Tensor:
    """Return a rotation that spreads the first channel evenly over all."""
    made = torch.eye(size)
    for i in range(size - 1):
        one = torch.eye(size)
        one[i, i] = one[i + 1, i + 1] = 1 / np.sqrt(i + 2)
        one[i + 1, i] = np.sqrt(i + 1) / np.sqrt(i + 2)
        one[i, i + 1] = -one[i + 1, i]
        made = one @ made
    return _exchanged(made, size - 1)


def _random_rest(size: int, draw: torch.Generator) -> torch.Tensor:
    """Return a random rotation of all channels but the first."""
    made = torch.eye(size)
    made[1:, 1:] = torch.linalg.qr(torch.randn(size - 1, size - 1, generator=draw))[0]
    return made


def _zigzag(peaks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the order that deals channels to blocks by size, forth and back."""
    dealt = torch.argsort(-peaks, stable=True).unflatten(0, (size, -1)).clone()
    dealt[1::2] = dealt[1::2].flip(-1)
    return dealt.t().flatten()
