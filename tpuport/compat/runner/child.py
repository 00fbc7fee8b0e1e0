"""A process that a ported script has spawned: `compat/emulated/child_processes.py` starts it."""

from multiprocessing import spawn
from typing import Any

from tpuport.compat.emulated.child_processes import join_started, options_of
from tpuport.compat.porting import porting


def main(settings: str, handles: dict[str, Any]) -> None:
    """Run what `multiprocessing` asks this process to, inside `porting()`, and end.

    Args:
        settings: The arguments of `porting`, as text.
        handles: The arguments of `multiprocessing.spawn.spawn_main`.
    """
    packages, options = options_of(settings)
    with porting(*packages, **options):
        try:
            spawn.spawn_main(**handles)
        finally:
            join_started()
