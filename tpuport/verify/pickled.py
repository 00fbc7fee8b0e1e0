"""Files of `torch.save` that hold objects of the script, read without code of the script."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals


class PickledObject:
    """What stands for an object, class or function of the script: it keeps what it is given."""

    args: Any
    state: Any
    items: dict[Any, Any]
    parts: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "PickledObject":
        """Make one; pickle does not call `__init__`."""
        made = super().__new__(cls)
        made.args, made.state, made.items, made.parts = args or kwargs, None, {}, []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> "PickledObject":
        """Return what stands for the result of a call."""
        return PickledObject(self, *args, **kwargs)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """Keep an element of a list."""
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        """Keep elements of a list."""
        self.parts.extend(values)

    @property
    def content(self) -> dict[str, Any]:
        """Return all that it was given."""
        kept = {"": self.state, "args": self.args, "items": self.items, "parts": self.parts}
        return {name: value for name, value in kept.items() if value}


class _Unpickler(pickle.Unpickler):
    """An unpickler that takes from modules only what `torch.load(weights_only=True)` does."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = _get_allowed_globals().get(f"{module_name}.{global_name}")
        if known is not None:
            return known
        return type(global_name, (PickledObject,), {"__module__": module_name})


def load_pickled(path: Path) -> Any:
    """Return what a file of `torch.save` holds, with `PickledObject` for what is not torch's.

    A file that holds a whole module names its class, which only the script can import, and which
    must not run here.
    """
    reader = SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__=__name__)
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()
