"""Preemption: ending a run in time when its machine is about to be taken away."""

import signal
import threading
from typing import Any, Self

import jax

# 128 + SIGTERM, the convention of shells.
EXIT_STATUS = 143


class Preempted(SystemExit):
    """The run was asked to end (SIGTERM): its state is saved, and the same command resumes it.

    Not caught, the script ends with exit status 143.

    Attributes:
        step: the number of steps taken.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_STATUS)
        self.step = step


class Preemption:
    """A block in which SIGTERM is noticed; a second one ends the process at once.

    JAX's preemption service tells several processes to end after the same step. Outside of the
    main thread nothing is noticed.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._installed, self._asked = False, False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and not _service():
            self._before = signal.signal(signal.SIGTERM, self._notice)
            self._installed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._installed = False

    def _notice(self, number: int, frame: Any) -> None:
        del frame
        self._asked = True
        signal.signal(number, self._before or signal.SIG_DFL)

    @property
    def is_noticed(self) -> bool:
        """Return whether SIGTERM was noticed here; never where JAX tells several processes."""
        return self._asked

    def asked(self, step: int) -> bool:
        """Return whether to save and end after this step; all processes call it once a step."""
        if _service():
            from jax.experimental import multihost_utils

            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked


def _service() -> bool:
    """Return whether JAX's preemption service is running for several processes."""
    from jax._src import distributed  # as multihost_utils does; there is no public way

    return jax.process_count() > 1 and distributed.global_state.preemption_sync_manager is not None
