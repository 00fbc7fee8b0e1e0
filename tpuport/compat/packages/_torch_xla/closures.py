"""`torch_xla.utils.closures`: functions that wait for the end of a step."""

import abc
from collections.abc import Callable, Iterable
from typing import Any


class ClosureHandler(abc.ABC):
    """A runner of closures."""

    @abc.abstractmethod
    def run(self, closure: Callable[[], Any]) -> None:
        """Run a closure."""

    def run_all(self, closures: Iterable[Callable[[], Any]]) -> None:
        """Run closures in their order."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """A runner of closures in this thread: results are there already, so nothing would wait."""

    def __init__(self, max_queue_size: int = 100) -> None:
        del max_queue_size

    def run(self, closure: Callable[[], Any]) -> None:
        closure()
