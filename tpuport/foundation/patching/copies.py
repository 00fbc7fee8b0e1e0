"""Copies of functions in other modules, which `from package import function` made there."""

import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any


class CopyIndex:
    """The names in all modules of this process that hold certain functions.

    A process has hundreds of thousands of names in its modules. To look at them takes longer than
    to trace a small model, for many functions hardly longer than for one. So a module is looked
    through again only if its names are more or fewer than before. In `__main__`, where cells of a
    notebook give a name a second value, it is done each time.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._originals: dict[int, Any] = {}
        # The modules' names and theirs. What is there now decides, so that none has to be removed.
        self._places: dict[int, set[tuple[str, str]]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self._num_modules = 0

    def look_for(self, originals: Iterable[Any]) -> int:
        """Find the copies of functions, for which `of` is called next.

        Returns:
            The number of modules that were looked through.
        """
        with self._lock:
            new = {id(one): one for one in originals if id(one) not in self._originals}
            self._originals |= new
            self._places |= {key: set() for key in new}
            self._num_modules, num_looked = len(sys.modules), 0
            for module_name, module in list(sys.modules.items()):
                names = getattr(module, "__dict__", None)
                if type(names) is dict and (new or self._has_changed(module_name, names)):
                    self._look_in(module_name, names)
                    num_looked += 1
            return num_looked

    def _has_changed(self, module_name: str, names: dict[str, Any]) -> bool:
        seen = self._seen.get(module_name)
        return seen != (id(names), len(names)) or module_name == "__main__"

    def _look_in(self, module_name: str, names: dict[str, Any]) -> None:
        self._seen[module_name] = (id(names), len(names))
        if self._originals.keys().isdisjoint(map(id, list(names.values()))):
            return
        for name, value in list(names.items()):
            if id(value) in self._originals:
                self._places[id(value)].add((module_name, name))

    def look_for_new(self, originals: Iterable[Any]) -> None:
        """Find those functions that were not looked for, unless other modules were imported."""
        originals = list(originals)
        is_known = all(id(one) in self._originals for one in originals)
        if not is_known or self._num_modules != len(sys.modules):
            self.look_for(originals)

    def of(self, original: Any) -> Iterator[tuple[Any, str]]:
        """Yield the modules that hold a function, and the name that it has there."""
        self.look_for_new([original])
        for module_name, name in sorted(self._places[id(original)]):
            module = sys.modules.get(module_name)
            if getattr(module, "__dict__", {}).get(name) is original:
                yield module, name


COPIES = CopyIndex()
