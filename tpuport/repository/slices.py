"""The slices to try for a program, the smallest first."""

from typing import Any

from tpuport.sharding.topology import TOPOLOGIES, find_topology

FIRST_SLICE = "v6e-1"
# Sharding does not divide everything.
_HOPE = 0.5


def next_slice(name: str, compiled: dict[str, Any]) -> str | None:
    """Return the next larger slice of a generation that may hold a program.

    Args:
        name: A slice that does not hold it.
        compiled: What `tpuport compile --json` says of it there, with `memory` in bytes.

    Returns:
        A slice that would hold it if half of the memory were divided among the chips; None if there
        is none.
    """
    now = find_topology(name).num_chips
    memory = compiled["memory"]
    needed = max(float(memory.get("refused") or 0), float(compiled["peak"]))
    there = float(memory["available"]) or 1.0
    family = name.rpartition("-")[0]
    for other in TOPOLOGIES:
        chips = find_topology(other).num_chips
        if other.startswith(f"{family}-") and chips > now:
            if needed * now * _HOPE <= there * chips:
                return other
    return None
