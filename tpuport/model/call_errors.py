"""What a call of the pure function raises, as a value that leaves the user's own `jax.jit`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tpuport.model.ported_model import PortedModel
from tpuport.tracing.core.context import LiftedCheck


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class CallErrors:
    """The outcome of a program's checks: `throw` raises what eager PyTorch would have raised.

    Attributes:
        code: int32, the number of the first check that failed, 0 if none did. It may have dims
            where `jax.vmap` or a scan has added some.
        checks: the checks of the program.
    """

    code: jax.Array
    checks: tuple[LiftedCheck, ...]

    def throw(self) -> None:
        """Raise the error of the first call that failed; wait for the device."""
        codes = np.asarray(self.code).reshape(-1)
        failed = codes[codes != 0]
        if failed.size:
            raise self.checks[failed[0] - 1].exception

    def tree_flatten(self) -> tuple[tuple[jax.Array], tuple[LiftedCheck, ...]]:
        """Return the array and the rest, for jax."""
        return (self.code,), self.checks

    @classmethod
    def tree_unflatten(cls, checks: Any, arrays: Any) -> "CallErrors":
        """Put an array back, for jax."""
        return cls(arrays[0], checks)


def errors_of(ported: PortedModel) -> Callable[..., tuple[CallErrors, Any]]:
    """Return `ported.apply` with its errors as a value, as `jax.experimental.checkify` has them.

    Under your own `jax.jit` nothing can be raised for a value: `ported.apply` alone reads at the
    nearest index and gives NaN where eager PyTorch raises.

        @jax.jit
        def step(params, buffers, x):
            return tpuport.errors_of(ported)(params, buffers, None, x)

        errors, (out, buffers) = step(params, buffers, x)
        errors.throw()

    Args:
        ported: made by `tpuport.convert`.
    """

    def apply(*args: Any, **kwargs: Any) -> tuple[CallErrors, Any]:
        code, checks, result = ported._applied(args, kwargs, checks=True)
        return CallErrors(code, checks), result

    return apply
