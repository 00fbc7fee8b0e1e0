"""Repeated blocks: traced once, and compiled as the body of one loop."""

from tpuport.model.blocks.alike import Family, Member, families
from tpuport.model.blocks.calls import BlockCalls
from tpuport.model.blocks.roll import roll

__all__ = ["BlockCalls", "Family", "Member", "families", "roll"]
