"""Sharding constraints on the inputs and outputs of modules, by the module's fqn."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import name_patterns
from tpuport.sharding.specs import as_spec, shown

_SIDES = ("output", "input")


class Activations:
    """Specs of activations, by the fqn of the module that returns or receives them.

    Args:
        outputs: pattern of module fqns (as for parameters; `""` is the model itself) to spec. Every
            tensor that the module returns and that has as many dims as the spec gets it.
        inputs: the same for the tensors that a module is called with.

    The first pattern that matches decides. An axis that does not divide its dim is left out. Dims
    beyond the spec are unsharded. If the spec ends in `P.UNCONSTRAINED`, that entry and all dims
    beyond it are left to the partitioner, and a tensor may lack its dim.

        Activations({"transformer_blocks.*": P("data", "sequence", None)})
    """

    def __init__(
        self,
        outputs: Mapping[str, Any] | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        _optional: frozenset[str] = frozenset(),
    ) -> None:
        self._tables = {"output": _table(outputs), "input": _table(inputs)}
        self._optional = _optional

    @property
    def outputs(self) -> dict[str, P]:
        """Return the specs of module outputs, by pattern."""
        return self._tables["output"]

    @property
    def inputs(self) -> dict[str, P]:
        """Return the specs of module inputs, by pattern."""
        return self._tables["input"]

    def spec(self, module: str, side: str = "output") -> P | None:
        """Return the spec of a module's outputs, or of its inputs with `side="input"`; or None."""
        for pattern, spec in self._tables[side].items():
            if name_patterns.matches(pattern, module):
                return spec
        return None

    def full_spec(self, module: str, side: str, ndim: int) -> P | None:
        """Return the spec for a tensor with `ndim` dims; None if it has none."""
        spec = self.spec(module, side)
        if spec is None:
            return None
        if spec and spec[-1] is P.UNCONSTRAINED:
            spec = P(*spec[:-1], *[P.UNCONSTRAINED] * (ndim - len(spec) + 1))
        return spec if len(spec) <= ndim else None

    def is_quiet(self, module: str, side: str) -> bool:
        """Return whether a spec that does not fit is dropped without a warning."""
        found = next((p for p in self._tables[side] if name_patterns.matches(p, module)), None)
        return found in self._optional

    def __add__(self, other: "Activations") -> "Activations":
        return Activations(
            {**self.outputs, **{k: v for k, v in other.outputs.items() if k not in self.outputs}},
            inputs={
                **self.inputs,
                **{k: v for k, v in other.inputs.items() if k not in self.inputs},
            },
            _optional=self._optional | other._optional,
        )

    def optional(self) -> "Activations":
        """Return a copy that reports no pattern for matching no module."""
        names = frozenset([*self.outputs, *self.inputs])
        return Activations(self.outputs, inputs=self.inputs, _optional=names)

    def unmatched(self, modules: Any) -> list[str]:
        """Return the patterns that match none of these module fqns."""
        names = list(modules)
        return [
            pattern
            for side in _SIDES
            for pattern in self._tables[side]
            if pattern not in self._optional
            and not any(name_patterns.matches(pattern, name) for name in names)
        ]

    def lines(self) -> Iterator[str]:
        """Yield each pattern as one line of text."""
        for side in _SIDES:
            for pattern, spec in self._tables[side].items():
                yield f"{side} of {pattern or 'the model'}  {shown(spec)}"

    def __bool__(self) -> bool:
        return any(self._tables.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activations) and self._tables == other._tables

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"Activations({'; '.join(self.lines())})"


def _table(given: Mapping[str, Any] | None) -> dict[str, P]:
    made: dict[str, P] = {}
    for pattern, spec in (given or {}).items():
        if isinstance(pattern, re.Pattern):
            pattern = name_patterns.REGEX_PREFIX + pattern.pattern
        if not isinstance(pattern, str):
            raise UsageError(f"Expected a pattern of module names, got {pattern!r}")
        name_patterns.compiled(pattern)
        made[pattern] = as_spec(spec, f"activations of {pattern!r}")
    return made
