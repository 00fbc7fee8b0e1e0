"""`tpuport verify`: a training script in eager PyTorch and ported, compared step by step."""

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import FAILED, errors_as_exit_codes, has_color, say

_RUNS, _RESULT = "Runs", "Result"

Script = Annotated[
    Path, typer.Argument(metavar="SCRIPT", show_default=False, help="A Python file that trains.")
]
Steps = Annotated[
    int, typer.Option(min=1, metavar="N", help="Stop after this many steps of an optimizer.")
]
Seed = Annotated[int, typer.Option(help="Seed of Python, numpy and torch before the script.")]
Rtol = Annotated[
    float,
    typer.Option(min=0.0, metavar="R", help="Tolerance of first losses and gradients."),
]
Drift = Annotated[
    float,
    typer.Option(
        min=0.0, metavar="R", help="Tolerance after N steps, relative to how far values moved."
    ),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain",
        rich_help_panel=_RUNS,
        help="Compare with plain `python`, where CUDA is not available, not with CUDA emulated in "
        "eager PyTorch.",
    ),
]
Before = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        show_default=False,
        rich_help_panel=_RUNS,
        help="A Python file that both runs execute before the script, as `__before__`.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        rich_help_panel=_RESULT,
        show_default=False,
        help="Folder for the recordings and for what the runs write; verify-SCRIPT if left out.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        rich_help_panel=_RESULT,
        show_default=False,
        help="Write the report there: .html, .json, .txt.",
    ),
]


def verify(
    script: Script,
    args: options.ScriptArguments = None,
    steps: Steps = 20,
    seed: Seed = 0,
    rtol: Rtol = 1e-4,
    drift: Drift = 1e-3,
    plain: Plain = False,
    run_option: options.RunOptions = None,
    before: Before = None,
    out: Out = None,
    report: Report = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a training script in eager PyTorch and ported, and compare what they computed.

    Each run is a process of its own with the same seeds. Compared are the
    interface, then losses and gradients of the first step, then losses,
    parameters, buffers, optimizer state and written files after N steps. Exit
    code 1 if the two differ, 2 if the script fails in eager PyTorch.
    """
    with errors_as_exit_codes("tpuport verify"):
        from rich.console import Console

        from tpuport.foundation.errors import UsageError
        from tpuport.verify.compare import Limits
        from tpuport.verify.processes import VerifiedScript
        from tpuport.verify.report import verify as verify_script

        if report is not None and report.suffix not in (".html", ".json", ".txt"):
            raise UsageError(f"Expected a report ending in .json, .html or .txt, got {report}.")
        what = VerifiedScript(script, args or (), steps, seed, plain, run_option or (), before)
        say(f"tpuport verify: running {script} twice")
        found = verify_script(what, out or Path(f"verify-{script.stem}"), Limits(rtol, drift))
        if report is not None:
            found.save(report)
        if as_json:
            typer.echo(found.to_json())
        else:
            found.show(Console(force_terminal=has_color() or None, soft_wrap=True))
    if not found.passed:
        raise typer.Exit(FAILED)
