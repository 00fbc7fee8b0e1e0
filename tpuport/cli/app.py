"""The `tpuport` command. It and its commands are the only modules that print.

docs/exit_codes.md has the exit codes.
"""

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli import _options as options
from tpuport.cli import (
    compile,
    doctor,
    lint,
    lsp,
    mcp,
    port,
    recipe,
    rewrite,
    rules,
    run,
    verify,
    verify_port,
    warmup,
)
from tpuport.cli._common import FAILED, WRONG_CALL, errors_as_exit_codes, printable
from tpuport.cli._script_command import ScriptCommand
from tpuport.foundation.version import __version__

__all__ = ["FAILED", "WRONG_CALL", "app"]

app = typer.Typer(
    name="tpuport",
    help="Port PyTorch models to JAX and TPU, and prove that they compute the same function.",
    epilog="Exit codes: 0 all is well, 1 findings, a difference or a failure, 2 wrong call or bug, "
    "3 does not fit, 4 waits for you.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpuport {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Port PyTorch models to JAX and TPU, and prove that they compute the same function.

    Without a command it says what to do next in this folder.
    """
    del version
    if context.invoked_subcommand is None:
        from tpuport.repository.advice import next_in

        for line in next_in(Path.cwd()):
            typer.echo(printable(line))


app.command(cls=ScriptCommand)(port.port)
app.command()(lint.lint)
app.command()(rewrite.rewrite)
app.command()(rules.rules)
app.command()(rules.explain)
# Everything after the script's name belongs to the script, options included.
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command(cls=ScriptCommand)(verify.verify)
app.command()(verify_port.verify_port)
app.command()(warmup.warmup)
app.command("compile")(compile.compile_)
app.command()(doctor.doctor)
app.command()(mcp.mcp)
app.command()(lsp.lsp)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(
    recipe.recipe
)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="PATH", dir_okay=False, help="Where to write the HTML report.")
    ] = Path("tpuport-demo.html"),
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all of it, not only the end.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Port two models untouched and print parity and speed against eager.

    One is the HunyuanVideo-1.5 transformer of diffusers, with fewer layers and
    random weights; the other is a diffusion planner written the way research
    code is. Runs on the CPU.
    """
    with errors_as_exit_codes("tpuport demo"):
        from tpuport.demo import run

        agrees = run(out=out, verbose=verbose, as_json=as_json)
    if not agrees:
        raise typer.Exit(FAILED)
