"""Commands of tpuport that run other people's code, each in a group of processes of its own."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tpuport.foundation.guarded import run_guarded

_TPUPORT = (sys.executable, "-c", "from tpuport.cli.app import app; app()")
# A limit counts for the threads of a process only if it has been there from its start.
_WITH_STACK = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
os.execv(sys.argv[1], sys.argv[1:])
"""
_TAIL = 25


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Attributes:
        status: Its exit status; None if it was stopped after its time.
        output: What it wrote to standard output.
        tail: The last lines of what it wrote to standard error.
        log: All of that.
        unlimited_stack: Whether it had a stack without a limit.
    """

    status: int | None
    output: str
    tail: str
    log: str = ""
    unlimited_stack: bool = False


def run_command(
    arguments: Sequence[str],
    *,
    folder: Path,
    log: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    unlimited_stack: bool = False,
) -> Finished:
    """Run a command of tpuport, and stop it and all that it started after some time.

    They are stopped as well if this process is killed. Temporary files are deleted.

    Args:
        arguments: The command and its options.
        folder: The folder in which it runs.
        log: The file for what it wrote to standard error.
        seconds: The time that it may take.
        environment: Variables for it, besides those of this process.
        unlimited_stack: Whether its stack is to have no limit, if this process may say so.
    """
    unlimited_stack = unlimited_stack and _may_have_any_stack()
    command = (*_TPUPORT, *arguments)
    if unlimited_stack:
        command = (sys.executable, "-c", _WITH_STACK, *command)
    # A short name: sockets of worker processes are there, and their paths have a limit.
    temporary = tempfile.mkdtemp(prefix="tpuport-")
    # Not in the folder of results: the command may look for files that the script wrote.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = run_guarded(
            command,
            stdout=out,
            stderr=err,
            seconds=seconds,
            folder=folder,
            environment={**(environment or {}), "TMPDIR": temporary},
            temporary=temporary,
        )
        output, errors = _text(out), _text(err)
    log.write_text(errors)
    tail = "\n".join(errors.splitlines()[-_TAIL:])
    return Finished(status, output, tail, errors, unlimited_stack)


def _may_have_any_stack() -> bool:
    import resource

    return resource.getrlimit(resource.RLIMIT_STACK)[1] == resource.RLIM_INFINITY


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
