"""Values of a program that plain torchax traces: its tensors as arrays, and traced numbers.

A traced Python number is a 0-d tensor of weak type, so that dtype promotion treats it as a number.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax.tensor import Tensor
from torchax.view import View

from tpuport.foundation.interop import backend
from tpuport.tracing.control_flow.cond import refuse_ambiguous

Kind = type[bool] | type[int] | type[float] | type[complex]


def wrap(array: jax.Array) -> Tensor:
    """Return a tensor of torchax."""
    return Tensor(array, torchax.default_env())


def truth(value: torch.Tensor) -> jax.Array:
    """Return the truth of a tensor with one element as a 0-d boolean array."""
    refuse_ambiguous(value)
    return array_of(value).reshape(()) != 0


def array_of(value: Any) -> jax.Array:
    """Return the array of a torchax tensor, of a view of one, of a CPU tensor, or of a number."""
    if isinstance(value, Tensor | View):
        return value.jax()
    return backend.to_jax(value) if isinstance(value, torch.Tensor) else jnp.asarray(value)


def number_of(value: Any, kind: Kind) -> Tensor:
    """Return a traced Python number: a 0-d tensor of weak type without a gradient."""
    dtype = jnp.result_type(kind)
    array = jax.lax.stop_gradient(jnp.asarray(value)).reshape(())
    array = jnp.trunc(array) if kind is int and jnp.isdtype(array.dtype, "real floating") else array
    array = array != 0 if kind is bool else array.astype(dtype)
    # The primitive is bound directly because no public function makes an array's type weak.
    return wrap(
        jax.lax.convert_element_type_p.bind(
            array, new_dtype=array.dtype, weak_type=kind is not bool, sharding=None
        )
    )


def traced_number(value: torch.Tensor, kind: Kind) -> Tensor:
    """Return `float(t)`, `int(t)` or `bool(t)` of a traced tensor."""
    if kind is bool:
        return number_of(truth(value), bool)
    if value.numel() != 1:
        raise ValueError("only one element tensors can be converted to Python scalars")
    return number_of(array_of(value), kind)


def item(value: torch.Tensor) -> Tensor:
    """Return `t.item()` of a traced tensor."""
    if value.numel() != 1:
        raise RuntimeError(f"a Tensor with {value.numel()} elements cannot be converted to Scalar")
    return to_list(value.reshape(()))


def to_list(value: torch.Tensor | jax.Array) -> Any:
    """Return `t.tolist()` of a traced tensor: nested lists of traced numbers."""
    array = array_of(value)
    if not array.ndim:
        return number_of(array, kind_of(array.dtype))
    return [to_list(array[index]) for index in range(array.shape[0])]


def is_number(leaf: Any) -> bool:
    """Return whether a value is a Python number, concrete or traced."""
    if isinstance(leaf, torch.Tensor):
        return isinstance(leaf, Tensor) and leaf.jax().weak_type and leaf.ndim == 0
    return is_leaf(leaf)


def is_leaf(value: Any) -> bool:
    """Return whether a side of a branch or a round of a loop may change such a value."""
    return isinstance(value, torch.Tensor) or type(value) in (bool, int, float)


def kind_of(dtype: Any) -> Kind:
    """Return the Python type of an element of this dtype."""
    for kind, name in ((bool, "bool"), (int, "integral"), (float, "real floating")):
        if jnp.isdtype(dtype, name):
            return kind
    return complex


def filled(shape: Any, value: Any, dtype: torch.dtype | None) -> Tensor:
    """Return a new tensor filled with a traced number, by default of the dtype for its kind."""
    array = array_of(value)
    if array.ndim:
        raise TypeError("argument 'fill_value' must be Number, not Tensor")
    defaults = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    made = backend.jax_dtype(dtype or defaults.get(kind_of(array.dtype), torch.complex64))
    return wrap(jnp.broadcast_to(jax.lax.stop_gradient(array).astype(made), shape))
