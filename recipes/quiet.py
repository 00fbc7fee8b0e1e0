"""Suppression of progress bars and warnings of libraries while they read or write."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the progress bars of transformers and diffusers, and warnings about saving."""
    with ExitStack() as stack:
        for logging in _loggers():
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)
        yield


def _loggers() -> list[Any]:
    import importlib
    import importlib.util

    names = [n for n in ("transformers", "diffusers") if importlib.util.find_spec(n) is not None]
    return [importlib.import_module(f"{name}.utils.logging") for name in names]
