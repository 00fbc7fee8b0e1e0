"""Processes that a script starts by `multiprocessing` with the start method "spawn".

Such a process is a new Python: it imports the script again and runs a function of it. Scripts for
CUDA train in one (`mp.spawn(main_worker, nprocs=torch.cuda.device_count())`), as CUDA does not
survive a fork. So it is ported as its parent is, unless it is a worker of a data loader.
"""

import pickle
import threading
import weakref
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tpuport.compat.emulated.settings import PortingSettings

_STARTED: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_ROOT = str(Path(__file__).parents[3])
# It has to be this tpuport, not another one that Python would find; what it imports, as ever.
_CODE = (
    "import sys; sys.path.insert(0, {root!r}); import tpuport; del sys.path[0];"
    " from tpuport.compat.runner.child import main; main({settings!r}, {handles!r})"
)


class _Starting(threading.local):
    """The settings for the process that this thread is starting, if it is to be ported."""

    settings: PortingSettings | None = None


STARTING = _Starting()


def is_ported(process: BaseProcess) -> bool:
    """Return whether a process that is about to start runs code of the user for the device."""
    target = getattr(process, "_target", None)
    module = getattr(target, "__module__", None) or ""
    return not module.startswith(("torch.utils.data.", "multiprocessing.", "concurrent.futures."))


def note_start(process: BaseProcess) -> None:
    """Note that a ported process has started, so that the end of the script waits for it."""
    _STARTED.add(process)


def join_started() -> None:
    """Wait for the ported processes that this one has started, as Python does at its end."""
    for process in list(_STARTED):
        if not process.daemon and process.is_alive():
            process.join()


def command_of(settings: PortingSettings, command: list[str], handles: dict[str, Any]) -> list[str]:
    """Return the command that starts a ported process.

    Args:
        settings: What `porting` is to be called with in it.
        command: The command of `multiprocessing`: Python, its options, `-c`, code, a last word.
        handles: The arguments of `multiprocessing.spawn.spawn_main`.
    """
    options = {
        **{"packages": settings.packages, "paths": settings.paths, "absent": settings.absent},
        **{"eager": settings.eager, "methods": settings.methods, "verify": settings.verify},
        **{"rtol": settings.rtol, "port_modules": settings.port_modules},
        **{"fallback": settings.fallback, "options": settings.options},
    }
    place = command.index("-c") + 1
    code = _CODE.format(root=_ROOT, settings=pickle.dumps(options).hex(), handles=handles)
    return [*command[:place], code, *command[place + 1 :]]


def options_of(text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the arguments of `porting` that `command_of` wrote: packages, and those with names."""
    options = pickle.loads(bytes.fromhex(text))
    packages, more = options.pop("packages"), options.pop("options")
    return packages, {**options, **more}
