"""GPTQ and AWQ: weights rounded so that the outputs on calibrated inputs change least.

Both take `gram`, the sum of x x^T over all rows x of the layer's input: the square error of outputs
for an error E of the weight is the trace of E gram E^T.
"""

from dataclasses import replace

import torch

from tpuport.quantization.rounding import Codes, round_weight, round_with
from tpuport.quantization.scheme import QuantizationScheme

_DAMPING = 0.01
_COLUMNS = 128
_RATIOS = 20
_LEAST = 1e-4


def gptq(weight: torch.Tensor, gram: torch.Tensor, scheme: QuantizationScheme) -> Codes:
    """Round the columns of a weight one after another; later ones make up for the error.

    Source: Frantar et al., GPTQ, arXiv:2210.17323, algorithm 1. A group's scale is found when its
    first column is reached, from what the columns before have made of it.
    """
    weight, hessian = weight.double(), gram.double().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    weight = torch.where(dead, 0.0, weight)
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    size, num = scheme.group or weight.shape[1], weight.shape[1]
    by_channel = replace(scheme, group=None)
    found: list[Codes] = []
    values = torch.empty_like(weight)
    for start in range(0, num, _COLUMNS):
        stop = min(start + _COLUMNS, num)
        errors = torch.zeros(weight.shape[0], stop - start, dtype=weight.dtype)
        for i in range(start, stop):
            if i % size == 0:
                # Columns behind this block have not had its errors yet.
                coming = weight[:, i : i + size].clone()
                done = errors[:, : i - start] @ factor[start:i, stop : max(stop, i + size)]
                coming[:, coming.shape[1] - done.shape[1] :] -= done
                found.append(round_weight(coming, by_channel))
            codes = round_with(weight[:, i, None], found[-1], scheme)
            values[:, i] = codes.values[0, :, 0]
            error = (weight[:, i] - codes.weight()[:, 0]) / factor[i, i]
            weight[:, i + 1 : stop] -= torch.outer(error, factor[i, i + 1 : stop])
            errors[:, i - start] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    scale = torch.cat([one.scale for one in found])
    zeros = [one.zero for one in found if one.zero is not None]
    grouped = values.float().unflatten(1, (-1, size)).transpose(0, 1)
    return Codes(grouped, scale, torch.cat(zeros) if zeros else None)


def awq(
    weight: torch.Tensor, gram: torch.Tensor, mean: torch.Tensor, scheme: QuantizationScheme
) -> torch.Tensor:
    """Return factors of input channels that make the square error of the outputs least.

    Source: Lin et al., AWQ, arXiv:2306.00978, section 3.2: the mean size of a channel to a power,
    which is searched.
    """
    best, least = torch.ones_like(mean), torch.inf
    size = (mean / mean.max().clamp_min(_LEAST)).clamp_min(_LEAST)
    for ratio in torch.linspace(0, 1, _RATIOS):
        factors = size**ratio
        factors = (factors / (factors.max() * factors.min()).sqrt()).clamp_min(_LEAST)
        rounded = round_weight(weight * factors, scheme).weight() / factors
        difference = (rounded - weight).double()
        error = float(((difference @ gram.double()) * difference).sum())
        if error < least:
            best, least = factors, error
    return best
