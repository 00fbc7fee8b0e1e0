"""A sharding plan as one HTML page: no script, nothing loaded, light and dark by preference."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from tpuport.foundation.interop.name_patterns import generalised
from tpuport.foundation.reporting.markup import Markup, join, page, plural, tag
from tpuport.reports import wording as fmt
from tpuport.reports.plots import stacked_bar
from tpuport.sharding.mesh import MeshAxis
from tpuport.sharding.plan_data import PlanData, Row, spec_text
from tpuport.sharding.plan_text import headline, mesh_text

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


def to_html(plan: PlanData) -> str:
    """Render the plan as a page to open from disk; its policy forbids it to load anything."""
    parts = [
        ("chip", "Bytes a chip", _categories(plan)),
        ("tree", "Module tree, coloured by spec", _tree(plan)),
        ("activations", "Specs of activations", _list(plan.activations)),
        ("findings", "Findings", _list(map(str, plan.findings))),
    ]
    sections = [
        tag("section", tag("h2", title), body, id=name) for name, title, body in parts if body
    ]
    main = tag("main", _header(plan), *sections)
    style = files("tpuport.sharding").joinpath("plan.css").read_text(encoding="utf-8")
    return page(headline(plan), main, style=style)


def _header(plan: PlanData) -> Markup:
    clean = not plan.findings
    words = "Nothing to report." if clean else f"{plural(len(plan.findings), 'finding')} below."
    lead = f"On a {mesh_text(plan)}, by the rules {plan.rules or 'given'}. {words}"
    mark = tag("span", "✓" if clean else "!", class_="mark", aria_hidden="true")
    body = tag("div", tag("h1", headline(plan)), tag("p", lead, class_="lead"))
    return tag("header", mark, body, class_="clean" if clean else "costly")


def _look(row: Row) -> str:
    axes = set(row.axes)
    if not axes:
        return "whole"
    if {MeshAxis.FSDP, MeshAxis.TENSOR} <= axes:
        return "both"
    named = (MeshAxis.EXPERT, MeshAxis.TENSOR, MeshAxis.FSDP)
    return next((str(axis) for axis in named if axis in axes), "elsewhere")


def _amounts(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Return the bytes a chip by class of colour."""
    totals = dict.fromkeys(_LOOKS, 0.0)
    for row in rows:
        totals[_look(row)] += row.bytes_a_chip
    return [(look, amount) for look, amount in totals.items() if amount]


def _picture(rows: Sequence[Row], largest: int) -> Markup:
    """Draw a bar of the rows' bytes a chip, relative to the largest, split by spec."""
    amounts = _amounts(rows)
    if not amounts or not largest:
        return tag("span", class_="picture")
    total = sum(amount for _, amount in amounts)
    words = ", ".join(f"{fmt.size(int(amount))} {_LOOKS[look]}" for look, amount in amounts)
    rest = [("rest", largest - total)] if largest > total else []
    return tag("span", stacked_bar([*amounts, *rest], words, height=12), class_="picture")


def _categories(plan: PlanData) -> Markup:
    table = plan.by_category()
    largest = max((chip for _, chip in table.values()), default=0)
    lines = [
        tag(
            "div",
            tag("span", name, class_="name"),
            _picture([row for row in plan.rows if row.category == name], largest),
            tag("span", f"{fmt.size(chip)} of {fmt.size(whole)}", class_="value"),
            class_="category",
        )
        for name, (whole, chip) in table.items()
    ]
    return join([*lines, _legend(plan)])


def _legend(plan: PlanData) -> Markup:
    items = [
        tag("li", tag("i", class_=look), _LOOKS[look], tag("b", fmt.size(int(amount))))
        for look, amount in _amounts(plan.rows)
    ]
    return tag("ul", *items, class_="legend")


def _tree(plan: PlanData) -> Markup:
    root = _Node("")
    for row in plan.rows:
        node = root
        plain = row.name.split(".")
        for depth, part in enumerate(generalised(row.name).split(".")):
            node = node.children.setdefault(part, _Node(part))
            node.rows.append(row)
            node.names.add(".".join(plain[: depth + 1]))
    largest = max((child.bytes_a_chip for child in root.children.values()), default=0)
    lines = [_node(child, 0, largest) for child in root.children.values()]
    how = "A bar is what one chip holds; open a part to see what it is made of."
    return tag("div", tag("p", how, class_="how"), *lines, class_="tree")


def _node(node: _Node, depth: int, largest: int) -> Markup:
    count = f" x {len(node.names)}" if len(node.names) > 1 else ""
    whole = sum(row.num_bytes for row in node.rows)
    value = tag("span", f"{fmt.size(node.bytes_a_chip)} of {fmt.size(whole)}", class_="value")
    told = []
    if not node.children:
        specs = ", ".join(dict.fromkeys(spec_text(row) for row in node.rows))
        told = [tag("small", f"{fmt.array(node.rows[0].dtype, node.rows[0].shape)} {specs}")]
    name = tag("span", tag("code", node.name), count, *told, class_="name")
    parts = [name, _picture(node.rows, largest), value]
    level = f"d{min(depth, _MAX_DEPTH)}"
    if not node.children:
        return tag("div", *parts, class_=f"line leaf {level}")
    line = tag("summary", *parts, class_=f"line {level}")
    inner = [_node(child, depth + 1, largest) for child in node.children.values()]
    return tag("details", line, *inner, open=depth < _OPEN_DEPTH)


def _list(lines: Iterable[str]) -> Markup | str:
    items = [tag("li", line) for line in lines]
    return tag("ul", *items) if items else ""
