"""Names of the state that blocks read, for the reason why a block was retraced."""

import functools
from collections.abc import Iterable
from typing import Any

from tpuport.foundation import pytree
from tpuport.tracing.guards import names_read
from tpuport.tracing.guards.watch import Record, Watcher


def changed_name(records: list[Record]) -> str | None:
    """Return the name of the first recorded value that has changed, or None.

    Args:
        records: The recorded values.

    Returns:
        A text such as "`COUNT` of package.module" or "`count` of a Counter".
    """
    for record in records:
        check, of, was = record
        if not check(of, was):
            return _described(record, records)
    return None


def name_of(value: Any, records: list[Record]) -> str:
    """Return a value's name, its holder and its type."""
    kind = _a(type(value).__name__)
    for _, of, was in records:
        found = next((name for name, one in _named_values(was) if one is value), None)
        if found is not None and not isinstance(of, (list, tuple, set)):
            return f"`{found}` of {_holder(of)}, {kind}"
    return kind


def _described(record: Record, records: list[Record]) -> str:
    check, of, was = record
    function: Any = getattr(check, "__func__", check)
    if function is names_read.has_same_names:
        of = of[0]
        return f"an attribute of {_holder(of)}"
    if function is names_read.gives_the_same:
        held = names_read.named(of)
        name = _differing(was.items(), held)
        return f"`{name}` of {_holder(of)}"
    if function is names_read.have_same_forwards:
        swapped = next(
            c for c, forward in zip(of, was, strict=True) if names_read.forward_of(c) is not forward
        )
        return f"`forward` of {_holder(swapped)}"
    if function in (Watcher._is_same_module, Watcher._is_same_object):
        held = pytree.attributes_of(of)
        return f"`{_differing(zip(*was, strict=True), held)}` of {_holder(of)}"
    if function is Watcher._is_same_dict:
        return f"{_differing(zip(*was, strict=True), of)!r} in {name_of(of, records)}"
    if isinstance(check, functools.partial):
        return _read(check.args[0], of)
    return name_of(of, records)


def _differing(before: Iterable[tuple[Any, Any]], held: Any) -> Any:
    """Return the first name whose value changed or that is new."""
    known = dict(before)
    for name, value in known.items():
        if held.get(name, names_read.ABSENT) is not value:
            return name
    return next((name for name in held if name not in known), None)


def _read(read: Any, of: Any) -> str:
    if read is names_read.environment:
        return "a variable of the environment"
    if read is names_read.content:
        return "a variable of a closure"
    return f"`{of.name}`, a ContextVar" if hasattr(of, "name") else _a(type(of).__name__)


def _named_values(was: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(was, dict):
        return was.items()
    is_pair = isinstance(was, tuple) and len(was) == 2
    return zip(*was, strict=True) if is_pair and all(isinstance(w, list) for w in was) else ()


def _holder(of: Any) -> str:
    """Return the name of globals, of a Python module or of a class, else an object's class name."""
    if isinstance(of, dict):
        return str(of["__name__"]) if "__name__" in of else "a dict"
    if isinstance(of, type):
        return f"{of.__module__}.{of.__qualname__}"
    return getattr(of, "__name__", None) or _a(type(of).__name__)


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"
