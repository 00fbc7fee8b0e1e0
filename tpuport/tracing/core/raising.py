"""Checks in the code that runs: the outcome of a branch that seems to raise an error.

It is a guess that decides which outcome is traced first: if that raises, the other is all there is.
"""

import dis
import functools
import sys
from types import CodeType

from tpuport.foundation.user_frames import inside_prefixes

_RAISES = {"RAISE_VARARGS", "RERAISE", "LOAD_ASSERTION_ERROR"}
_LEAVES = ("RETURN", "JUMP", "FOR_ITER", "YIELD")
# A test is made a few instructions before its jump: `if not bool(x):`.
_BETWEEN = 4


def raising_outcome() -> bool | None:
    """Return the outcome of the test that runs now for which its line raises; None for neither."""
    frame, own = sys._getframe(1), inside_prefixes()[0]  # torch checks values, too
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return None if frame is None else _raising(frame.f_code, frame.f_lasti)


@functools.cache
def _raising(code: CodeType, position: int) -> bool | None:
    steps = list(dis.get_instructions(code))
    at = next((i for i, step in enumerate(steps) if step.offset >= position), len(steps))
    negated = False
    for number in range(at, min(at + _BETWEEN, len(steps))):
        step = steps[number]
        negated ^= step.opname == "UNARY_NOT"
        if step.opname.startswith("POP_JUMP") and step.opname.endswith(("_TRUE", "_FALSE")):
            jumps = step.opname.endswith("_TRUE") is not negated
            target = next((i for i, one in enumerate(steps) if one.offset == step.argval), at)
            if _raises(steps, number + 1, target if target > number else len(steps)):
                return not jumps
            return jumps if _raises(steps, target, len(steps)) else None
    return None


def _raises(steps: list[dis.Instruction], start: int, end: int) -> bool:
    """Return whether instructions lead to a `raise` before they go elsewhere."""
    for step in steps[start:end]:
        if step.opname in _RAISES:
            return True
        if step.opname.startswith(_LEAVES):
            return False
    return False
