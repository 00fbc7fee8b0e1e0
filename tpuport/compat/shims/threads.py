"""Threads started in a porting context, which are in it too."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from tpuport.compat.emulated.device import default_device, emulated, set_default
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim


class Threads(Shim):
    """A thread runs with the context variables of the one that starts it, and with the device
    emulated in it. Executors start their workers so too.

    Autocast, gradient mode and the modes of torch are each thread's own, as without tpuport.
    """

    TARGET = "threading.Thread.start"
    REASON = "torch's function modes and context variables are of one thread"
    REFERENCE = "contextvars.copy_context().run"
    MODULE = "threading"

    def replacements(self) -> list[Replacement]:
        eager = threading.Thread.start

        def start(self: threading.Thread) -> None:
            if active() is None or "run" in vars(self):
                return eager(self)
            context, device, run = contextvars.copy_context(), default_device(), self.run

            def inside() -> None:
                # Restore the thread's own `run` first, so that no reference cycle is left.
                vars(self).pop("run", None)
                context.run(_emulate, device, run)

            self.run = inside
            return eager(self)

        return [Replacement(threading.Thread, "start", start)]


def _emulate(device: Any, run: Callable[[], None]) -> None:
    with emulated():
        set_default(device)
        run()
