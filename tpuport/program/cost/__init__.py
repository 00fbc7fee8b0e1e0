"""What a program costs, read from its jaxpr, its compiled text and its kernels' schedules.

Pure functions: nothing here runs a program, and nothing needs a TPU.
"""

from tpuport.program.cost.chips import CHIPS, Chip, chip_of
from tpuport.program.cost.records import (
    Buffer,
    Collective,
    CompiledCost,
    Constant,
    Custom,
    Dot,
    Estimate,
    JaxprCost,
    Kernel,
    ModuleCost,
    Part,
    ScoreArray,
)

__all__ = [
    "CHIPS",
    "Buffer",
    "Chip",
    "Collective",
    "CompiledCost",
    "Constant",
    "Custom",
    "Dot",
    "Estimate",
    "JaxprCost",
    "Kernel",
    "ModuleCost",
    "Part",
    "ScoreArray",
    "chip_of",
]
