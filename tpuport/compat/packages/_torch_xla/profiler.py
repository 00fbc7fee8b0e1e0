"""`torch_xla.debug.profiler`, by jax's profiler."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from tpuport.compat.packages._torch_xla.state import STATE, mark_step

# From here on, each function is named and called as in torch_xla.


def get_tracer_marked_step() -> bool:
    """Return whether a `StepTrace` marks the step that runs."""
    return STATE.tracer_marked_step


def set_tracer_marked_step(value: bool) -> None:
    """Say whether a `StepTrace` marks the step that runs."""
    STATE.tracer_marked_step = value


def start_server(port: int, only_on_master: bool = True) -> Any:
    """Start jax's profiler server."""
    del only_on_master
    return jax.profiler.start_server(port)


def trace(service_addr: str, logdir: str, duration_ms: int = 1000, **options: Any) -> None:
    """Record this process for some time; `service_addr` has to be its own server."""
    del service_addr, options
    jax.profiler.start_trace(logdir)
    try:
        time.sleep(duration_ms / 1000)
    finally:
        jax.profiler.stop_trace()


def trace_detached(*args: Any, **kwargs: Any) -> None:
    """Do as `trace` does, in a thread."""
    threading.Thread(target=trace, args=args, kwargs=kwargs, daemon=True).start()


def start_trace(log_dir: Any) -> None:
    """Begin to record this process."""
    jax.profiler.start_trace(str(log_dir))


def stop_trace() -> None:
    """Write what was recorded."""
    jax.profiler.stop_trace()


class NamedTrace(contextlib.AbstractContextManager[None]):
    """A block with a name in the recording and in programs traced in it; torch_xla's `Trace`."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        self.name = name
        self._blocks = contextlib.ExitStack()
        self._arguments = kwargs

    def __enter__(self) -> None:
        self._blocks.enter_context(jax.profiler.TraceAnnotation(self.name, **self._arguments))
        self._blocks.enter_context(jax.named_scope(self.name))

    def __exit__(self, *error: Any) -> None:
        self._blocks.close()


class StepTrace(NamedTrace):
    """A block that is a step: it ends with a step boundary."""

    def __enter__(self) -> None:
        STATE.tracer_marked_step = True
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        mark_step()
        super().__exit__(*error)


def trace_me(scope: str) -> Callable[..., Any]:
    """Return a decorator that gives the calls of a function a name."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with NamedTrace(scope):
                return function(*args, **kwargs)

        return call

    return decorated
