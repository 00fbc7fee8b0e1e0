"""Packages that only some of the recipes' commands need: imported when they are first used."""

import importlib
from functools import cache
from typing import Any

from tpuport.errors import MissingExtraError


@cache
def needed(module: str, feature: str, package: str, extra: str) -> Any:
    """A module.

    Args:
        module: its name.
        feature: what needs it.
        package: what pip calls it.
        extra: the extra of tpuport that brings it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(feature, package, extra) from error


def av() -> Any:
    """PyAV.

    Raises:
        MissingExtraError: it is not installed.
    """
    return needed("av", "reading and writing video", "av", "recipes")
