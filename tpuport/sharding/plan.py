"""The sharding plan of a model on a mesh by a table of rules, as text, JSON and a page."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from jax.sharding import PartitionSpec as P

from tpuport.foundation.reporting.saved_report import SavedReport, plain_text
from tpuport.model.ported_state import PortedState
from tpuport.sharding import checks
from tpuport.sharding.leaves import module_of, shapes_of
from tpuport.sharding.mesh import sizes_of
from tpuport.sharding.specs import axes_of, fitted, num_shards, shown

if TYPE_CHECKING:
    from tpuport.sharding.rule_table import ShardingRules


@dataclass(frozen=True)
class Row:
    """One parameter or buffer of a plan.

    Attributes:
        name: its fqn.
        shape: its shape on all chips together.
        dtype: its dtype.
        spec: its spec, fitted to shape and mesh.
        num_bytes: its size.
        bytes_a_chip: bytes of it that one chip holds.
        category: linear, embedding, convolution, norm, experts, buffer, other.
        rule: pattern of the rule that decided, or None.
        reason: reason that the rule gives.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: P
    num_bytes: int
    bytes_a_chip: int
    category: str
    rule: str | None
    reason: str

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes that it is sharded over."""
        return tuple(dict.fromkeys(str(name) for part in self.spec for name in axes_of(part)))


@dataclass(frozen=True)
class ShardingPlan(SavedReport):
    """The specs that rules give a model on a mesh, with findings about them.

    Attributes:
        model: the model's class.
        rules: the table's name.
        mesh: size of each axis.
        device: kind of the mesh's devices, such as "TPU v6 lite"; empty for sizes alone.
        rows: one row for each parameter and buffer.
        activations: specs of activations, a line each.
        findings: rules that look unintended.
    """

    model: str
    rules: str
    mesh: dict[str, int]
    device: str
    rows: tuple[Row, ...]
    activations: tuple[str, ...]
    findings: tuple[checks.Finding, ...]

    @classmethod
    def of(cls, rules: "ShardingRules", model: Any, mesh: Any) -> "ShardingPlan":
        """Plan a table for a module, a ported model or a mapping of shapes.

        Args:
            rules: the table.
            model: a module (on the meta device too), a ported model, or shapes by fqn.
            mesh: a mesh, or its sizes by axis.
        """
        sizes, leaves, kinds = sizes_of(mesh), shapes_of(model), _categories(model)
        rows = []
        for name, leaf in leaves.items():
            rule = rules.rule_for(name)
            spec = fitted(rules.spec(name, leaf.shape), leaf.shape, sizes)[0]
            shards = num_shards(spec, sizes)
            rows.append(
                Row(
                    name,
                    leaf.shape,
                    leaf.dtype,
                    spec,
                    leaf.num_bytes,
                    leaf.num_bytes // shards,
                    kinds.get(name, "other"),
                    None if rule is None else rule.pattern,
                    "" if rule is None else rule.reason,
                )
            )
        found = [*rules.findings(model, mesh), *_activation_findings(rules, model)]
        return cls(
            _name(model),
            rules.name,
            sizes,
            _device(mesh),
            tuple(rows),
            tuple(rules.activations.lines()),
            tuple(found),
        )

    @property
    def num_bytes(self) -> int:
        """Return the size of all parameters and buffers."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def bytes_a_chip(self) -> int:
        """Return the bytes of parameters and buffers that one chip holds."""
        return sum(row.bytes_a_chip for row in self.rows)

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Return total bytes and bytes a chip of each category, the largest first."""
        totals: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            whole, chip = totals.get(row.category, (0, 0))
            totals[row.category] = (whole + row.num_bytes, chip + row.bytes_a_chip)
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def check(self) -> None:
        """Raise an error with all findings, if there are any.

        Raises:
            UsageError: there are findings; the message lists them all.
        """
        checks.refuse(self.findings, self.rules)

    def to_json(self) -> str:
        """Return the plan as JSON: for each dim of a spec an axis, a list of axes or null."""
        rows = []
        for row in self.rows:
            spec = [list(part) if isinstance(part, tuple) else part for part in row.spec]
            rows.append({**asdict(row), "shape": list(row.shape), "spec": spec})
        return json.dumps(
            {
                "model": self.model,
                "rules": self.rules,
                "mesh": self.mesh,
                "device": self.device,
                "bytes": self.num_bytes,
                "bytes_a_chip": self.bytes_a_chip,
                "categories": {
                    name: {"bytes": whole, "bytes_a_chip": chip}
                    for name, (whole, chip) in self.by_category().items()
                },
                "parameters": rows,
                "activations": list(self.activations),
                "findings": [
                    {"kind": f.kind.value, "name": f.name, "message": f.message}
                    for f in self.findings
                ],
            },
            indent=1,
        )

    def to_html(self) -> str:
        """Return the plan as a self-contained page: bytes a chip, and the module tree by spec."""
        from tpuport.sharding.plan_html import to_html

        return to_html(self)

    def __str__(self) -> str:
        from tpuport.sharding.plan_text import WIDTH

        return plain_text(self, WIDTH)

    def __rich__(self) -> Any:
        from tpuport.sharding.plan_text import render

        return render(self)


def spec_text(row: Row) -> str:
    """Return a row's spec as text, "whole" if it is replicated."""
    return shown(row.spec) if any(row.spec) else "whole"


def _activation_findings(rules: "ShardingRules", model: Any) -> list[checks.Finding]:
    if isinstance(model, Mapping) or not rules.activations:
        return []
    names = [name for name, _ in module_of(model).named_modules()]
    return [
        checks.Finding(
            checks.Kind.UNMATCHED,
            pattern,
            f"the pattern of activations {pattern!r} matches no module",
        )
        for pattern in rules.activations.unmatched(names)
    ]


def _name(model: Any) -> str:
    if isinstance(model, PortedState):
        return type(model.module).__name__
    return type(model).__name__ if isinstance(model, torch.nn.Module) else "model"


def _device(mesh: Any) -> str:
    devices = getattr(mesh, "devices", None)
    return "" if devices is None else str(devices.flat[0].device_kind)


def _categories(model: Any) -> dict[str, str]:
    """Return the kind of layer that each parameter belongs to, by fqn."""
    if isinstance(model, Mapping):
        return {}
    found: dict[str, str] = {}
    for fqn, owner in module_of(model).named_modules():
        prefix = f"{fqn}." if fqn else ""
        kind = _kind(fqn, owner)
        found |= {prefix + n: kind for n, _ in owner.named_parameters(recurse=False)}
        found |= {prefix + n: "buffer" for n, _ in owner.named_buffers(recurse=False)}
    return found


def _kind(fqn: str, owner: torch.nn.Module) -> str:
    if "experts" in fqn.split("."):
        return "experts"
    if isinstance(owner, torch.nn.Linear):
        return "linear"
    if isinstance(owner, torch.nn.modules.conv._ConvNd):
        return "convolution"
    name = type(owner).__name__.lower()
    kinds = {"embedding": "embedding", "norm": "norm", "linear": "linear", "conv1d": "linear"}
    return next((kind for part, kind in kinds.items() if part in name), "other")
