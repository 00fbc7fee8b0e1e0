"""Sharding rules: an ordered, readable table from parameter names to PartitionSpecs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.sharding import checks
from tpuport.sharding.constraints import Activations
from tpuport.sharding.leaves import shapes_of
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.spec_rule import SpecRule
from tpuport.sharding.specs import fitted, shown

# Types that a table can be made from.
Table = "ShardingRules | Mapping[str | re.Pattern[str], Any] | Iterable[SpecRule | tuple[Any, Any]]"


class ShardingRules:
    """An ordered table of rules; the first that matches a name gives its spec.

    Args:
        rules: `SpecRule`s, `(pattern, spec)` pairs, or a mapping of patterns to specs. A pattern is
            a string or a compiled regular expression.
        name: name of the table in plans and messages.
        inputs: specs of a call's arguments by pattern of their path (`**` for all), likewise; dims
            that an argument lacks are left out. Without any, arguments are replicated.
        activations: specs of activations, or a mapping of module patterns to specs.

    `a + b` tries `a` first; `rules.override({...})` puts a few rules before the others.
    """

    def __init__(
        self,
        rules: Any = (),
        *,
        name: str = "",
        inputs: Any = (),
        activations: Activations | Mapping[str, Any] | None = None,
    ) -> None:
        self.rules = _as_rules(rules)
        self.name = name
        self.inputs = _as_rules(inputs)
        if not isinstance(activations, Activations):
            activations = Activations(activations or {})
        self.activations = activations

    def __add__(self, other: Any) -> "ShardingRules":
        after = other if isinstance(other, ShardingRules) else ShardingRules(other)
        return ShardingRules(
            (*self.rules, *after.rules),
            name=" + ".join(filter(None, (self.name, after.name))),
            inputs=(*self.inputs, *after.inputs),
            activations=self.activations + after.activations,
        )

    def override(self, rules: Any) -> "ShardingRules":
        """Return the table with these rules before the others.

        An old rule with the same pattern is dropped, so that it is not reported as shadowed.
        """
        first = ShardingRules(rules)
        patterns_ = {rule.pattern for rule in first.rules}
        kept = [rule for rule in self.rules if rule.pattern not in patterns_]
        rest = ShardingRules(kept, name=self.name, inputs=self.inputs, activations=self.activations)
        made = first + rest
        made.name = f"{self.name} with overrides" if self.name else ""
        return made

    def with_activations(self, activations: Activations | Mapping[str, Any]) -> "ShardingRules":
        """Return the table with these specs of activations before its own."""
        if not isinstance(activations, Activations):
            activations = Activations(activations)
        return ShardingRules(
            self.rules,
            name=self.name,
            inputs=self.inputs,
            activations=activations + self.activations,
        )

    def optional(self) -> "ShardingRules":
        """Return a table without reports of rules that match nothing, for a family of models."""
        return ShardingRules(
            [replace(rule, optional=True) for rule in self.rules],
            name=self.name,
            inputs=self.inputs,
            activations=self.activations.optional(),
        )

    def rule_for(self, name: str) -> SpecRule | None:
        """Return the first rule that matches a name, or None."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def spec(self, name: str, shape: tuple[int, ...], mesh: Any = None) -> P:
        """Return a parameter's spec; with a mesh, without axes that do not divide their dim.

        Raises:
            UsageError: the rule has more dims than the parameter.
        """
        rule = self.rule_for(name)
        if rule is None:
            return P()
        if len(rule.spec) > len(shape):
            raise UsageError(
                f"the rule {rule} has {len(rule.spec)} dims, and {name} of shape {list(shape)} has"
                f" {len(shape)}. What to do: put a rule for {name!r} before it"
            )
        return rule.spec if mesh is None else fitted(rule.spec, shape, mesh)[0]

    def specs(self, params: Any, mesh: Any = None) -> dict[str, P]:
        """Return the spec of every parameter and buffer by fqn.

        Args:
            params: a module, a ported model, or a mapping of fqns to anything with a shape.
            mesh: a mesh or its sizes by axis: specs then fit it (see `findings`).

        Raises:
            UsageError: a rule has more dims than a parameter that it matches.
        """
        return {name: self.spec(name, leaf.shape, mesh) for name, leaf in shapes_of(params).items()}

    def shardings(
        self, params: Any, mesh: Mesh, *, strict: bool = False
    ) -> dict[str, NamedSharding]:
        """Return the sharding of every parameter and buffer by fqn, fitted to the mesh.

        Args:
            params: as for `specs`.
            mesh: the mesh.
            strict: raise an error with what `findings` returns.

        Raises:
            UsageError: `strict` is set and there are findings.
        """
        if strict:
            self.check(params, mesh)
        return {n: NamedSharding(mesh, spec) for n, spec in self.specs(params, mesh).items()}

    def findings(self, params: Any, mesh: Any) -> list[checks.ShardingNote]:
        """Return rules that look unintended.

        They have no effect, do not divide a dim, or are of another kind of
        `tpuport.sharding.checks`.
        """
        return checks.find(self, shapes_of(params), mesh)

    def check(self, params: Any, mesh: Any) -> None:
        """Raise an error with what `findings` returns, if that is anything.

        Raises:
            UsageError: there are findings; the message lists them all.
        """
        checks.refuse(self.findings(params, mesh), self.name)

    def for_state(self, state: Any, params: Any, mesh: Mesh | None = None) -> Any:
        """Return specs (with a mesh: shardings) for an optimizer's state, like its parameters'.

        Args:
            state: any optimizer state of optax, with arrays or `jax.ShapeDtypeStruct` as leaves
                (`jax.eval_shape(optimizer.init, params)`).
            params: as for `specs`; nested dicts in the state are followed by their dotted path.
            mesh: the mesh.

        Returns:
            The same pytree. A leaf that has no parameter's path and shape (a count, a factored
            moment) is replicated.
        """
        leaves = shapes_of(params)

        def one(path: tuple[Any, ...], leaf: Any) -> Any:
            name = _parameter_at(path, leaf, leaves)
            spec = P() if name is None else self.spec(name, leaves[name].shape, mesh)
            return spec if mesh is None else NamedSharding(mesh, spec)

        return jax.tree_util.tree_map_with_path(one, state)

    def plan(self, model: Any, mesh: Any) -> ShardingPlan:
        """Return the plan of a model on a mesh, to print, save or open as a page."""
        return ShardingPlan.of(self, model, mesh)

    def __iter__(self) -> Iterator[SpecRule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardingRules):
            return NotImplemented
        return (self.rules, self.inputs, self.activations) == (
            other.rules,
            other.inputs,
            other.activations,
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __str__(self) -> str:
        width = max((len(rule.pattern) for rule in self.rules), default=0)
        lines = [f"ShardingRules {self.name}".rstrip()]
        for rule in self.rules:
            line = f"  {rule.pattern:<{width}}  {shown(rule.spec)}"
            lines.append(f"{line}  # {rule.reason}" if rule.reason else line)
        lines += [f"  input {rule.pattern}  {shown(rule.spec)}" for rule in self.inputs]
        lines += [f"  {line}" for line in self.activations.lines()]
        return "\n".join(lines)

    __repr__ = __str__


def _as_rules(rules: Any) -> tuple[SpecRule, ...]:
    if isinstance(rules, ShardingRules):
        return rules.rules
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    made: list[SpecRule] = []
    for item in pairs:
        if isinstance(item, SpecRule):
            made.append(item)
            continue
        if not isinstance(item, tuple) or len(item) != 2:
            raise UsageError(
                f"Expected a SpecRule or a pair of pattern and spec, got {item!r}; write"
                " ShardingRules({'layers.*.weight': P('fsdp')})"
            )
        if not isinstance(item[0], str | re.Pattern):
            raise UsageError(f"Expected a pattern as a string, got {item[0]!r}")
        made.append(SpecRule(*item))
    return tuple(made)


def _parameter_at(path: tuple[Any, ...], leaf: Any, leaves: Mapping[str, Any]) -> str | None:
    """Return the parameter that a leaf of an optimizer's state belongs to.

    It is the longest end of the leaf's path that is a parameter's name, with the same shape.
    """
    parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in leaves and tuple(leaves[name].shape) == tuple(getattr(leaf, "shape", ())):
            return name
    return None
