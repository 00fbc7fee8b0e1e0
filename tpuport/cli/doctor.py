"""`tpuport doctor`: checks of the installation and the machine, with the commands to fix them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuport.cli._common import FAILED, errors_as_exit_codes, printable
from tpuport.foundation.version import __version__

if TYPE_CHECKING:
    from tpuport.doctor.finding import Check

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]
Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="How long to wait for jax and torchax.")
]
Measured = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Run kernels, products, memory, links and small programs, and compare the times.",
    ),
]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where --measure writes its report.")
]
Minutes = Annotated[
    float, typer.Option(min=0.1, metavar="MINUTES", help="With --measure: stop after that long.")
]
Limit = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="With --measure: how long a job may take.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="JOB", help="With --measure: only this job. Repeatable."),
]
Program = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TARGET",
        help="With --measure: a program, as for `tpuport compile`, in place of those of recipes"
        " in this folder. Repeatable.",
    ),
]


def doctor(
    as_json: AsJson = False,
    timeout: Timeout = 60.0,
    measured: Measured = False,
    out: Out = Path("tpuport-measurement"),
    minutes: Minutes = 10.0,
    limit: Limit = 120.0,
    only: Only = None,
    program: Program = None,
) -> None:
    """Check versions, devices, environment and compile cache, and say what to run.

    Works with nothing but tpuport installed. Exit code 1 if there is a problem.

    With --measure it runs the kernels against references and measures what
    tpuport.compile_for estimates by, in ten minutes on a TPU VM or a machine with
    a GPU, and writes measurement.json to calibrate with and measurement.html. On a
    CPU the same code runs at small sizes, and speeds are marked as meaningless.
    """
    from tpuport.doctor.checks import check
    from tpuport.doctor.finding import Status
    from tpuport.doctor.machine import this_machine

    if measured:
        from tpuport.cli._measure import MeasureOptions, measure

        with errors_as_exit_codes("tpuport doctor --measure"):
            wanted = MeasureOptions(
                out, minutes, limit, tuple(only or ()), tuple(program or ()), as_json
            )
            if measure(this_machine(timeout), wanted):
                raise typer.Exit(FAILED)
        return
    found = check(this_machine(timeout))
    if as_json:
        fields = {"tpuport": __version__, "findings": [asdict(one) for one in found]}
        typer.echo(json.dumps(fields, indent=1))
    else:
        typer.echo(printable(_as_text(found)))
    if any(one.status is Status.PROBLEM for one in found):
        raise typer.Exit(FAILED)


def _as_text(found: "list[Check]") -> str:
    width = max(len(one.topic) for one in found)
    lines = [f"tpuport {__version__}"]
    for one in found:
        lines.append(f"{one.status:7}  {one.topic:{width}}  {one.text}")
        if one.fix:
            lines.append(f"{'':{9 + width}}  {one.fix}")
    counts = {word: sum(one.status == word for one in found) for word in ("problem", "note")}
    shown = [f"{n} {word}{'' if n == 1 else 's'}" for word, n in counts.items()]
    return "\n".join([*lines, ", ".join(shown)])
