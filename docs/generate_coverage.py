"""Write docs/coverage.md: the torch operations that models use, and what implements each.

Run with `make docs`. No model is executed: names are read from the installed sources of torch.nn,
diffusers and transformers, and looked up in the registries of torch, torchax and tpuport.
"""

import importlib.metadata
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._decomp import decomposition_table

from tpuport.foundation.interop import backend
from tpuport.tracing.core import lowering_registry, op_info
from tpuport.tracing.core.view_steps import VIEWS
from tpuport.tracing.functions import inner_gradients  # noqa: F401 - it fills FUNCTIONS too
from tpuport.tracing.functions.registry import FUNCTIONS
from tpuport.tracing.lowerings import load
from tpuport.tracing.session import modes  # noqa: F401 - modes fills FUNCTIONS

PAGE = Path(__file__).with_name("coverage.md")
aten = torch.ops.aten

# Library -> the folder of the installed package, and its files that define models.
SOURCES = {
    "torch.nn": ("torch", ("nn/functional.py", "nn/modules/*.py", "nn/utils/*.py")),
    "diffusers": ("diffusers", ("models/**/*.py",)),
    "transformers": ("transformers", ("models/*/modeling_*.py", "*_utils.py", "activations.py")),
}

# The namespaces through which code calls functions of torch.
_CALL = re.compile(
    r"(?<![\w.])(?:torch\.nn\.functional|nn\.functional|F|torch)"
    r"\.((?:(?:fft|linalg|special)\.)?[a-z_]\w*)\b(?!\.[a-z])"
)
_METHOD = re.compile(r"\.([a-z_]\w*)\(")
# Methods that Python's own types have too: a call of one says nothing about a tensor.
_COMMON = {
    name
    for kind in (str, bytes, list, dict, set, tuple, int, float, Path, torch.nn.Module)
    for name in dir(kind)
}
_PREFIXES = {"fft": "fft_", "linalg": "linalg_", "special": "special_"}

# The implementations of an operation, in the order of the page's legend.
OURS, VIEW, FUNCTION = "lowering", "view", "function"
THEIRS, APART, PYTHON, NONE = "torchax", "decomposed", "Python", "no form"
LEGEND = {
    OURS: "a lowering of tpuport (`tpuport/tracing/lowerings/`)",
    FUNCTION: "tpuport handles the call of the torch function itself",
    VIEW: "a view: tpuport keeps its storage shared with its base",
    THEIRS: "torchax's lowering, under tpuport's dtypes and writes",
    APART: "PyTorch decomposes it into other operations",
    PYTHON: "a function of torch.nn.functional written in Python: its operations are what counts",
    NONE: "refused for traced tensors, with the line and what to do instead",
}


@dataclass(frozen=True)
class Row:
    """A name, the number of files of each library with it, and its implementations."""

    name: str
    files: tuple[int, ...]
    in_torchax: bool
    answers: tuple[str, ...]
    missing: tuple[str, ...]


# -- what is used ----------------------------------------------------------------------------------


