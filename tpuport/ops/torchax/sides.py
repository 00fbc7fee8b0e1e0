"""The two sides of a branch under plain torchax: their results and writes, as one `lax.cond`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax.tensor import Tensor
from torchax.view import View

from tpuport.foundation import pytree
from tpuport.ops.torchax.values import (
    Kind,
    array_of,
    is_leaf,
    is_number,
    kind_of,
    number_of,
    wrap,
)
from tpuport.tracing.core.errors import port_error


class _TracedSide:
    """One run of a side on copies of the operands, so that none of its writes leave the trace."""

    def __init__(self, function: Callable[..., Any], operands: Any, key: jax.Array) -> None:
        environment = torchax.default_env()
        leaves, spec = pytree.flatten(operands, leaf=_is_tensor)
        self.copies = [_copied(leaf) for leaf in leaves]
        given = [_state(copy) for copy in self.copies]
        with environment.override_property(prng=key):
            result = function(*pytree.unflatten(spec, list(self.copies)))
            self.draws = environment.prng_key is not key
        self.leaves, self.spec = pytree.flatten(result, leaf=is_leaf)
        self.arrays = [array_of(leaf) for leaf in self.leaves]
        states = [_state(copy) for copy in self.copies]
        self.written = [a is not b for a, b in zip(given, states, strict=True)]
        for copy, is_written in zip(self.copies, self.written, strict=True):
            if is_written and not isinstance(copy, Tensor):
                raise _refusal("writes to a tensor that the program does not compute")

    def source(self, index: int) -> int | None:
        """Return which operand a result is, or None for a new value."""
        return next((i for i, c in enumerate(self.copies) if c is self.leaves[index]), None)


class Sides:
    """Two functions of the same operands, of which a condition selects one.

    Args:
        then: The side that runs if the condition holds.
        orelse: The side that runs if it does not.
        operands: The arguments of both.
    """

    def __init__(
        self, then: Callable[..., Any], orelse: Callable[..., Any], operands: tuple[Any, ...]
    ) -> None:
        self.functions = (then, orelse)
        self.operands = operands
        self.originals, _ = pytree.flatten(operands, leaf=_is_tensor)
        self.environment = torchax.default_env()
        # Sides draw from this key, because the environment's own would become an inner tracer.
        self.key = jax.random.fold_in(self.environment.prng_key, 1)
        self.seen = [self._seen(function) for function in self.functions]
        self.kinds = self._common_kinds()
        self.written = self._written()

    def _run(self, function: Callable[..., Any]) -> _TracedSide:
        return _TracedSide(function, self.operands, self.key)

    def _seen(self, function: Callable[..., Any]) -> _TracedSide:
        """Run a side abstractly, for its shapes and dtypes."""
        sides: list[_TracedSide] = []
        jax.eval_shape(lambda: sides.append(self._run(function)))
        return sides[0]

    def select(self, test: jax.Array) -> Any:
        """Return the result of the side that `test` selects, and apply its writes."""

        def traced(function: Callable[..., Any]) -> Callable[[], Any]:
            def run() -> Any:
                side = self._run(function)
                values = [
                    value if kind is None else number_of(value, kind).jax()
                    for value, kind in zip(side.arrays, self.kinds, strict=True)
                ]
                return values, [array_of(side.copies[index]) for index in self.written]

            return run

        values, writes = jax.lax.cond(test, *(traced(function) for function in self.functions))
        if any(side.draws for side in self.seen):
            self.environment.get_and_rotate_prng_key()
        for index, value in zip(self.written, writes, strict=True):
            _write(self.originals[index], value)
        leaves = [self._leaf(index, value) for index, value in enumerate(values)]
        return pytree.unflatten(self.seen[0].spec, leaves)

    def _leaf(self, index: int, value: jax.Array) -> Any:
        first, second = (side.leaves[index] for side in self.seen)
        if type(first) is type(second) and type(first) in (bool, int, float) and first == second:
            return first
        sources = [side.source(index) for side in self.seen]
        if sources[0] is not None and sources[0] == sources[1]:
            return self.originals[sources[0]]
        return wrap(value)

    def _common_kinds(self) -> list[Kind | None]:
        """Return for each result the Python type of its number, or None for a tensor."""
        first, second = self.seen
        found: list[Kind | None] = []
        same = first.spec.key == second.spec.key and len(first.leaves) == len(second.leaves)
        for index in range(len(first.leaves) if same else 0):
            one, other = first.arrays[index], second.arrays[index]
            numbers = [is_number(side.leaves[index]) for side in self.seen]
            same = same and numbers[0] == numbers[1] and one.shape == other.shape
            same = same and (numbers[0] or one.dtype == other.dtype)
            found.append(kind_of(jnp.result_type(one.dtype, other.dtype)) if all(numbers) else None)
        if not same:
            outlines = " against ".join(_outline(side) for side in self.seen)
            raise _refusal(f"differs in structure, shape, dtype or Python values: {outlines}")
        return found

    def _written(self) -> list[int]:
        """Return the indices of the operands that a side writes in place."""
        pairs = zip(*(side.written for side in self.seen), strict=True)
        found = [index for index, flags in enumerate(pairs) if any(flags)]
        roots = [_root(tensor) for tensor in self.originals]
        for index in found:
            if sum(root is roots[index] for root in roots) > 1:
                raise _refusal("writes to a tensor that another variable is a view of")
        return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Tensor | View):
        return wrap(tensor.jax())
    return tensor.clone()


def _state(tensor: torch.Tensor) -> Any:
    """Return a marker that changes when a tensor is written."""
    return tensor.jax() if isinstance(tensor, Tensor) else tensor._version


def _root(tensor: Any) -> Any:
    while isinstance(tensor, View):
        tensor = tensor.parent
    return tensor


def _write(tensor: Any, value: jax.Array) -> None:
    if isinstance(tensor, View):
        tensor.update(value)
    else:
        tensor._elem = value


def _outline(side: _TracedSide) -> str:
    text = ", ".join(f"{array.dtype}{list(array.shape)}" for array in side.arrays[:4])
    return f"({text}{', ...' if len(side.arrays) > 4 else ''})"


def _refusal(what: str) -> Exception:
    return port_error(
        f"a branch on a traced value {what}",
        code="TPU101",
        remedy=(
            "give both sides the same variables, of one shape and dtype, or decide the branch by"
            " a Python value"
        ),
    )
