"""The random bits of single elements of an array, without the array.

`jax.random.bits` of a whole array gives its element number i the Threefry block cipher's result for
the counter i, if the implementation is "threefry2x32" and `jax_threefry_partitionable` is set, as
it is by default. So a tile of the array can have the bits of exactly its own elements. Threefry:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, table 2 for the rotations.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# The parity of the cipher's key schedule.
_PARITY = 0x1BD11BDA
_HALF = 0xFFFF
# `jax.random.uniform` makes its float32 of so many bits, the highest ones.
_MANTISSA = 23


def draws_by_element(key: Any) -> bool:
    """Return whether a float32 for an element is drawn of the key and its number alone."""
    data = jnp.asarray(key)
    if jnp.issubdtype(data.dtype, jax.dtypes.prng_key):
        name = str(jax.random.key_impl(data))
    else:
        name = jax.config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]
    by_number = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    # With 64 bits `jax.random.bernoulli` draws float64.
    wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return name == "threefry2x32" and bool(by_number) and not wide


def words_of(key: Any) -> jax.Array:
    """Return the two words (2,) uint32 of a key, typed or raw."""
    data = jnp.asarray(key)
    typed = jnp.issubdtype(data.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(data) if typed else data


def bits_of(key: tuple[Any, Any], high: Any, low: Any) -> Any:
    """Return the bits of elements, uint32, by both words of their numbers.

    Args:
        key: the two words of the key.
        high: the high word of each number.
        low: the low word of each number, of the result's shape.
    """
    keys = (*key, key[0] ^ key[1] ^ np.uint32(_PARITY))
    left, right = high + keys[0], low + keys[1]
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            left = left + right
            right = (right << np.uint32(turn)) | (right >> np.uint32(32 - turn))
            right = right ^ left
        left = left + keys[(group + 1) % 3]
        right = right + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return left ^ right


def are_kept(bits: Any, rate: float) -> Any:
    """Return where `jax.random.bernoulli` with probability `1 - rate` is true for these bits."""
    # A uniform number of float32 is a multiple of 2^-23, so the comparison is one of integers.
    limit = math.ceil(float(np.float32(1 - rate)) * 2**_MANTISSA)
    return (bits >> np.uint32(32 - _MANTISSA)) < np.uint32(limit)


def number_of(row: Any, columns: int, column: Any) -> tuple[Any, Any]:
    """Return both words of `row * columns + column`; rows and columns are uint32.

    Without 64-bit integers, which neither a kernel nor jax by default has.
    """
    upper, lower = row >> np.uint32(16), row & np.uint32(_HALF)
    of_upper, of_lower = np.uint32(columns >> 16), np.uint32(columns & _HALF)
    ends, crossed, other = lower * of_lower, lower * of_upper, upper * of_lower
    middle = (ends >> np.uint32(16)) + (crossed & np.uint32(_HALF)) + (other & np.uint32(_HALF))
    high = upper * of_upper + (crossed >> np.uint32(16)) + (other >> np.uint32(16))
    return add((high + (middle >> np.uint32(16)), row * np.uint32(columns)), column)


def add(number: tuple[Any, Any], more: Any) -> tuple[Any, Any]:
    """Return both words of a number plus a uint32."""
    low = number[1] + more
    return number[0] + (low < more).astype(jnp.uint32), low
