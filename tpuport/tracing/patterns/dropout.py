"""Dropout in a flat program: a product with 1 / (1 - p) where a number is kept, else 0."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuport.tracing.patterns.program import BERNOULLI, FlatProgram, is_var


@dataclass(frozen=True)
class Dropout:
    """A dropout.

    Attributes:
        equation: The product of what it drops with the factor.
        factor: What computes the factor.
        key: The random key, an atom.
        rate: The probability that a number is dropped.
    """

    equation: Any
    factor: list[Any]
    key: Any
    rate: float


def dropout_of(program: FlatProgram, product: Any, size: int) -> Dropout | None:
    """Return the dropout that ends in this product of so many numbers, or None."""
    if product.primitive.name != "mul":
        return None
    for atom in product.invars:
        found = _factor(program, product, atom, size)
        if found is not None:
            return found
    return None


def _factor(program: FlatProgram, product: Any, atom: Any, size: int) -> Dropout | None:
    equations, by = [], 1.0
    eqn = program.maker(atom)
    while eqn is not None:
        equations.append(eqn)
        name = eqn.primitive.name
        if eqn.params.get("name") == BERNOULLI:
            key, kept = eqn.invars[0], program.number(eqn.invars[1])
            if kept is None or eqn.outvars[0].aval.size != size or not is_var(key):
                return None
            if eqn.invars[1].aval.dtype != np.float32:
                return None  # drawn with fewer bits than kernels draw
            rate = 1 - float(kept)
            exact = 0 < rate < 1 and abs(by * float(kept) - 1) < 1e-5
            return Dropout(product, equations[::-1], key, rate) if exact else None
        if name in ("mul", "div"):
            number = program.number(eqn.invars[1])
            if number is None:
                return None
            by = by * float(number) if name == "mul" else by / float(number)
        elif name not in ("reshape", "convert_element_type"):
            return None
        eqn = program.maker(eqn.invars[0])
    return None
