"""`tpuport verify`: a training script in eager PyTorch and ported, compared step by step."""

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import FAILED, errors_as_exit_codes, present, say
from tpuport.foundation.imports import importing

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
Original = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, hidden=True, help="What this folder is a copy of."),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        metavar="M",
        show_default=False,
        rich_help_panel=_RUNS,
        help="Begin no more runs after this time to tell a difference from rounding, and stop the "
        "one that is going on; a minute is left for them in any case. Seven for them if left out.",
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
    minutes: Minutes = None,
    original: Original = None,
    out: Out = None,
    report: options.ReportFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a training script in eager PyTorch and ported, and compare what they computed.

    Each run is a process of its own with the same seeds. Compared are the
    interface, then losses and gradients of the first step, then losses,
    parameters, buffers, optimizer state and written files after N steps. Exit
    code 1 if the two differ, also if that could not be told from rounding, and 2
    if the script fails in eager PyTorch.
    """
    with errors_as_exit_codes("tpuport verify"):
        with importing():
            from tpuport.verify.compare import Limits
            from tpuport.verify.processes import VerifiedScript
            from tpuport.verify.report import verify as verify_script

        options.check_report_name(report)
        what = VerifiedScript(
            *(script, args or (), steps, seed, plain, run_option or (), before),
            original=original,
        )
        say(f"tpuport verify: running {script} twice")
        found = verify_script(
            *(what, out or Path(f"verify-{script.stem}"), Limits(rtol, drift)),
            None if minutes is None else 60 * minutes,
        )
        present(found, report, as_json=as_json)
    if not found.passed:
        raise typer.Exit(FAILED)
