"""openpilot's log schema, as the package openpilot-logging ships it, and what reads its logs."""

from typing import Any

from recipes.packages import needed

_LOGS = "openpilot's logs"


def log_schema() -> Any:
    """The Cap'n Proto module of cereal/log.capnp: openpilot's own where it is installed.

    Raises:
        MissingExtraError: openpilot-logging is not installed.
    """
    return needed("openpilot_logging.cereal", _LOGS, "openpilot-logging", "openpilot").log


def capnp() -> Any:
    """The module pycapnp.

    Raises:
        MissingExtraError: it is not installed.
    """
    return needed("capnp", _LOGS, "pycapnp", "openpilot")


def zstandard() -> Any:
    """The module zstandard.

    Raises:
        MissingExtraError: it is not installed.
    """
    return needed("zstandard", "reading rlog.zst", "zstandard", "openpilot")
