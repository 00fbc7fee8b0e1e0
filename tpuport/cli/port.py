"""`tpuport port`: a repository, from its source to a report and launch files."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import DOES_NOT_FIT, FAILED, NEEDS_YOU, errors_as_exit_codes, say

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
    float | None,
    typer.Option(
        min=0.01,
        metavar="M",
        show_default=False,
        rich_help_panel=_RUNS,
        help="Stop the comparison after this time, and compiling for a slice as well. Fifteen if "
        "left out, and no more runs after five to tell a difference from rounding.",
    ),
]
Slice = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="SLICE",
        rich_help_panel=_SLICE,
        show_default=False,
        help="Such as v6e-8, v5p-16; the smallest v6e that fits if left out.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        rich_help_panel=_SLICE,
        help="A function that returns the model and its inputs, as file.py:function, instead of "
        "the model that the script calls first.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        rich_help_panel=_RUNS,
        help="A setting of the script, however it takes it (argparse, hydra, globals). Repeatable.",
    ),
]
FullSize = Annotated[
    bool,
    typer.Option(
        "--full-size", rich_help_panel=_RUNS, help="Compare with the sizes of the script."
    ),
]
Autocast = Annotated[
    bool,
    typer.Option(
        "--autocast",
        rich_help_panel=_RUNS,
        help="Leave autocast on: results of 16 bits differ by rounding.",
    ),
]
NoMadeUp = Annotated[
    bool,
    typer.Option(
        "--no-made-up-data",
        rich_help_panel=_RUNS,
        help="Make up no data: a script that does not find its data fails.",
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
    steps: Steps = 3,
    minutes: Minutes = None,
    run_option: options.RunOptions = None,
    set_: Changes = None,
    full_size: FullSize = False,
    no_made_up_data: NoMadeUp = False,
    autocast: Autocast = False,
    slice_name: Slice = None,
    model: Model = None,
    out: Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Read a repository, compare its training with eager PyTorch, and write what is left to do.

    Proposes the script to start and writes the rewrites that are proved as a
    patch. With --run, or a yes when it asks, it runs the script in a copy of the
    repository, in eager PyTorch and ported, with small sizes and made-up data
    where there is none, and compiles its model for a slice. The folder of results
    has a page, the same as JSON, patches and files that start the script on TPUs.
    Called again it goes on where it stopped. Exit code 1 if a stage failed, 3 if
    the model does not fit, 4 if something waits for you.
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
            *(run or _allowed(root, as_json), steps, model, slice_name, minutes),
            *(
                tuple(run_option or ()),
                _pairs(set_ or ()),
                full_size,
                not no_made_up_data,
                autocast,
            ),
        )
        report = port_repository(wanted, lambda what: say(f"tpuport port: {what}"))
        if as_json:
            typer.echo(report.to_json())
        else:
            for line in lines(report):
                typer.echo(line)
            typer.echo(f"Everything: {wanted.out / 'report.html'}")
    codes = {"failed": FAILED, "does not fit": DOES_NOT_FIT, "needs you": NEEDS_YOU}
    if report.outcome in codes:
        raise typer.Exit(codes[report.outcome])


def _allowed(root: Path, as_json: bool) -> bool:
    """Ask on a terminal whether the code of the repository may run."""
    if as_json or not sys.stdin.isatty():
        return False
    question = f"Run code of {root} on this machine, in a copy? It is no sandbox."
    return typer.confirm(question, default=False, err=True)


def _pairs(changes: Sequence[str]) -> dict[str, str]:
    from tpuport.foundation.errors import UsageError

    found = {}
    for change in changes:
        name, sign, value = change.partition("=")
        if not (name and sign):
            raise UsageError(f"--set takes NAME=VALUE; got {change}.")
        found[name] = value
    return found
