"""Processes that are spawned in a porting context, which are ported too."""

from multiprocessing import spawn
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any

from tpuport.compat.emulated.child_processes import STARTING, command_of, is_ported, note_start
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim


class ChildProcesses(Shim):
    """A spawned process enters `porting()` with the settings of the context that starts it.

    Workers of data loaders and pools run plain Python, as do forked processes, which have what
    their parent has.
    """

    TARGET = "multiprocessing.popen_spawn_posix.Popen, multiprocessing.spawn.get_command_line"
    REASON = "a new Python knows nothing of the context, and would run the script without a device"
    REFERENCE = "the same function called in the parent"
    MODULE = "multiprocessing"

    def replacements(self) -> list[Replacement]:
        launch_eager: Any = Popen._launch  # pyright: ignore[reportAttributeAccessIssue]
        command_eager: Any = spawn.get_command_line

        def launch(self: Popen, process_obj: BaseProcess) -> None:
            settings = active()
            if settings is None or not is_ported(process_obj):
                return launch_eager(self, process_obj)
            STARTING.settings = settings
            try:
                launch_eager(self, process_obj)
            finally:
                STARTING.settings = None
            note_start(process_obj)

        def get_command_line(**kwds: Any) -> list[str]:
            command, settings = command_eager(**kwds), STARTING.settings
            if settings is None or "-c" not in command:
                return command
            return command_of(settings, command, kwds)

        return [
            Replacement(Popen, "_launch", launch),
            Replacement(spawn, "get_command_line", get_command_line),
        ]
