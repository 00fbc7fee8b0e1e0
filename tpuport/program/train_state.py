"""All that a training run changes, as one pytree."""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What one step takes and the next one gets.

    Attributes:
        params: trainable parameters by fqn (or by the names of stacks, see `stack_blocks`).
        frozen: parameters with `requires_grad=False`, which no optimizer sees.
        buffers: all other state of the module.
        optimizer: the state of the optimizer.
        ema: averages of `params` in float32 or wider; empty without `ema_decay`.
        step: (), int32, how many steps were begun, also those that were skipped.
        skipped: (), int32, how many left everything as it was, for want of finite gradients.
        key: (), the key that the random numbers of all steps come from.
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
        """The same with the averages for parameters, in the dtypes of these: to evaluate with."""
        averaged = {n: v.astype(self.params[n].dtype) for n, v in self.ema.items()}
        return replace(self, params={**self.params, **averaged})

    def with_weights_of(self, other: "TrainState") -> Self:
        """The same optimizer, averages, step and key with the weights and buffers of another state.

        For steps that take turns on one model, each with `trainable=` of its own: what one trains
        is frozen in the other. Nothing is copied, so give the other state to no step until it has
        the weights back.
        """
        given = {**other.buffers, **other.frozen, **other.params}
        return replace(
            self,
            params={name: given[name] for name in self.params},
            frozen={name: given[name] for name in self.frozen},
            buffers={name: given[name] for name in self.buffers},
        )


def ema_of(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Where averages of parameters begin: at their values, in no less than float32."""
    return {
        name: jnp.array(value, jnp.promote_types(value.dtype, jnp.float32))
        for name, value in params.items()
    }


def ema_update(
    ema: dict[str, jax.Array], params: dict[str, jax.Array], decay: float
) -> dict[str, jax.Array]:
    """`decay * ema + (1 - decay) * params`, as `torch.optim.swa_utils.get_ema_avg_fn` has it."""
    return {
        name: value + (1 - decay) * (params[name].astype(value.dtype) - value)
        for name, value in ema.items()
    }
