"""Precision and recall of generated images (Kynkäänniemi et al. 2019, arXiv:1904.06991)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.foundation.errors import UsageError

NEIGHBOURS = 3
_BLOCK = 1024  # rows of distances at a time


def precision_and_recall(
    real: np.ndarray, made: np.ndarray, neighbours: int = NEIGHBOURS
) -> tuple[float, float]:
    """Return the share of made features among real ones, and that of real ones among made ones.

    A feature is among others if it is as near to one of them as the third nearest of the others is.

    Args:
        real: Features of images (N, D).
        made: Features of samples (M, D).
        neighbours: Which of the nearest others gives a feature its radius.

    Raises:
        UsageError: There are too few features.
    """
    if min(len(real), len(made)) <= neighbours:
        raise UsageError(
            f"precision and recall need more than {neighbours} images and samples, got {len(real)}"
            f" and {len(made)}. What to do: take more"
        )
    # Distances are differences of squares, which hide less the smaller the features are.
    center = real.mean(0, dtype=np.float64)
    a, b = (jnp.asarray((rows - center).astype(np.float32)) for rows in (real, made))
    return _share_within(b, a, neighbours), _share_within(a, b, neighbours)


def _share_within(rows: jax.Array, others: jax.Array, neighbours: int) -> float:
    radii = jnp.concatenate(
        [
            _radii(others[start : start + _BLOCK], others, start, neighbours)
            for start in range(0, len(others), _BLOCK)
        ]
    )
    parts = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
    return sum(int(_within(part, others, radii)) for part in parts) / len(rows)


@partial(jax.jit, static_argnums=3)
def _radii(rows: jax.Array, others: jax.Array, start: int, neighbours: int) -> jax.Array:
    """Return the squared distance of each row to its nearest others, of which it is one itself."""
    itself = jnp.arange(len(others)) == start + jnp.arange(len(rows))[:, None]
    found = jnp.where(itself, jnp.inf, _distances(rows, others))
    return -jax.lax.top_k(-found, neighbours)[0][:, -1]


@jax.jit
def _within(rows: jax.Array, others: jax.Array, radii: jax.Array) -> jax.Array:
    return (_distances(rows, others) <= radii).any(1).sum()


def _distances(rows: jax.Array, others: jax.Array) -> jax.Array:
    products = jnp.matmul(rows, others.T, precision=jax.lax.Precision.HIGHEST)
    squares = [jnp.square(value).sum(1) for value in (rows, others)]
    return jnp.maximum(squares[0][:, None] + squares[1] - 2 * products, 0)
