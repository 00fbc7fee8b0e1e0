"""Packages that only some commands of the recipes need, imported on first use."""

import importlib
from functools import cache
from typing import Any

from tpuport.foundation.errors import MissingExtraError


@cache
def needed(module: str, feature: str, package: str, extra: str) -> Any:
    """Import and return a module.

    Args:
        module: Name of the module.
        feature: The feature that needs it, for the message.
        package: Name of the package for pip.
        extra: The extra of tpuport that includes it.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(feature, package, extra) from error


def av() -> Any:
    """Import and return PyAV.

    Raises:
        MissingExtraError: It is not installed.
    """
    return needed("av", "reading and writing video", "av", "recipes")
