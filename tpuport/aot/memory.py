"""Memory of a compiled program on one chip, by category and by module."""

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.aot.aot import Ahead
from tpuport.aot.records import HeldMemory, Memory
from tpuport.cost.chips import chip_of
from tpuport.cost.hlo.liveness import live_at_peak, parameter_bytes
from tpuport.cost.hlo.parser import HloProgram
from tpuport.cost.kernels import sub_jaxprs
from tpuport.cost.modules import innermost, operation_names, scope_names
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.name_patterns import generalised

_GIB = 1 << 30
# GiB that libtpu 0.0.42 leaves to programs: it keeps a part of the HBM for itself.
_AVAILABLE = {"v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
_CATEGORY = {
    "params": "parameters",
    "optimizer": "optimizer",
    "ema": "averages",
    "buffers": "buffers",
    "frozen": "buffers",
}
_NUM_HELD = 100
OPTIMIZER = "optimizer"


def available_bytes(device: Any) -> int:
    """Return the HBM of a device that a program may use; 0 if the device is unknown (a CPU)."""
    if device.platform != "tpu":
        return 0
    try:
        chip = chip_of(device.device_kind)
    except UsageError:
        return 0
    return round(_AVAILABLE.get(chip.name, chip.hbm_bytes / _GIB) * _GIB)


def read_memory(ahead: Ahead, program: HloProgram | None, device: Any) -> Memory:
    """Return the bytes of each category, on one chip.

    Args:
        ahead: program that was compiled, or refused.
        program: its compiled text; None if it was refused.
        device: one of the devices that it is compiled for.
    """
    held: dict[str, int] = dict.fromkeys((*_CATEGORY.values(), "inputs"), 0)
    for name, shape in zip(ahead.names, ahead.shapes, strict=True):
        argument = re.split(r"\W", name, maxsplit=1)[0]
        held[_CATEGORY.get(argument, "inputs")] += bytes_a_chip(shape)
    there = available_bytes(device)
    if ahead.too_large is not None:
        wanted, there = ahead.too_large.wanted, ahead.too_large.available
        rest = max(0, wanted - sum(held.values()))
        return Memory(there, **held, temporaries=rest, refused=wanted)
    stats = ahead.compiled.memory_analysis()
    padding = 0
    if program is not None:
        padding = sum(padded - plain for plain, padded in parameter_bytes(program).values())
    return Memory(
        there or stats.peak_memory_in_bytes,
        **held,
        padding=padding,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        host=stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes,
    )


def bytes_a_chip(shape: jax.ShapeDtypeStruct) -> int:
    """Return the bytes that one chip holds of an array, without padding."""
    sharding = shape.sharding
    dims = shape.shape if sharding is None else sharding.shard_shape(shape.shape)
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return 8 * math.prod(dims)
    return math.prod(dims) * shape.dtype.itemsize


def held_at_peak(program: HloProgram, modules: Collection[str]) -> tuple[HeldMemory, ...]:
    """Return the temporaries of a program at their peak, similar ones grouped."""
    found = []
    for live in live_at_peak(program):
        module, operation = _place(live.op_name or live.opcode, modules)
        if live.is_carried and not module:
            operation = "carried by a loop"
        found.append((module, operation, live.shape, live.bytes))
    return _grouped(found)


def listed_by_compiler(largest: Any, modules: Collection[str]) -> tuple[HeldMemory, ...]:
    """Group the buffers that libtpu lists in its message about a program that does not fit."""
    return _grouped((*_place(name, modules), shape, size) for size, shape, name in largest)


def largest_computed(jaxpr: Any, modules: Collection[str]) -> tuple[HeldMemory, ...]:
    """Return the largest arrays that a traced program computes, on all chips together.

    These may have to be held, if the compiler says nothing more. Arrays of one shape in one module
    are grouped, whatever computes them.
    """
    found: list[tuple[str, str, int]] = []
    _visit(jaxpr.jaxpr, (), modules, found)
    return _grouped((module, "", shape, size) for module, shape, size in found)


def _visit(jaxpr: Any, around: tuple[str, ...], modules: Collection[str], found: list) -> None:
    for eqn in jaxpr.eqns:
        names = around + scope_names(eqn.source_info.name_stack)
        inner = list(sub_jaxprs(eqn))
        for one in inner:
            _visit(one, names, modules, found)
        for var in () if inner else eqn.outvars:
            dims = getattr(var.aval, "shape", ())
            if not dims or not hasattr(var.aval.dtype, "itemsize"):
                continue
            size = math.prod(dims) * var.aval.dtype.itemsize
            module = innermost(names, modules) or _outside(names)
            shape = f"{var.aval.dtype}{list(dims)}"
            found.append((module, shape, size))


def _place(op_name: str, modules: Collection[str]) -> tuple[str, str]:
    """Return the module of an operation, and its name with `backward` for one of a gradient."""
    names = operation_names(op_name)
    operation = op_name.rpartition("/")[2]
    backward = " backward" if "transpose(" in op_name else ""
    return innermost(names, modules) or _outside(names), f"{operation}{backward}"


def _outside(names: Iterable[str]) -> str:
    """Name the place of an operation that is in no module: the optimizer, or ""."""
    return OPTIMIZER if OPTIMIZER in names else ""


def _grouped(found: Iterable[tuple[str, str, str, int]]) -> tuple[HeldMemory, ...]:
    groups: dict[tuple[str, str, str], tuple[int, int]] = {}
    for module, operation, shape, size in found:
        key = (generalised(module), operation, shape)
        count, total = groups.get(key, (0, 0))
        groups[key] = (count + 1, total + size)
    held = [HeldMemory(*key, count, total) for key, (count, total) in groups.items()]
    return tuple(sorted(held, key=lambda one: -one.bytes)[:_NUM_HELD])
