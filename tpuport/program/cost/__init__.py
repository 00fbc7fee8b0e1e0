"""The cost of a program, read from its jaxpr, its compiled text and its kernels' schedules.

Pure functions: nothing here runs a program, and nothing needs a TPU.
"""

from tpuport.program.cost.chips import CHIPS, Chip, chip_of
from tpuport.program.cost.estimate import collective_seconds, estimate_step
from tpuport.program.cost.flops import count_jaxpr
from tpuport.program.cost.hlo import read_compiled
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
from tpuport.program.cost.schedule import (
    KernelCompileError,
    KernelSchedule,
    schedule_function,
    schedule_kernels,
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
    "KernelCompileError",
    "KernelSchedule",
    "ModuleCost",
    "Part",
    "ScoreArray",
    "chip_of",
    "collective_seconds",
    "count_jaxpr",
    "estimate_step",
    "read_compiled",
    "schedule_function",
    "schedule_kernels",
]
