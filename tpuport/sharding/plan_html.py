"""A sharding plan as one HTML page: no script, nothing loaded, light and dark by preference."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tpuport.foundation.interop.name_patterns import generalised
from tpuport.foundation.reporting.markup import Markup
from tpuport.foundation.reporting.templates import render
from tpuport.reports import wording as fmt
from tpuport.reports.plots import BarPart, stacked_bar
from tpuport.sharding import plan_text
from tpuport.sharding.mesh import MeshAxis
from tpuport.sharding.plan_data import PlanData, Row, spec_text

_MAX_DEPTH = 7
_OPEN_DEPTH = 2

# CSS classes of colour, with their legends.
_LOOKS = {
    "fsdp": "along fsdp",
    "tensor": "along tensor",
    "both": "along fsdp and tensor",
    "expert": "along expert",
    "elsewhere": "along other axes",
    "whole": "replicated on every chip",
}


@dataclass
class _Node:
    """A part of the module tree; blocks that differ only in their number are one node."""

    name: str
    children: "dict[str, _Node]" = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    @property
    def bytes_a_chip(self) -> int:
        return sum(row.bytes_a_chip for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def specs(self) -> str:
        return ", ".join(dict.fromkeys(spec_text(row) for row in self.rows))


def to_html(plan: PlanData) -> str:
    """Render the plan as a page to open from disk; its policy forbids it to load anything."""
    return render(
        "sharding/templates/plan.html.j2",
        plan=plan,
        text=plan_text,
        fmt=fmt,
        parts=_parts(plan.rows),
        rows_of={
            name: [row for row in plan.rows if row.category == name] for name in plan.by_category()
        },
        tree=list(_tree(plan).children.values()),
        picture=_picture,
        max_depth=_MAX_DEPTH,
        open_depth=_OPEN_DEPTH,
    )


def _tree(plan: PlanData) -> _Node:
    root = _Node("")
    for row in plan.rows:
        node = root
        plain = row.name.split(".")
        for depth, part in enumerate(generalised(row.name).split(".")):
            node = node.children.setdefault(part, _Node(part))
            node.rows.append(row)
            node.names.add(".".join(plain[: depth + 1]))
    return root


def _look(row: Row) -> str:
    axes = set(row.axes)
    if not axes:
        return "whole"
    if {MeshAxis.FSDP, MeshAxis.TENSOR} <= axes:
        return "both"
    named = (MeshAxis.EXPERT, MeshAxis.TENSOR, MeshAxis.FSDP)
    return next((str(axis) for axis in named if axis in axes), "elsewhere")


def _parts(rows: Sequence[Row]) -> list[BarPart]:
    """Return the bytes a chip by class of colour."""
    totals = dict.fromkeys(_LOOKS, 0)
    for row in rows:
        totals[_look(row)] += row.bytes_a_chip
    return [BarPart(look, num, _LOOKS[look], fmt.size(num)) for look, num in totals.items() if num]


def _picture(rows: Sequence[Row], largest: int) -> Markup | str:
    """Draw a bar of the rows' bytes a chip, relative to the largest, split by spec."""
    parts = _parts(rows)
    if not parts or not largest:
        return ""
    label = ", ".join(f"{part.words} {part.name}" for part in parts)
    left = largest - sum(part.amount for part in parts)
    rest = [BarPart("rest", left)] if left > 0 else []
    return stacked_bar([*parts, *rest], label, height=12)
