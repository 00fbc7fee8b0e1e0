"""What the parameters of a scan say about its operands, in the form of either jax."""

from collections.abc import Mapping
from typing import Any


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many more are carried.

    jax 0.11 has trees of constants, carry and rows where jax 0.10 has two numbers.
    """
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))
