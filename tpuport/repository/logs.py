"""What the log of a command says: its last error, whose fault that is, and what to do."""

import os
import re
import signal
from pathlib import Path

from tpuport.diagnosis.explain import OWN_FAULT
from tpuport.foundation.stack import COMPILED_AGAIN, is_segmentation_fault
from tpuport.verify.processes import KILLED

TELL = "please report it with the script"
_PACKAGE = Path(__file__).parents[1]
_ERROR = re.compile(
    r"^([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b.*|\S+: error: .*)$"
)
_PLACE = re.compile(r'^\s*File "(?P<file>[^"/<][^"]*)", line (?P<line>\d+)')
_EAGER = re.compile(r"tpuport run --eager (?!NAME\b)(\w+)")
# libtpu says which signal ended it, and where it was: in the namespaces of XLA.
_OF_COMPILER = re.compile(r"^\*\*\* SIG\w+ .*received by PID.*?^\s+@ .*\bxla::", re.M | re.S)
_OVERFLOW = "STACK OVERFLOW"


def last_error(log: str) -> str:
    """Return the last error that a log shows, with the innermost line of the repository."""
    lines = log.splitlines()
    error = next((line for line in reversed(lines) if _ERROR.match(line)), "")
    place = next((m for line in reversed(lines) if (m := _PLACE.match(line))), None)
    at = f" ({place['file']}:{place['line']})" if place else ""
    return f"{error[:300]}{at}." if error else ""


def last_line(log: str) -> str:
    """Return what tpuport said last: its own errors have no name of a class in front."""
    before = log.rpartition("What to do: ")[0] or log
    lines = [line for line in before.splitlines() if line.strip()]
    # Below an error of tpuport is the line of the script, indented.
    said = [line for line in lines if not line[0].isspace()] or lines
    return said[-1].strip()[:400] if said else ""


def is_own_fault(log: str) -> bool:
    """Return whether tpuport, or torchax, failed at a line that was not meant to."""
    return OWN_FAULT in log


def is_of_tpuport(log: str) -> bool:
    """Return whether the last error that a log shows is one that tpuport raised.

    An innermost frame of tpuport alone does not say so: torch shows none where it fails for what
    the script gave it.
    """
    lines = log.splitlines()
    error = next((i for i in reversed(range(len(lines))) if _ERROR.match(lines[i])), None)
    if error is None:
        return False
    if lines[error].startswith(_PACKAGE.name + "."):
        return True
    frames = [i for i in range(error) if lines[i].lstrip().startswith('File "')]
    own = bool(frames) and lines[frames[-1]].lstrip().startswith(f'File "{_PACKAGE}{os.sep}')
    return own and lines[frames[-1] + 1].lstrip().startswith("raise ")


def remedy(log: str) -> str:
    """Return what an error of tpuport says that one can do."""
    return log.rpartition("What to do: ")[2].split("\n")[0] if "What to do: " in log else ""


def around_a_fault(log: str) -> str:
    """Return what to do about a fault of tpuport, with the module that a log names."""
    named = _EAGER.findall(log)
    return f"{TELL}; until it is mended, leave that module to eager PyTorch with" + (
        f" --run-option=--eager={named[-1] if named else 'CLASS'}"
    )


def overflowed(status: int | None, log: str) -> bool:
    """Return whether the TPU's compiler ended a process for want of stack, and nothing helped."""
    return is_segmentation_fault(status) and _OVERFLOW in log and not needed_stack(log)


def needed_stack(log: str) -> bool:
    """Return whether a program was compiled again with a stack without a limit."""
    return COMPILED_AGAIN in log


def how_it_died(status: int | None, log: str) -> str:
    """Return what ended a process if a signal did; an empty text for any other end."""
    number = next((n for n in signal.Signals if status in _statuses(n)), None)
    if status is None or number is None:
        return ""
    if number == signal.SIGKILL:
        return KILLED
    if _OF_COMPILER.search(log):
        return f"The TPU's compiler, libtpu, crashed ({number.name}): that is no fault of the code."
    return f"The process crashed ({number.name})."


def _statuses(number: signal.Signals) -> tuple[int, int]:
    """Return the exit statuses that say so, of a process and of one that a shell started."""
    return -number, 128 + number
