"""A table of the stages of a comparison, for a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tpuport.verify.compare import Comparison, Stage


def largest(check: Comparison) -> str:
    """Return the largest difference of a comparison and its place; empty without a number."""
    if check.error is None:
        return ""
    rounding = " (rounding)" if check.is_rounding else ""
    return f"{check.error:.1e} {check.worst}{rounding}"


def stage_table(title: str, names: Sequence[str], stages: Sequence[Stage]) -> Table:
    """Return a table with a row for each comparison.

    Args:
        title: What is above it.
        names: All stages, in order.
        stages: Those that were reached.
    """
    table = Table(title=title, box=None)
    for heading in ("stage", "what", "number", "largest difference", "result"):
        table.add_column(heading, justify="right" if heading == "number" else "left")
    known = {stage.name: stage for stage in stages}
    for name in names:
        if name not in known:
            table.add_row(name, "", "", "", Text("not reached", style="dim"))
            continue
        for index, check in enumerate(known[name].checks):
            word = Text("equal", "green") if check.passed else Text("differs", "bold red")
            row = (name if index == 0 else "", check.what, str(check.count))
            table.add_row(*row, Text(largest(check)), word)
    return table
