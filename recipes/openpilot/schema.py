"""openpilot's log schema from the package openpilot-logging, and packages for its logs."""

from typing import Any

from recipes.packages import needed

_LOGS = "openpilot's logs"


def log_schema() -> Any:
    """Return the Cap'n Proto module of cereal/log.capnp, openpilot's own if it is installed.

    Raises:
        MissingExtraError: openpilot-logging is not installed.
    """
    return needed("openpilot_logging.cereal", _LOGS, "openpilot-logging", "openpilot").log


def capnp() -> Any:
    """Return the module pycapnp.

    Raises:
        MissingExtraError: It is not installed.
    """
    return needed("capnp", _LOGS, "pycapnp", "openpilot")


def zstandard() -> Any:
    """Return the module zstandard.

    Raises:
        MissingExtraError: It is not installed.
    """
    return needed("zstandard", "reading rlog.zst", "zstandard", "openpilot")
