"""optax optimizers by name, and the shapes and places of their state."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel

LEARNING_RATE = 1e-4
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(LEARNING_RATE),
    "adam": lambda: optax.adam(LEARNING_RATE),
    "adafactor": lambda: optax.adafactor(LEARNING_RATE),
    "lion": lambda: optax.lion(LEARNING_RATE),
    "sgd": lambda: optax.sgd(LEARNING_RATE, momentum=0.9),
}


def as_optimizer(optimizer: Any) -> optax.GradientTransformation | None:
    """Return an optax optimizer, given itself or by its name.

    Raises:
        UsageError: `optimizer` is neither.
    """
    if optimizer is None or isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]()
    raise UsageError(
        f"optimizer: expected an optax.GradientTransformation, None or one of"
        f" {', '.join(OPTIMIZERS)}, got {optimizer!r}"
    )


def optimizer_state(
    ported: PortedModel, optimizer: optax.GradientTransformation, params: Any = None
) -> tuple[Any, Any]:
    """Return the shapes and shardings of an optimizer's state, and the shardings alone.

    State of a parameter has the sharding of that parameter.

    Args:
        ported: ported model on a mesh.
        optimizer: an optax optimizer.
        params: parameters that it updates; by default all.
    """
    placement: Any = ported._placement
    state = jax.eval_shape(optimizer.init, ported.params if params is None else params)
    places = placement.rules.for_state(state, ported, placement.mesh)

    def place(path: tuple[Any, ...], leaf: Any, otherwise: Any) -> Any:
        # The rules know weights by fqn; blocks may be stacked.
        owner: Any = ported.params.get(getattr(path[-1], "key", "")) if path else None
        return otherwise if owner is None or owner.shape != leaf.shape else owner.sharding

    places = jax.tree_util.tree_map_with_path(place, state, places)

    def placed(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(placed, state, places), places