def folder(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        msg = f"{package} is not installed: pip install -e '.[jax,recipes]'"
        raise ModuleNotFoundError(msg)
    return Path(spec.origin).parent


def used(package: str, patterns: tuple[str, ...]) -> Counter[str]:
    """Count the files in which each torch function or tensor method occurs."""
    root = folder(package)
    found: Counter[str] = Counter()
    for path in sorted({p for pattern in patterns for p in root.glob(pattern)}):
        text = path.read_text(encoding="utf-8")
        names = set(_CALL.findall(text))
        names |= {n for n in _METHOD.findall(text) if n not in _COMMON and _is_method(n)}
        found.update(names)
    return found


def _is_method(name: str) -> bool:
    return callable(getattr(torch.Tensor, name, None)) and hasattr(aten, name)


# -- what answers ----------------------------------------------------------------------------------


def overloads_of(packet: Any) -> Iterator[Any]:
    """Yield the overloads that Python reaches: with a kernel, without named dims or `out=`."""
    for name in packet.overloads():
        overload = getattr(packet, name)
        schema = overload._schema
        if not torch._C._dispatch_has_kernel(overload.name()) or "Dimname" in str(schema):
            continue
        if not any(a.is_out for a in schema.arguments):
            yield overload


def theirs(op: Any) -> Any:
    """Return torchax's entry of an overload or of its packet."""
    return backend.TORCHAX_OPS.get(op) or backend.TORCHAX_OPS.get(op.overloadpacket)


def answer(op: Any) -> str:
    """Return the implementation that the dispatch uses for one ATen overload."""
    special, lower = lowering_registry.find(op)
    ours = lowering_registry.LOWERINGS.get(op) or lowering_registry.LOWERINGS.get(op.overloadpacket)
    if ours is not None or special is not None:
        return OURS
    if op in VIEWS or op is aten.as_strided.default or torch.Tag.inplace_view in op.tags:
        return VIEW
    if op._schema.is_mutable:
        functional = op_info.functional_of(op)
        return NONE if functional is None else answer(functional)
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return APART  # before the dispatch sees it
    if lower is not None:
        return THEIRS
    return APART if op in decomposition_table or op._can_decompose() else NONE


def makes_tensors(op: Any) -> bool:
    """Return whether the result is data; sizes and dtypes are static while tracing."""
    special, _ = lowering_registry.find(op)
    return any("Tensor" in str(r.type) for r in op._schema.returns) or bool(special)


def function_of(name: str) -> Callable[..., Any] | None:
    """Return the torch function or method with a name."""
    for owner in (torch.nn.functional, torch, torch.Tensor):
        value: Any = owner
        for part in name.split("."):
            value = getattr(value, part, None)
        if callable(value) and not isinstance(value, type):
            return value
    return None


def handled(name: str) -> bool:
    """Return whether tpuport handles the call of the function itself, in any namespace."""
    owners = (torch.nn.functional, torch, torch.Tensor)
    return any(getattr(owner, name, None) in FUNCTIONS for owner in owners)


def row(name: str, files: tuple[int, ...]) -> Row | None:
    """Make the row of a name; return None if it is no operation on tensors."""
    space, _, last = name.rpartition(".")
    packet = getattr(aten, _PREFIXES.get(space, "") + last, None)
    ops = [op for op in overloads_of(packet) if makes_tensors(op)] if packet is not None else []
    by_op = {op: answer(op) for op in ops}
    answers = [FUNCTION] if handled(name) else []
    answers += [a for a in LEGEND if a in by_op.values() and a != NONE]
    missing = [op._overloadname for op, found in by_op.items() if found == NONE]
    if not by_op and not answers:
        function = function_of(name)
        home = getattr(function, "__module__", None)
        if home != "torch.nn.functional" or name.startswith("_"):
            return None
        answers = [PYTHON]
    in_torchax = any(theirs(op) is not None for op in ops)
    return Row(name, files, in_torchax, tuple(answers), tuple(missing))


# -- the page --------------------------------------------------------------------------------------


def rows() -> list[Row]:
    """Make one row for each operation that occurs, the most used first."""
    load()
    counts = [used(package, patterns) for package, patterns in SOURCES.values()]
    names = sorted(set().union(*counts))
    made = [row(name, tuple(c[name] for c in counts)) for name in names]
    return sorted((r for r in made if r is not None), key=lambda r: (-sum(r.files), r.name))


def versions() -> str:
    """Return the versions that the page is about."""
    names = ("torch", "torchax", "diffusers", "transformers")
    found = ((n, importlib.metadata.version(n).partition("+")[0]) for n in names)
    return ", ".join(f"{name} {version}" for name, version in found)


def cell(one: Row) -> str:
    """Format the implementations, and the overloads without one."""
    if not one.missing:
        return ", ".join(one.answers)
    rest = "no form: " + ", ".join(f"`{m}`" for m in one.missing)
    return ", ".join([*one.answers, rest]) if one.answers else NONE


def summary(table: list[Row]) -> str:
    """Format the number of operations of each implementation."""
    whole = Counter(one.answers[0] if one.answers else NONE for one in table)
    lines = ["| what answers | operations | |", "|---|--:|---|"]
    lines += [f"| {name} | {whole[name]} | {text} |" for name, text in LEGEND.items()]
    known = sum(one.in_torchax for one in table)
    lines += ["", f"{len(table)} operations occur; torchax registers {known} of them."]
    return "\n".join(lines)


def operations(table: list[Row]) -> str:
    """Format the table of every operation."""
    head = " | ".join(SOURCES)
    lines = [f"| operation | {head} | torchax | tpuport |", "|---|--:|--:|--:|---|---|"]
    for one in table:
        files = " | ".join(str(n) if n else "" for n in one.files)
        has = "yes" if one.in_torchax else ""
        lines.append(f"| `{one.name}` | {files} | {has} | {cell(one)} |")
    return "\n".join(lines)


def registered() -> str:
    """Format the lowerings of torch's operations, each with what torchax lacks."""
    lines = ["| ATen operation | file | what torchax lacks |", "|---|---|---|"]
    entries = sorted(lowering_registry.LOWERINGS.items(), key=lambda item: str(item[0]))
    for op, entry in entries:
        if str(op).startswith("tpuport."):  # its own, where tpuport.quantization is imported
            continue
        file = entry.function.__module__.rpartition(".")[2]
        lines.append(f"| `{str(op).removeprefix('aten.')}` | {file} | {entry.reason} |")
    return "\n".join(lines)


def page() -> str:
    """Return the text of docs/coverage.md."""
    table = rows()
    return f"""# Coverage of torch operations

Generated by `make docs`; do not edit. For {versions()}.

Which functions of torch, and methods of tensors, occur in the sources of `torch.nn` and in the
models of diffusers and transformers; in how many files; and where the port takes each from.
Methods whose names Python's own types share (`split`, `index`) are counted as functions only.

{summary(table)}

## Operations

{operations(table)}

## Lowerings for upstream

Each is registered in one place, has its test in `tests/model/lowering_cases/`, and leaves as soon
as torchax has it: a strict expected failure there tells when.

{registered()}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
