"""Readers of exception texts that several causes share."""

import re

from tpuport.diagnosis.causes._cause import Raised

_TYPE = re.compile(r"\b(?:bool|[su]?int\d+|uint\d+|b?float\w+|complex\d+|key<\w+>)\[[\d,]*\]")
_TRACED = re.compile(r"while tracing the function (.+?) at (\S+?):(\d+) for (\w+)\.")
_ARGUMENTS = re.compile(r"depends on the values? of the arguments? (.+?)\.\s*$", re.MULTILINE)


def array_type(message: str) -> str | None:
    """Return the first array type in a text, such as `float32[4,3]`."""
    found = _TYPE.search(message)
    return found.group() if found else None


def traced_value(message: str) -> str | None:
    """Describe the traced value in a text of jax: its type and the argument it depends on."""
    parts = [array_type(message) or ""]
    arguments, function = _ARGUMENTS.search(message), _TRACED.search(message)
    if arguments:
        parts.append(f"computed from {arguments.group(1)}")
    if function:
        name, file, line, transformation = function.groups()
        parts.append(f"while {name} ({file}:{line}) is traced for {transformation}")
    return " ".join(filter(None, parts)) or None


def port_it(raised: Raised, plain: str) -> str:
    """Return `plain` as advice for a user's own `jax.jit`, or other advice for a ported model."""
    if raised.ported:
        return (
            "put this line into the model's own PyTorch code, which tpuport rewrites; in functions"
            " of jax it rewrites nothing"
        )
    return plain


CONVERT = (
    "port the model with tpuport.convert(model) in place of a jax.jit around torchax: it rewrites"
    " such lines in a copy and proves that the results are the same"
)
