"""A port as the verifier calls it: a function of flat arrays, traced in float64 or as it is."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation.errors import TpuportError, UsageError
from tpuport.foundation.user_frames import user_places
from tpuport.tracing.core.export import to_numpy
from tpuport.verify.ports.original import named_leaves
from tpuport.verify.ports.program import double

_HOLDERS = ("value", "raw_value")


class PortRaised(TpuportError):
    """Raised when the code of a port does not run; the message has its line."""


@contextlib.contextmanager
def port_code() -> Iterator[None]:
    """Say of what the port's code raises in the block that the port raised it.

    Raises:
        PortRaised: it did.
    """
    try:
        yield
    except TpuportError:
        raise
    except Exception as error:  # any code of the user's may raise anything
        place = next(user_places(error.__traceback__), None)
        if place is None:
            raise
        first = str(error).partition("\n")[0]
        raise PortRaised(f"{place}: {place.source}\n{type(error).__name__}: {first}") from error


@dataclass(frozen=True)
class Tree:
    """A pytree taken apart: its floating arrays by path, and all else.

    Attributes:
        names: The paths of the floating arrays.
        places: Which leaves they are.
        leaves: All leaves.
        structure: The structure.
    """

    names: list[str]
    places: list[int]
    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, value: Any) -> "Tree":
        """Take a pytree apart."""
        found, structure = jax.tree_util.tree_flatten_with_path(value)
        names, places = [], []
        for place, (path, leaf) in enumerate(found):
            if _is_floating(leaf):
                names.append(_path(path))
                places.append(place)
        return cls(names, places, [leaf for _, leaf in found], structure)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the floating arrays by path."""
        return {n: np.asarray(self.leaves[p]) for n, p in zip(self.names, self.places, strict=True)}

    def build(self, values: Sequence[Any]) -> Any:
        """Return the pytree with other floating arrays; None leaves a place empty."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def only(self, values: Sequence[Any], chosen: Sequence[bool]) -> Any:
        """Return the pytree with the chosen floating arrays and None everywhere else."""
        leaves: list[Any] = [None] * len(self.leaves)
        for place, value, keep in zip(self.places, values, chosen, strict=True):
            leaves[place] = value if keep else None
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def read(self, tree: Any) -> list[Any]:
        """Return the floating arrays of a pytree of the same structure."""
        leaves = self.structure.flatten_up_to(tree)
        return [leaves[place] for place in self.places]


@dataclass(frozen=True)
class Port:
    """A port and how to call it.

    Attributes:
        function: The port: a function of its weights and the arguments.
        weights: Its weights.
        given: The arguments, `(args, kwargs)`.
        output: Turns its output into the original's.
        loss: The loss of an output and the arguments.
    """

    function: Callable[..., Any]
    weights: Tree
    given: Any
    output: Callable[[Any], Any]
    loss: Callable[..., Any]

    def inputs(self) -> list[Any]:
        """Return the arrays among the arguments."""
        return [leaf for leaf in jax.tree.leaves(self.given) if _is_array(leaf)]

    def arguments(self, arrays: Sequence[Any]) -> Any:
        """Return `(args, kwargs)` with other arrays."""
        leaves, structure = jax.tree.flatten(self.given)
        rest = iter(arrays)
        return jax.tree.unflatten(structure, [next(rest) if _is_array(x) else x for x in leaves])

    def results(self, weights: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the outputs and the loss."""
        args, kwargs = self.arguments(arrays)
        out = self.output(self.function(weights, *args, **kwargs))
        return [leaf for _, leaf in named_leaves(out)], self.loss(out, *args, **kwargs)

    def shapes(self) -> list[tuple[str, Any]]:
        """Return the path, shape and dtype of each output."""

        def out(leaves: Any, arrays: Any) -> Any:
            args, kwargs = self.arguments(arrays)
            made = self.output(self.function(self.weights.build(leaves), *args, **kwargs))
            found = list(named_leaves(made))
            names.extend(path for path, _ in found)
            return [jnp.asarray(leaf) for _, leaf in found]

        names: list[str] = []
        with port_code():
            leaves = jax.eval_shape(out, self._values(), self.inputs())
        return list(zip(names, leaves, strict=True))

    def forward(self, *, wide: bool) -> Any:
        """Return the jaxpr of outputs and loss, as a function of weights and inputs."""

        def whole(leaves: Any, arrays: Any) -> Any:
            outs, loss = self.results(self.weights.build(leaves), arrays)
            return [*outs, loss]

        return self.traced(whole, [self._values(), self.inputs()], wide=wide)

    def gradients(self, *, wide: bool) -> Any:
        """Return the jaxpr of the gradients of the loss by weight."""

        def loss(leaves: Any, arrays: Any) -> Any:
            return self.results(self.weights.build(leaves), arrays)[1]

        return self.traced(jax.grad(loss), [self._values(), self.inputs()], wide=wide)

    def traced(self, function: Callable[..., Any], args: Sequence[Any], *, wide: bool) -> Any:
        """Return a closed jaxpr, of float64 arguments if `wide`.

        Raises:
            PortRaised: the code does not run.
        """
        # Code that sets dtypes itself may not go with others; its own program runs in float64 too.
        with contextlib.suppress(*((TypeError, ValueError) if wide else ())):
            return _jaxpr(function, args, wide)
        with port_code():
            return _jaxpr(function, args, False)

    def _values(self) -> list[Any]:
        return list(self.weights.arrays().values())


def split(function: Any, params: Any) -> tuple[Callable[..., Any], Any]:
    """Return a port as a function and its weights; a module has both.

    Raises:
        UsageError: there are no weights.
    """
    if params is not None:
        return function, params
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(function, nnx.Module):
        graph, state = nnx.split(function)
        return lambda weights, *a, **k: nnx.merge(graph, weights)(*a, **k), state
    if any(_is_floating(leaf) for leaf in jax.tree.leaves(function)):
        return lambda weights, *a, **k: weights(*a, **k), function
    raise UsageError(
        "Expected the weights of the port as params, unless the port is an nnx.Module or a pytree"
        " that holds them."
    )


def as_arrays(value: Any) -> Any:
    """Return arguments of the original as the port gets them: tensors as arrays."""
    return jax.tree.map(
        lambda leaf: to_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf, value
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array))


def _is_floating(leaf: Any) -> bool:
    return _is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _jaxpr(function: Callable[..., Any], args: Sequence[Any], wide: bool) -> Any:
    with double(wide):
        given = jax.tree.map(lambda leaf: _abstract(leaf, wide), list(args))
        return jax.make_jaxpr(function)(*given)


def _abstract(leaf: Any, wide: bool) -> Any:
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if wide and jnp.issubdtype(dtype, jnp.floating):
        dtype = np.dtype(np.float64)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(dtype))


def _path(path: Sequence[Any]) -> str:
    parts = []
    for key in path:
        for name in ("key", "idx", "name"):
            if hasattr(key, name):
                parts.append(str(getattr(key, name)))
                break
        else:
            parts.append(str(key))
    while len(parts) > 1 and parts[-1] in _HOLDERS:
        parts.pop()
    return ".".join(parts)
