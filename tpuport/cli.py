"""The `tpuport` command, and the only module that prints.

Exit codes: 0 when all is well, 1 when there are findings or parity fails, 2 for a wrong call.
"""

import difflib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuport import __version__
from tpuport.errors import MissingExtraError, PortError, TpuportError

if TYPE_CHECKING:
    from tpuport.rules._rule import Rule

FAILED = 1
WRONG_CALL = 2

app = typer.Typer(
    name="tpuport",
    help="Ports PyTorch models to JAX and TPU, and proves that they compute the same function.",
    epilog="Exit codes: 0 all is well, 1 findings or failed parity, 2 wrong call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@contextmanager
def _errors_as_exit_codes(command: str) -> Iterator[None]:
    """Prints tpuport's own errors without a traceback; every other one is a bug and keeps its own.

    Args:
        command: What to name in the message about a package that is not installed.
    """
    try:
        yield
    except TpuportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED if isinstance(error, PortError) else WRONG_CALL) from None
    except ModuleNotFoundError as error:
        missing = MissingExtraError.from_import(command, error)
        if missing is None:
            raise
        typer.echo(str(missing), err=True)
        raise typer.Exit(WRONG_CALL) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpuport {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Ports PyTorch models to JAX and TPU, and proves that they compute the same function."""
    del version


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="PATH", dir_okay=False, help="Where to write the HTML report.")
    ] = Path("tpuport-demo.html"),
) -> None:
    """Port two models untouched and print reports, parity and speed against eager.

    One is the HunyuanVideo-1.5 transformer of diffusers, with fewer layers and
    random weights; the other is a diffusion planner written the way research
    code is. Runs on the CPU.
    """
    with _errors_as_exit_codes("tpuport demo"):
        from tpuport.demo import run

        if not run(out=out):
            raise typer.Exit(FAILED)


@app.command()
def rules() -> None:
    """List the rules: code, name, how safe the fix is, and what the rule reports."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tpuport.source.discovery import find_rules

    table = Table("Code", "Rule", "Fix", "Reports", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[:3]:
        column.no_wrap = True
    for rule in find_rules():
        table.add_row(rule.CODE, rule.__name__, _safety(rule), rule.MESSAGE)
    Console(markup=False).print(table)


@app.command()
def explain(
    code: Annotated[
        str, typer.Argument(metavar="CODE", help="A rule's code or name; `tpuport rules` has them.")
    ],
) -> None:
    """Say what one rule looks for, why that is a problem, and when its fix is safe."""
    from tpuport.source.discovery import find_rules

    rule = _rule_named(code, find_rules())
    typer.echo(f"{rule.CODE} {rule.__name__} (fix: {_safety(rule)})\n{rule.MESSAGE}\n")
    typer.echo(inspect.cleandoc(rule.__doc__ or ""))
    for example in rule.EXAMPLES[:1]:
        typer.echo(f"\nExample\n\n{textwrap.indent(example.before.strip(), '    ')}")
        if example.after is not None:
            typer.echo(f"\nbecomes\n\n{textwrap.indent(example.after.strip(), '    ')}")


def _safety(rule: "type[Rule]") -> str:
    safety = rule.SAFETY
    return f"{safety.name} (rtol {safety.rtol:g})" if safety.rtol else safety.name


def _rule_named(wanted: str, found: "Sequence[type[Rule]]") -> "type[Rule]":
    by_name = {name.lower(): rule for rule in found for name in (rule.CODE, rule.__name__)}
    key = wanted.replace("-", "").replace("_", "").lower()
    if key in by_name:
        return by_name[key]
    near = [by_name[name].CODE for name in difflib.get_close_matches(key, by_name, n=1)]
    hint = f" Did you mean {near[0]}?" if near else ""
    typer.echo(f"There is no rule {wanted}.{hint} `tpuport rules` lists them all.", err=True)
    raise typer.Exit(WRONG_CALL)
