"""Checks of a table of rules, to run before a TPU is rented; each finding is a sentence."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.markup import plural
from tpuport.sharding.constraints import Activations
from tpuport.sharding.leaves import Leaf
from tpuport.sharding.mesh import MeshAxis, sizes_of
from tpuport.sharding.spec_rule import SpecRule
from tpuport.sharding.specs import axis_size, fitted, num_shards

# A parameter of at least this size is reported if no rule shards it.
LARGE_BYTES = 2**20
_SPREADING = (MeshAxis.FSDP, MeshAxis.TENSOR, MeshAxis.EXPERT)


class NoteKind(enum.StrEnum):
    """Kinds of findings."""

    UNMATCHED = "matches nothing"
    SHADOWED = "shadowed"
    UNEVEN = "does not divide"
    REPLICATED = "large and replicated"
    COSTLY = "costs communication"


class RuleTable(Protocol):
    """The part of `ShardingRules` that checks and plans use."""

    name: str
    activations: Activations

    def findings(self, params: Any, mesh: Any) -> "list[ShardingNote]":
        """Return rules that look unintended."""
        ...

    def rule_for(self, name: str) -> SpecRule | None:
        """Return the first rule that matches a name, or None."""
        ...

    def spec(self, name: str, shape: tuple[int, ...], mesh: Any = None) -> P:
        """Return a parameter's spec; with a mesh, without axes that do not divide their dim."""
        ...

    def __iter__(self) -> Iterator[SpecRule]: ...


@dataclass(frozen=True)
class ShardingNote:
    """One finding to report.

    Attributes:
        kind: kind of the finding.
        name: the rule's pattern or the parameter's fqn.
        message: complete sentence to show.
    """

    kind: NoteKind
    name: str
    message: str

    def __str__(self) -> str:
        return self.message


def find(rules: RuleTable, leaves: Mapping[str, Leaf], mesh: Any) -> list[ShardingNote]:
    """Return all findings about rules for these parameters on a mesh (or its sizes)."""
    sizes = sizes_of(mesh)
    taken = {name: rules.rule_for(name) for name in leaves}
    found = [*_idle(rules, leaves, taken), *_costly(rules, taken, sizes)]
    for name, leaf in leaves.items():
        rule = taken[name]
        spec = rules.spec(name, leaf.shape)
        kept, lost = fitted(spec, leaf.shape, sizes)
        for dim, axes in lost:
            count = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            message = (
                f"dim {dim} of {name} has size {leaf.shape[dim]}, which {count} does not divide"
                f" (rule {rule}): it stays unsharded along {' and '.join(axes)}"
            )
            found.append(ShardingNote(NoteKind.UNEVEN, name, message))
        found += _large(name, leaf, rule, num_shards(kept, sizes), sizes)
    return found


def _idle(
    rules: RuleTable, leaves: Mapping[str, Leaf], taken: Mapping[str, SpecRule | None]
) -> list[ShardingNote]:
    found = []
    used = {id(rule) for rule in taken.values()}
    for rule in rules:
        if id(rule) in used:
            continue
        matched = [name for name in leaves if rule.matches(name)]
        if matched:
            first = ", ".join(dict.fromkeys(taken[name].pattern for name in matched))  # type: ignore[union-attr]
            message = (
                f"the rule {rule} is shadowed: {plural(len(matched), 'name')} that it matches"
                f" ({_some(matched)}) went to an earlier rule ({first})"
            )
            found.append(ShardingNote(NoteKind.SHADOWED, rule.pattern, message))
        elif not rule.optional:
            message = f"the rule {rule} matches no parameter or buffer"
            found.append(ShardingNote(NoteKind.UNMATCHED, rule.pattern, message))
    return found


def _costly(
    rules: RuleTable, taken: Mapping[str, SpecRule | None], sizes: dict[str, int]
) -> list[ShardingNote]:
    """Report rules known to cost communication, if the mesh has their axes."""
    used = {id(rule) for rule in taken.values()}
    return [
        ShardingNote(NoteKind.COSTLY, rule.pattern, f"the rule {rule}: {rule.cost}")
        for rule in rules
        if rule.cost and id(rule) in used and num_shards(rule.spec, sizes) > 1
    ]


def _large(
    name: str, leaf: Leaf, rule: SpecRule | None, shards: int, sizes: dict[str, int]
) -> list[ShardingNote]:
    """Report a large parameter that is replicated though no rule says so."""
    meant = rule is not None and not any(rule.spec)
    spread = any(axis_size(axis, sizes) > 1 for axis in _SPREADING)
    if meant or shards > 1 or not spread or leaf.num_bytes < LARGE_BYTES:
        return []
    why = "no rule matches it" if rule is None else f"its rule is {rule}"
    message = (
        f"{name} ({leaf.dtype}{list(leaf.shape)}, {leaf.num_bytes / 2**20:.1f} MiB) is replicated"
        f" on every chip: {why}"
    )
    return [ShardingNote(NoteKind.REPLICATED, name, message)]


def refuse(found: Sequence[ShardingNote], name: str) -> None:
    """Raise an error with all findings, if there are any.

    Raises:
        UsageError: there are findings; the message lists them all.
    """
    if found:
        lines = "\n".join(f"  {finding}" for finding in found)
        raise UsageError(f"strict: the sharding rules {name or 'given'} are not clean:\n{lines}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
