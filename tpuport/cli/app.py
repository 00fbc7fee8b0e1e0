"""The `tpuport` command. It and its commands are the only modules that print.

Exit codes: 0 when all is well, 1 when there are findings or parity fails, 2 for a wrong call or an
internal error.
"""

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli import (
    compile,
    doctor,
    lint,
    lsp,
    mcp,
    port,
    rewrite,
    rules,
    run,
    verify,
    verify_port,
    warmup,
)
from tpuport.cli._common import FAILED, WRONG_CALL, errors_as_exit_codes
from tpuport.foundation.version import __version__

__all__ = ["FAILED", "WRONG_CALL", "app"]

app = typer.Typer(
    name="tpuport",
    help="Port PyTorch models to JAX and TPU, and prove that they compute the same function.",
    epilog="Exit codes: 0 all is well, 1 findings or failed parity, 2 wrong call or bug.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


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
    """Port PyTorch models to JAX and TPU, and prove that they compute the same function."""
    del version


app.command()(port.port)
app.command()(lint.lint)
app.command()(rewrite.rewrite)
app.command()(rules.rules)
app.command()(rules.explain)
# Everything after the script's name belongs to the script, options included.
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(verify.verify)
app.command()(verify_port.verify_port)
app.command()(warmup.warmup)
app.command("compile")(compile.compile_)
app.command()(doctor.doctor)
app.command()(mcp.mcp)
app.command()(lsp.lsp)


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
    with errors_as_exit_codes("tpuport demo"):
        from tpuport.demo import run

        if not run(out=out):
            raise typer.Exit(FAILED)
