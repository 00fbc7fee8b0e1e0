"""Process-wide installation that is shared by all blocks that ask for it."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator


class InForce(ABC):
    """Something installed when the first block enters and uninstalled when the last one leaves."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._contexts = 0

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Keep it installed during the block; blocks may overlap in any order."""
        with self._lock:
            if self._contexts == 0:
                self._install()
            self._contexts += 1
        try:
            yield
        finally:
            with self._lock:
                self._contexts -= 1
                if self._contexts == 0:
                    self._uninstall()

    @abstractmethod
    def _install(self) -> None:
        """Install it, and leave nothing behind on failure."""

    @abstractmethod
    def _uninstall(self) -> None:
        """Uninstall it."""
