"""What torch_xla keeps for the process: whether it is used, its modes, closures and counters."""

import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from tpuport.compat.emulated.programs import PortWarning
from tpuport.compat.emulated.settings import active
from tpuport.foundation.interop.device_mark import CUDA, XLA, show_device
from tpuport.foundation.interop.seen_device import set_seen_device
from tpuport.tracing.core.errors import port_error


@dataclass
class XlaState:
    """The state of torch_xla in this process.

    Attributes:
        is_used: Whether code has imported it.
        is_spmd: Whether `use_spmd()` was called.
        is_eager: What `eager_mode` was last told.
        splits_batches: Whether a launched function has all devices: its batches are split.
        counts: Counters by name, since the last `clear_counters()`.
        closures: Closures to run at the next step boundary.
        global_mesh: The mesh that `set_global_mesh` was given.
        environment: Variables that were set here, with their values before.
        tracer_marked_step: Whether a `StepTrace` marks the step that runs.
        left_out: A line of the user's code that asked for torch_xla and was given none.
    """

    is_used: bool = False
    is_spmd: bool = False
    is_eager: bool = False
    splits_batches: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    closures: list[Callable[[], Any]] = field(default_factory=list)
    global_mesh: Any = None
    environment: dict[str, str | None] = field(default_factory=dict)
    tracer_marked_step: bool = False
    left_out: str | None = None

    def leave_out(self, frame: FrameType) -> None:
        """Remember an import that is not answered, if it is not a library's."""
        file = frame.f_code.co_filename
        if {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
            self.left_out = f"{file}:{frame.f_lineno}"


STATE = XlaState()

# Settings of torch_xla's own runtime and compiler, by why they mean nothing here.
_WITHOUT_MEANING = {
    "XLA_DISABLE_FUNCTIONALIZATION": "programs are always functional",
    "XLA_USE_EAGER_DEBUG_MODE": "what is no module call runs in eager PyTorch anyway",
    "XLA_NO_SPECIAL_SCALARS": "jax decides which numbers are constants",
    "XLA_SYNC_WAIT": "results are waited for where they are read",
}
# Those that would change numbers.
_REFUSED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16")
_CACHES = ("XLACACHE_PATH", "XLA_PERSISTENT_CACHE_PATH")


def is_set(name: str) -> bool:
    """Return whether an environment variable says yes, as torch_xla reads it."""
    value = os.environ.get(name, "")
    return value == "true" or (value.isdigit() and int(value) > 0)


def begin() -> None:
    """Show the accelerator as "xla:0", and read the environment.

    Raises:
        PortError: a variable would change numbers, or there are several processes.
    """
    if jax.process_count() > 1:
        raise port_error(
            f"torch_xla was imported in one of {jax.process_count()} processes, and inside tpuport"
            " only one is served",
            remedy="start one process, which drives all devices of the host",
        )
    for name in _REFUSED:
        if is_set(name):
            raise port_error(
                f"{name}={os.environ[name]} is set, which stores float32 tensors in 16 bits behind"
                " the program's back",
                remedy="unset it, and use torch_xla.amp.autocast or model.to(torch.bfloat16)",
            )
    STATE.is_used = True
    STATE.is_spmd = is_set("XLA_USE_SPMD")
    show_device(XLA)
    set_seen_device(XLA)
    for name, reason in _WITHOUT_MEANING.items():
        if is_set(name):
            _say(f"{name} has no effect: {reason}")
    for name in _CACHES:
        if os.environ.get(name):
            _say(f"{name} has no effect: tpuport run --cache-dir {os.environ[name]} keeps programs")
    wanted, found = os.environ.get("PJRT_DEVICE", "").split("_")[0], jax.default_backend().upper()
    if wanted and wanted != found:
        _say(f"PJRT_DEVICE={wanted}, but jax has a {found}: programs run there")


def end() -> None:
    """Forget everything, and show the accelerator as "cuda:0" again."""
    from tpuport.compat.emulated import spread

    show_device(CUDA)
    spread.clear()
    for name, before in STATE.environment.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    STATE.__init__()


def _say(text: str) -> None:
    warnings.warn(f"torch_xla: {text}", PortWarning, stacklevel=2)


def set_variable(name: str, value: str) -> None:
    """Set an environment variable until the block ends."""
    STATE.environment.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def count(name: str) -> None:
    """Count a call of torch_xla."""
    STATE.counts[name] += 1


def mark_step() -> None:
    """Count a step boundary, which changes nothing here, and run the closures that wait for it."""
    count("MarkStep")
    settings = active()
    if settings is not None:
        settings.report.step_marks += 1
    waiting, STATE.closures = STATE.closures, []
    for closure in waiting:
        closure()
