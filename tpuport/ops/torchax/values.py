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

from tpuport.tracing.control_flow.cond import refuse_ambiguous

Kind = type[bool] | type[int] | type[float] | type[complex]


def truth(value: torch.Tensor) -> jax.Array:
    """Return the truth of a tensor with one element as a 0-d boolean array."""
    refuse_ambiguous(value)
    return array_of(value).reshape(()) != 0


def array_of(tensor: torch.Tensor) -> jax.Array:
    """Return the jax array of a torchax tensor, of a view of one, or of a CPU tensor."""
    if isinstance(tensor, Tensor | View):
        return tensor.jax()
    return torchax.default_env().t2j_copy(tensor)


def as_array(leaf: Any) -> jax.Array:
    """Return the jax array of a tensor or Python number."""
    return array_of(leaf) if isinstance(leaf, torch.Tensor) else jnp.asarray(leaf)


def number_of(value: Any, kind: Kind) -> Tensor:
    """Return a traced Python number: a 0-d tensor of weak type without a gradient."""
    dtype = jnp.result_type(kind)
    array = jax.lax.stop_gradient(jnp.asarray(value)).reshape(())
    array = jnp.trunc(array) if kind is int and jnp.isdtype(array.dtype, "real floating") else array
    array = array != 0 if kind is bool else array.astype(dtype)
    # The primitive is bound directly because no public function makes an array's type weak.
    weak = jax.lax.convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=kind is not bool, sharding=None
    )
    return Tensor(weak, torchax.default_env())


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
