"""A sharding plan on a terminal, through rich."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpuport.foundation.interop.name_patterns import generalised
from tpuport.foundation.reporting.markup import plural, visible
from tpuport.reports import wording as fmt
from tpuport.sharding.plan_data import PlanData, Row, spec_text

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 110
_MAX_FINDINGS = 20


def render(plan: PlanData) -> RenderableType:
    """Return the plan as a rich renderable: totals, categories, a row for each group of names."""
    blocks: list[RenderableType] = [
        Text(headline(plan), style="bold"),
        Text(f"{mesh_text(plan)}; rules {plan.rules or 'of your own'}"),
        Text(""),
        Padding(_categories(plan), (0, 0, 0, 2)),
        Text(""),
        Padding(_rows(plan), (0, 0, 0, 2)),
    ]
    for title, lines in (
        ("Activations", list(plan.activations)),
        ("Findings", [str(finding) for finding in plan.findings]),
    ):
        if lines:
            shown = [Text(f"- {visible(line)}") for line in lines[:_MAX_FINDINGS]]
            if len(lines) > len(shown):
                shown.append(Text(f"- and {len(lines) - len(shown)} more"))
            blocks += [Text(""), Text(title, style="bold"), Padding(Group(*shown), (0, 0, 0, 2))]
    return Group(*blocks)


def headline(plan: PlanData) -> str:
    """Return a title such as `LlamaForCausalLM: 14.9 GiB, 1.9 GiB a chip`."""
    whole, chip = fmt.size(plan.num_bytes), fmt.size(plan.bytes_a_chip)
    return f"{visible(plan.model)}: {whole}, {chip} a chip"


def mesh_text(plan: PlanData) -> str:
    """Return text such as `mesh fsdp=4 tensor=2 (8 x TPU v6 lite)`, without axes of size 1."""
    axes = " ".join(f"{name}={size}" for name, size in plan.mesh.items() if size > 1)
    chips = 1
    for size in plan.mesh.values():
        chips *= size
    device = f"{chips} x {plan.device}" if plan.device else plural(chips, "chip")
    return f"mesh {axes or 'of one chip'} ({device})"


def groups(rows: "Sequence[Row]") -> "dict[tuple[str, str], list[Row]]":
    """Group rows with the same spec whose names differ only in numbers."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((generalised(row.name), spec_text(row)), []).append(row)
    return found


def _categories(plan: PlanData) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for title, justify in (("category", "left"), ("bytes", "right"), ("a chip", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for name, (whole, chip) in plan.by_category().items():
        table.add_row(name, fmt.size(whole), fmt.size(chip))
    return table


def _rows(plan: PlanData) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("parameter", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("spec", overflow="fold")
    table.add_column("a chip", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for (name, spec), rows in groups(plan.rows).items():
        count = f" (x{len(rows)})" if len(rows) > 1 else ""
        shapes = {row.shape for row in rows}
        shape = str(list(rows[0].shape)) if len(shapes) == 1 else "various"
        table.add_row(
            Text(visible(name) + count if len(rows) > 1 else visible(rows[0].name)),
            Text(shape),
            Text(spec),
            fmt.size(sum(row.bytes_a_chip for row in rows)),
            Text(visible(rows[0].reason or ("" if rows[0].rule else "no rule"))),
        )
    return table
