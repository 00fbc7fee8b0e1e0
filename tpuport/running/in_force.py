"""Something that is in force once a process, for as long as any block asks for it."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator


class InForce(ABC):
    """Installed with the first block that enters, taken back with the last that leaves."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._contexts = 0

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Have it in force in the block; blocks may overlap in any order."""
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
        """Put it in force; leaves nothing if it fails."""

    @abstractmethod
    def _uninstall(self) -> None:
        """Take it back."""
