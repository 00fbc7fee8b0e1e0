"""A function named on the command line: `package.module:function` or `file.py:function`."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tpuport.foundation.errors import UsageError


def load_target(target: str) -> Callable[[], Any]:
    """Import the module or the file, and return the function.

    The current folder, or that of the file, comes first on the path of imports, as for a script.

    Raises:
        UsageError: it is of another form, or there is no such module, file or function.
    """
    home, _, name = target.rpartition(":")
    if not home or not name.isidentifier():
        raise UsageError(
            f"{target}: expected package.module:function or file.py:function, such as"
            " serving/programs.py:programs"
        )
    module = _from_file(Path(home)) if home.endswith(".py") else _from_name(home)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{home} has no function {name}")
    return function


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    _put_first(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    # As for an imported module: dataclasses and pickle look it up there.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    _put_first(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if the module itself is missing, not one that it imports.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UsageError(f"there is no module {name}") from None


def _put_first(folder: str) -> None:
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
