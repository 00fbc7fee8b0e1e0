"""`tpuport doctor`: checks of the installation and the machine, with the commands to fix them."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tpuport.cli._common import FAILED, printable
from tpuport.foundation.version import __version__

if TYPE_CHECKING:
    from tpuport.doctor.finding import Check

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]
Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="How long to wait for jax and torchax.")
]


def doctor(as_json: AsJson = False, timeout: Timeout = 60.0) -> None:
    """Check versions, devices, environment and compile cache, and say what to run.

    Works with nothing but tpuport installed. Exit code 1 if there is a problem.
    """
    from tpuport.doctor.checks import check
    from tpuport.doctor.finding import Status
    from tpuport.doctor.machine import this_machine

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
