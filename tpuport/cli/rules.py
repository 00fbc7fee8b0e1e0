"""`tpuport rules` and `tpuport explain`: the rules, their reasons, and when a fix is safe."""

import json
import textwrap
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import errors_as_exit_codes

if TYPE_CHECKING:
    from tpuport.lint.catalogue import CatalogueEntry

Format = Annotated[Literal["text", "json"], typer.Option("--format", help="Output format.")]
Code = Annotated[
    str, typer.Argument(metavar="CODE", help="A rule's code or name; `tpuport rules` lists them.")
]


def rules(form: Format = "text", as_json: options.AsJson = False) -> None:
    """List the rules: code, name, severity, how safe the fix is, and what the rule reports."""
    from tpuport.lint.catalogue import catalogue

    if as_json or form == "json":
        typer.echo(json.dumps([_fields(entry) for entry in catalogue()], indent=1))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("Code", "Rule", "Severity", "Fix", "Reports", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[:4]:
        column.no_wrap = True
    for entry in catalogue():
        table.add_row(entry.code, entry.name, entry.severity, entry.fix, entry.message)
    Console(markup=False).print(table)


def explain(code: Code, form: Format = "text", as_json: options.AsJson = False) -> None:
    """Explain what one rule looks for, why that is a problem, and when its fix is safe."""
    with errors_as_exit_codes("tpuport explain"):
        from tpuport.lint.catalogue import entry_named

        entry = entry_named(code)
        if as_json or form == "json":
            fields = _fields(entry) | {"page": entry.page}
            typer.echo(json.dumps(fields, indent=1))
            return
        facts = f"severity: {entry.severity}, fix: {entry.fix}"
        typer.echo(f"{entry.code} {entry.name} ({facts})\n{entry.message}\n")
        typer.echo(entry.page)
        for example in entry.examples[:1]:
            typer.echo(f"\nExample\n\n{_indented(example.before)}")
            if example.after is not None:
                typer.echo(f"\nbecomes\n\n{_indented(example.after)}")
            elif example.left is not None:
                typer.echo(f"\nhas no automatic fix: {example.left}")
        for source in entry.clean[:1]:
            typer.echo(f"\nLooks alike and is fine\n\n{_indented(source)}")


def _indented(source: str) -> str:
    return textwrap.indent(textwrap.dedent(source).strip(), "    ")


def _fields(entry: "CatalogueEntry") -> dict[str, str]:
    return {
        "code": entry.code,
        "name": entry.name,
        "severity": entry.severity.value,
        "fix": entry.fix,
        "message": entry.message,
    }
