"""The loss and the metrics in the output of a call."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.foundation.errors import UsageError

# The metric by which a loss function weights its batch among the parts of a larger one.
WEIGHT = "weight"
# Names that a step reports itself.
_OUR_OWN = {"loss", "grad_norm", "skipped"}


def loss_and_metrics(out: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return a scalar to differentiate, and scalars to report.

    Args:
        out: a scalar, a pair of it and a mapping of metrics, or an object with the loss as its
            attribute or key `loss` (the other scalars of a mapping are metrics).

    Raises:
        UsageError: `out` is none of these, or the loss is no floating scalar.
    """
    metrics: Any = {}
    match out:
        case (loss, Mapping() as metrics):
            pass
        case Mapping() if "loss" in out:
            loss = out["loss"]
            metrics = {k: v for k, v in out.items() if k != "loss" and _is_scalar(v)}
        case _:
            loss = out if hasattr(out, "dtype") else getattr(out, "loss", None)
    if loss is None or not hasattr(loss, "dtype"):
        raise UsageError(
            f"a {type(out).__name__} has no loss: expected a scalar tensor, (loss, {{'name':"
            " metric}), or an output with `loss`. What to do: pass a function that returns one"
            " (train= of compile_for, loss= of make_train_step)"
        )
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UsageError(
            f"the loss has shape {list(loss.shape)} and dtype {loss.dtype}: expected one floating"
            " number. What to do: reduce it, with .mean() for example"
        )
    for name in _OUR_OWN & metrics.keys():
        raise UsageError(
            f"the loss function returns a metric {name!r}, which a step reports itself. What to do:"
            " give it another name"
        )
    for name, value in metrics.items():
        if not _is_scalar(value):
            raise UsageError(
                f"the metric {name!r} is a {type(value).__name__}"
                f"{f' of shape {list(value.shape)}' if hasattr(value, 'shape') else ''}: expected a"
                " number or a tensor without dims. What to do: reduce it, or leave it out"
            )
    return loss, {name: jnp.asarray(value) for name, value in metrics.items()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()
