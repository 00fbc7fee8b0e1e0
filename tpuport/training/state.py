"""The state that a training run changes, as one pytree."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that one step takes and returns for the next one.

    Attributes:
        params: trainable parameters by fqn (or by the names of stacks, see `stack_blocks`).
        frozen: parameters with `requires_grad=False`, which no optimizer sees.
        buffers: all other state of the module.
        optimizer: state of the optimizer.
        ema: averages of `params` in float32 or wider; empty without `ema_decay`.
        step: (), int32, number of steps begun, skipped ones included.
        skipped: (), int32, number of steps that changed nothing, for want of finite gradients.
        key: (), random key that the numbers of all steps come from.
    """

    params: dict[str, jax.Array]
    frozen: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    optimizer: Any
    ema: dict[str, jax.Array]
    step: jax.Array
    skipped: jax.Array
    key: jax.Array

    def with_ema(self) -> Self:
        """Return the state with its averages as parameters, in their dtypes, to evaluate."""
        averaged = {n: v.astype(self.params[n].dtype) for n, v in self.ema.items()}
        return replace(self, params={**self.params, **averaged})

    def with_weights_of(self, other: "TrainState") -> Self:
        """Return this state with the weights and buffers of another one.

        The optimizer's state, averages, step and key stay this state's.

        For steps that alternate on one model, each with `trainable=` of its own: parameters that
        one step trains are frozen in the other. Nothing is copied, and a step donates its state. So
        give the other state to no step until it has the weights back.
        """
        given = {**other.buffers, **other.frozen, **other.params}
        return replace(
            self,
            params={name: given[name] for name in self.params},
            frozen={name: given[name] for name in self.frozen},
            buffers={name: given[name] for name in self.buffers},
        )


def ema_of(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the initial averages of parameters: their values, in float32 or wider."""
    return copy_all(params, widen=True)


def copy_all(tree: Any, *, widen: bool = False) -> Any:
    """Copy the arrays of a tree; with `widen` in float32 or wider.

    Those that are spread alike are copied by one program: `jnp.copy` compiles one for each shape.
    """
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        place = (leaf.sharding, leaf.committed) if isinstance(leaf, jax.Array) else None
        alike.setdefault(place, []).append(index)
    for indices in alike.values():
        made = _copies([leaves[index] for index in indices], widen)
        for index, leaf in zip(indices, made, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)


@partial(jax.jit, static_argnums=1)
def _copies(leaves: list[jax.Array], widen: bool) -> list[jax.Array]:
    if widen:
        return [jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
    return [jnp.copy(leaf) for leaf in leaves]


def ema_update(
    ema: dict[str, jax.Array], params: dict[str, jax.Array], decay: float
) -> dict[str, jax.Array]:
    """Return `decay * ema + (1 - decay) * params`, as `torch.optim.swa_utils.get_ema_avg_fn`."""
    return {
        name: value + (1 - decay) * (params[name].astype(value.dtype) - value)
        for name, value in ema.items()
    }
