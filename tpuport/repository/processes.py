"""Commands of tpuport that run other people's code, each in a group of processes of its own."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tpuport.foundation.guarded import run_guarded
from tpuport.verify.processes import last_lines

_TPUPORT = (sys.executable, "-c", "from tpuport.cli.app import app; app()")


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Attributes:
        status: Its exit status; None if it was stopped after its time.
        output: What it wrote to standard output.
        tail: The last lines of what it wrote to standard error.
        log: All of that.
    """

    status: int | None
    output: str
    tail: str
    log: str = ""


def run_command(
    arguments: Sequence[str],
    *,
    folder: Path,
    log: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command of tpuport, and stop it and all that it started after some time.

    They are stopped as well if this process is killed. Temporary files are deleted.

    Args:
        arguments: The command and its options.
        folder: The folder in which it runs.
        log: The file for what it wrote to standard error.
        seconds: The time that it may take.
        environment: Variables for it, besides those of this process.
    """
    # A short name: sockets of worker processes are there, and their paths have a limit.
    temporary = tempfile.mkdtemp(prefix="tpuport-")
    # Not in the folder of results: the command may look for files that the script wrote.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = run_guarded(
            (*_TPUPORT, *arguments),
            stdout=out,
            stderr=err,
            seconds=seconds,
            folder=folder,
            environment={**(environment or {}), "TMPDIR": temporary},
            temporary=temporary,
        )
        output, errors = _text(out), _text(err)
    log.write_text(errors)
    return Finished(status, output, last_lines(errors), errors)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
