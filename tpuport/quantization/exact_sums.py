"""Sums over rows that do not depend on the order of the rows, or on how devices share them.

GPTQ inverts the sum of x x^T, and rounds what comes of it: sums that differ by 3e-7 give some
weights other codes. So numbers are written as whole multiples of steps, whose sums are exact.
"""

import itertools

import numpy as np
import torch

# A slice has values up to 64, so float32 adds the products of 4,096 rows without rounding.
_BITS, _NUM_SLICES, _ROWS = 7, 3, 4096
# A sum costs no product, so values far below a column's largest one may count.
_NUM_SLICES_OF_SUMS = 6
_STEP = 2.0**-_BITS
_EXPONENT = 0x7F800000

REST = "_rest"
"""What the name of a sum's second buffer ends in."""


def add(
    total: torch.Tensor, rest: torch.Tensor, term: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a term to a sum of 48 bits in two tensors of float32: `rest` is what rounding took.

    Source: Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    """
    after = total + term
    added = after - total
    return after, rest + ((total - (after - added)) + (term - added))


def scaled_columns(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide columns by powers of two, so that no value is larger than 1.

    Returns:
        The rows `[rows, columns]`, and the powers `[columns]`.
    """
    peak = rows.abs().amax(0)
    power = (peak.view(torch.int32) & _EXPONENT).view(torch.float32) * 2
    scale = torch.where(power == 0, 1.0, power)
    return rows / scale, scale


def products(x: torch.Tensor) -> list[torch.Tensor]:
    """Return terms whose sum is x^T x, for `x` of `scaled_columns` rounded to 2**-20."""
    found: list[torch.Tensor] = []
    for part in x.split(_ROWS):
        slices = _slices(part, _NUM_SLICES)
        for i, j in itertools.combinations_with_replacement(range(_NUM_SLICES), 2):
            product = slices[i].t() @ slices[j]
            both = product if i == j else product + product.t()
            found.append(both * (_STEP ** (i + j) * 4.0 ** -(_BITS - 1)))
    return found


def sums(x: torch.Tensor) -> list[torch.Tensor]:
    """Return terms whose sum is that of the rows of `x`, rounded to 2**-41."""
    return [
        one.sum(0) * (_STEP**i * 2.0 ** -(_BITS - 1))
        for part in x.split(_ROWS)
        for i, one in enumerate(_slices(part, _NUM_SLICES_OF_SUMS))
    ]


def _slices(x: torch.Tensor, num: int) -> list[torch.Tensor]:
    """Return whole numbers up to 64, each slice in steps of 1/128 of the one before."""
    rest, found = x * 2.0 ** (_BITS - 1), []
    for _ in range(num):
        found.append(rest.round())
        rest = (rest - found[-1]) * 2.0**_BITS
    return found


def joined(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return statistics with each sum and its rest as one array of float64."""
    whole = {name: value for name, value in found.items() if not name.endswith(REST)}
    for name, value in found.items():
        if name.endswith(REST):
            name = name.removesuffix(REST)
            whole[name] = whole[name].astype(np.float64) + value
    return whole
