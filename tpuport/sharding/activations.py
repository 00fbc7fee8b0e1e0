"""Places of activations: constraints on what enters and leaves modules, by their fqn."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from tpuport.errors import UsageError
from tpuport.model import patterns
from tpuport.sharding.fitting import as_spec, shown

_SIDES = ("output", "input")


class Activations:
    """Where activations lie, by the fqn of the module that they leave or enter.

    Args:
        outputs: pattern of module fqns (as for parameters; `""` is the model itself) to spec. Every
            tensor that the module returns and that has as many dims as the spec gets it.
        inputs: the same for the tensors that a module is called with.

    The first pattern that matches decides. An axis that does not divide its dim is left out. Dims
    beyond the spec are whole, but after a last `P.UNCONSTRAINED` they are the partitioner's choice,
    which a tensor of fewer dims may lack.

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
        """Specs of what modules return, by pattern."""
        return self._tables["output"]

    @property
    def inputs(self) -> dict[str, P]:
        """Specs of what modules are called with, by pattern."""
        return self._tables["input"]

    def spec(self, module: str, side: str = "output") -> P | None:
        """The spec for a module's outputs, or with `side="input"` its inputs; or None."""
        for pattern, spec in self._tables[side].items():
            if patterns.matches(pattern, module):
                return spec
        return None

    def full_spec(self, module: str, side: str, ndim: int) -> P | None:
        """The spec for a tensor with so many dims; None if it has no place."""
        spec = self.spec(module, side)
        if spec is None:
            return None
        if spec and spec[-1] is P.UNCONSTRAINED:
            spec = P(*spec[:-1], *[P.UNCONSTRAINED] * (ndim - len(spec) + 1))
        return spec if len(spec) <= ndim else None

    def is_quiet(self, module: str, side: str) -> bool:
        """Whether a spec that does not fit is left out without a word (of a table for a family)."""
        found = next((p for p in self._tables[side] if patterns.matches(p, module)), None)
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
        """The same, with no pattern reported when no module matches it."""
        names = frozenset([*self.outputs, *self.inputs])
        return Activations(self.outputs, inputs=self.inputs, _optional=names)

    def unmatched(self, modules: Any) -> list[str]:
        """The patterns that match none of these module fqns."""
        names = list(modules)
        return [
            pattern
            for side in _SIDES
            for pattern in self._tables[side]
            if pattern not in self._optional
            and not any(patterns.matches(pattern, name) for name in names)
        ]

    def lines(self) -> Iterator[str]:
        """Each pattern as one line of text."""
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
            pattern = patterns.REGEX_PREFIX + pattern.pattern
        if not isinstance(pattern, str):
            raise UsageError(f"Expected a pattern of module names, got {pattern!r}")
        patterns.compiled(pattern)
        made[pattern] = as_spec(spec, f"activations of {pattern!r}")
    return made
