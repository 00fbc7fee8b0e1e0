"""The line of a module's class where a Python attribute changes, to name it in an error."""

import dis
import inspect
from typing import Any

from tpuport.foundation.user_frames import CodePlace, is_inside
from tpuport.source.rewrite.codegen import nested_codes


def attribute_place(owner: Any, name: str) -> CodePlace | None:
    """Return the first line that sets an attribute of an object after it was built.

    If none does, the attribute is changed in place, and it is the first line that reads it.
    """
    found: list[tuple[bool, int, str]] = []
    for kind in type(owner).__mro__:
        for method in vars(kind).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is None or code.co_name == "__init__" or is_inside(code.co_filename):
                continue
            for inner in nested_codes(code):
                for step in dis.get_instructions(inner):
                    line = step.positions.lineno if step.positions is not None else None
                    if step.argval == name and "ATTR" in step.opname and line is not None:
                        found.append((step.opname != "STORE_ATTR", line, inner.co_filename))
        if found:
            break
    if not found:
        return None
    _, line, file = min(found)
    return CodePlace.at(file, line)
