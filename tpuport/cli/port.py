"""`tpuport port`: a repository, from its source to a report and launch files."""

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import FAILED, errors_as_exit_codes, say

_RUNS, _SLICE, _RESULT = "Runs", "The slice", "Result"

Folder = Annotated[
    Path, typer.Argument(metavar="REPO", show_default=False, help="A folder, or a script in it.")
]
Entry = Annotated[
    str | None,
    typer.Option(
        metavar="SCRIPT", help="The script to start, relative to REPO, if not the likeliest."
    ),
]
Run = Annotated[
    bool,
    typer.Option(
        "--run",
        rich_help_panel=_RUNS,
        help="Let the code of the repository run on this machine. Without it nothing of it does.",
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", rich_help_panel=_RUNS, help="Compare this many steps of an optimizer."
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        min=0.01,
        metavar="M",
        rich_help_panel=_RUNS,
        help="Stop running after this time, and compiling as well.",
    ),
]
Slice = Annotated[
    str,
    typer.Option("--for", metavar="SLICE", rich_help_panel=_SLICE, help="Such as v6e-8, v5p-16."),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        rich_help_panel=_SLICE,
        help="A function that returns the model and its inputs, as file.py:function: compiles it "
        "for the slice, as `tpuport compile` does.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        show_default=False,
        rich_help_panel=_RESULT,
        help="Folder for the results; port-REPO if left out.",
    ),
]


def port(
    repo: Folder,
    args: options.ScriptArguments = None,
    entry: Entry = None,
    run: Run = False,
    steps: Steps = 5,
    minutes: Minutes = 15.0,
    run_option: options.RunOptions = None,
    slice_name: Slice = "v6e-8",
    model: Model = None,
    out: Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Read a repository, compare its training with eager PyTorch, and write what is left to do.

    Proposes the script to start, writes the rewrites that are proved as a patch,
    runs the script in eager PyTorch and ported if --run is given, and compiles
    the model for a slice if --model is. The folder of results has a page, the
    same as JSON, patches and files that start the script on TPUs. Called again
    it goes on where it stopped. Exit code 1 if a stage failed or waits for you.
    """
    with errors_as_exit_codes("tpuport port"):
        from tpuport.foundation.errors import UsageError
        from tpuport.repository.port import port_repository
        from tpuport.repository.report import lines
        from tpuport.repository.stages import PortRequest

        if not repo.exists():
            raise UsageError(f"There is no folder or script {repo}.")
        root = repo if repo.is_dir() else repo.parent
        if entry is None and repo.is_file():
            entry = repo.name
        wanted = PortRequest(
            *(root, out or Path(f"port-{root.resolve().name}"), entry, tuple(args or ())),
            *(run, steps, model, slice_name, minutes, tuple(run_option or ())),
        )
        report = port_repository(wanted, lambda what: say(f"tpuport port: {what}"))
        if as_json:
            typer.echo(report.to_json())
        else:
            for line in lines(report):
                typer.echo(line)
            typer.echo(f"Everything: {wanted.out / 'report.html'}")
    if not report.passed:
        raise typer.Exit(FAILED)
