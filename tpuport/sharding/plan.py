"""The sharding plan of a model on a mesh by a table of rules, as text, JSON and a page."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.foundation.reporting.json_codec import encoded
from tpuport.foundation.reporting.saved_report import SavedReport, plain_text
from tpuport.model.ported_state import PortedState
from tpuport.sharding import checks
from tpuport.sharding.leaves import module_of, shapes_of
from tpuport.sharding.mesh import sizes_of
from tpuport.sharding.plan_data import PlanData, Row
from tpuport.sharding.plan_html import to_html
from tpuport.sharding.plan_text import WIDTH, render
from tpuport.sharding.specs import fitted, num_shards


@dataclass(frozen=True)
class ShardingPlan(PlanData, SavedReport):
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

    @classmethod
    def of(cls, rules: checks.RuleTable, model: Any, mesh: Any) -> "ShardingPlan":
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

    def check(self) -> None:
        """Raise an error with all findings, if there are any.

        Raises:
            UsageError: there are findings; the message lists them all.
        """
        checks.refuse(self.findings, self.rules)

    def to_json(self) -> str:
        """Return the plan as JSON: for each dim of a spec an axis, a list of axes or null."""
        # A PartitionSpec is no tuple, but has the parts of one.
        rows = [encoded(row) | {"spec": encoded(tuple(row.spec))} for row in self.rows]
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
                "activations": encoded(self.activations),
                "findings": encoded(self.findings),
            },
            indent=1,
        )

    def to_html(self) -> str:
        """Return the plan as a self-contained page: bytes a chip, and the module tree by spec."""
        return to_html(self)

    def __str__(self) -> str:
        return plain_text(self, WIDTH)

    def __rich__(self) -> Any:
        return render(self)


def _activation_findings(rules: checks.RuleTable, model: Any) -> list[checks.ShardingNote]:
    if isinstance(model, Mapping) or not rules.activations:
        return []
    names = [name for name, _ in module_of(model).named_modules()]
    return [
        checks.ShardingNote(
            checks.NoteKind.UNMATCHED,
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
