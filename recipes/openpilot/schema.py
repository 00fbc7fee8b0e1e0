"""openpilot's log schema, as the package openpilot-logging ships it, and what is missing there."""

import importlib
from functools import cache
from typing import Any

from tpuport.errors import MissingExtraError


@cache
def log_schema() -> Any:
    """The Cap'n Proto module of cereal/log.capnp: openpilot's own where it is installed.

    Raises:
        MissingExtraError: openpilot-logging is not installed.
    """
    try:
        # It makes these modules when it is imported, unseen by type checkers.
        cereal = importlib.import_module("openpilot_logging.cereal")
    except ModuleNotFoundError as error:
        raise MissingExtraError("openpilot's logs", "openpilot-logging", "openpilot") from error
    return cereal.log


@cache
def capnp() -> Any:
    """The module pycapnp.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import capnp
    except ModuleNotFoundError as error:
        raise MissingExtraError("openpilot's logs", "pycapnp", "openpilot") from error
    return capnp


@cache
def zstandard() -> Any:
    """The module zstandard.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise MissingExtraError("reading rlog.zst", "zstandard", "openpilot") from error
    return zstandard


@cache
def av() -> Any:
    """PyAV.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise MissingExtraError("reading and writing video", "av", "openpilot") from error
    return av
