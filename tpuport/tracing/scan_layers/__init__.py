"""Repeated blocks: equal ones are one function, and compiled as the body of one loop."""

from tpuport.tracing.scan_layers.block_calls import BlockCalls
from tpuport.tracing.scan_layers.dead_results import without_dead_results
from tpuport.tracing.scan_layers.families import Family, Member, families
from tpuport.tracing.scan_layers.rolling import roll

__all__ = ["BlockCalls", "Family", "Member", "families", "roll", "without_dead_results"]
