"""The cost of a program, read from its jaxpr, its compiled text and its kernels' schedules.

Pure functions: nothing here runs a program, and nothing needs a TPU.
"""

from tpuport.cost.chips import CHIPS, Chip, chip_of
from tpuport.cost.compiled_cost import read_compiled
from tpuport.cost.estimate import collective_seconds, estimate_step
from tpuport.cost.flops import count_jaxpr
from tpuport.cost.records import (
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
from tpuport.cost.schedule import (
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
