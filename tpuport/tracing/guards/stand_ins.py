"""What code finds in places outside of the module while it is traced, in place of what is there."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpuport.foundation.pytree.kept_iterators import KeptIterator, is_kept
from tpuport.tracing.guards.code_reads import CodeReads, content


@contextlib.contextmanager
def stood_in(
    code: CodeReads, refusal: Callable[[], Exception], stand_ins: Mapping[int, Any]
) -> Iterator[None]:
    """Let code in the block find what stands for clocks and iterators.

    Args:
        code: where it looks.
        refusal: makes what is raised where it advances an iterator in a global or a closure.
        stand_ins: what stands for functions in defaults, and in lists and dicts of globals, by id.
    """
    iterators: dict[int, KeptIterator] = {}

    def instead(value: Any) -> Any:
        if is_kept(value):
            return iterators.setdefault(id(value), KeptIterator(value, refusal))
        return stand_ins.get(id(value), value)

    with contextlib.ExitStack() as stack:
        for space, name in list(code.places.values()):
            _put(stack, space, name, instead)
            for holder in _containers(space.get(name)):
                for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
                    _put(stack, holder, key, instead)
        for cell in code.cells.values():
            held = content(cell)
            if is_kept(held):
                cell.cell_contents = instead(held)
                stack.callback(setattr, cell, "cell_contents", held)
        for function in code.functions:
            for name in ("__defaults__", "__kwdefaults__"):
                _put_default(stack, function, name, instead)
        yield


def _containers(value: Any) -> list[Any]:
    return [value] if type(value) in (list, dict) and len(value) <= _MOST else []


def _put(stack: contextlib.ExitStack, holder: Any, key: Any, instead: Callable[[Any], Any]) -> None:
    """Put what stands for a value in its place until the stack is closed."""
    held = holder.get(key) if isinstance(holder, dict) else holder[key]
    made = instead(held)
    if made is not held:
        holder[key] = made
        stack.callback(holder.__setitem__, key, held)


def _put_default(
    stack: contextlib.ExitStack, function: Any, name: str, instead: Callable[[Any], Any]
) -> None:
    held = getattr(function, name)
    values = held.values() if isinstance(held, dict) else held or ()
    made = [instead(value) for value in values]
    if any(new is not old for new, old in zip(made, values, strict=True)):
        named = isinstance(held, dict)
        setattr(function, name, dict(zip(held, made, strict=True)) if named else tuple(made))
        stack.callback(setattr, function, name, held)


_MOST = 64
