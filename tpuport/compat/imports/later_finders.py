"""The finders of `sys.meta_path` that come after one of ours."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def ask_later(
    finder: MetaPathFinder,
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
) -> ModuleSpec | None:
    """Return the spec that the finders after this one have, or None.

    Those before it have been asked already. A program may append finders of its own at any time.
    """
    finders = list(sys.meta_path)
    places = [place for place, one in enumerate(finders) if one is finder]
    for later in finders[places[0] + 1 :] if places else ():
        find = getattr(later, "find_spec", None)
        spec = find(name, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None
