"""Work of a step: FLOPs, bytes, collectives with their causes, and the time that this takes."""

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tpuport.aot.abstract_model import num_slices
from tpuport.aot.aot import Ahead
from tpuport.aot.records import AttentionUse, Captured, Moved, Product, Work
from tpuport.cost import Chip, chip_of, count_jaxpr, estimate_step, read_compiled
from tpuport.cost.calibration import Calibration, read_calibration
from tpuport.cost.modules import innermost, scope_names
from tpuport.cost.records import Collective, CompiledCost, Dot, Estimate, JaxprCost
from tpuport.cost.schedule import KernelCompileError, UnknownTripsError, schedule_kernels
from tpuport.foundation.interop.name_patterns import generalised
from tpuport.reports import wording
from tpuport.sharding.plan import Row
from tpuport.sharding.shard import OnMesh
from tpuport.sharding.specs import shown

FULL_SCORES = "full scores"
_FLOAT32 = "float32"
_NUM_ROWS = 100


def calibration_for(
    mesh: Any, given: Calibration | str | os.PathLike[str] | None
) -> Calibration | None:
    """Read a calibration, and see that it was measured on the kind of chip of a mesh.

    Raises:
        UsageError: it cannot be read, or was measured on another kind of device.
    """
    if given is None:
        return None
    found = read_calibration(given)
    found.apply(chip_of(mesh.devices.flat[0].device_kind))
    return found


def read_work(
    ahead: Ahead,
    text: str,
    modules: Collection[str],
    placement: OnMesh,
    *,
    kernel_times: bool,
    calibration: Calibration | None = None,
) -> tuple[Work, Estimate | None]:
    """Count the work of a compiled step, and estimate its time.

    Args:
        ahead: the compiled program.
        text: text of its HLO.
        modules: fqns of the user's modules.
        placement: the mesh and the rules, for the causes of collectives.
        kernel_times: whether to compile each Pallas kernel once more, for its schedule; without
            it there is no estimate for a program that has some.
        calibration: rates that were measured on such a chip, instead of the stated ones.
    """
    traced = count_jaxpr(ahead.jaxpr, modules=modules)
    compiled = read_compiled(text, modules=modules)
    work = dataclasses.replace(
        _traced_work(traced),
        chip_flops=compiled.dot_flops,
        hbm_bytes=compiled.hbm_bytes,
        collectives=_collectives(compiled.collectives, placement),
        copied_bytes=compiled.copied_bytes,
        padding_bytes=compiled.padding_bytes,
        unknown=(*traced.unknown, *compiled.unknown),
    )
    if placement.platform != "tpu":
        return work, None
    if num_slices(placement.mesh) > 1:
        more = "what passes between slices, over the data centre's network; a step takes longer"
        work = dataclasses.replace(work, unknown=(*work.unknown, more))
    return _estimated(ahead, work, traced, compiled, placement, kernel_times, calibration)


def read_traced(ahead: Ahead, modules: Collection[str]) -> Work:
    """Count the work of a step that was not compiled, from its traced program."""
    return _traced_work(count_jaxpr(ahead.jaxpr, modules=modules))


def _traced_work(traced: JaxprCost) -> Work:
    return Work(
        model_flops=traced.flops,
        products=_products(traced.dots, lambda dot: ""),
        fp32_products=_products(
            [dot for dot in traced.dots if _FLOAT32 in dot.dtypes],
            lambda dot: generalised(dot.module),
        ),
        attention=_attention(traced),
        unknown=traced.unknown,
    )


def _estimated(
    ahead: Ahead,
    work: Work,
    traced: JaxprCost,
    compiled: CompiledCost,
    placement: OnMesh,
    kernel_times: bool,
    calibration: Calibration | None,
) -> tuple[Work, Estimate | None]:
    devices = placement.mesh.devices
    chip = chip_of(devices.flat[0].device_kind)
    if traced.kernels and not kernel_times:
        return work, None
    try:
        seconds = kernel_seconds(ahead.jaxpr, traced, chip.name, devices.size)
    except (KernelCompileError, UnknownTripsError) as error:
        more = f"the time of kernels, and so of a step: {_reason(error)}"
        return dataclasses.replace(work, unknown=(*work.unknown, more)), None
    stated = _step(chip, work, traced, compiled, seconds)
    if calibration is None:
        return work, stated
    measured = _step(
        calibration.apply(chip),
        *(work, traced, compiled, seconds * (calibration.kernel_factor or 1.0)),
        **_without_none(dense_efficiency=calibration.dense_efficiency),
    )
    told = (
        f"Rates measured on a chip, from {calibration}.",
        f"Without them the estimate is {wording.seconds(stated.seconds)}.",
        *measured.assumptions,
    )
    return work, dataclasses.replace(measured, assumptions=told, calibration=str(calibration))


def _step(
    chip: Chip,
    work: Work,
    traced: JaxprCost,
    compiled: CompiledCost,
    kernel_seconds: float,
    **efficiency: float,
) -> Estimate:
    return estimate_step(
        chip,
        dense_flops=compiled.dot_flops,
        dense_peak=chip.mean_peak(traced.dots),
        hbm_bytes=work.hbm_bytes,
        collectives=compiled.collectives,
        kernel_seconds=kernel_seconds,
        **efficiency,
    )


def _without_none(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _reason(error: Exception) -> str:
    """Return the first line of an error, without its "What to do"."""
    return str(error).splitlines()[0].partition(" What to do:")[0]


def kernel_seconds(jaxpr: Any, traced: JaxprCost, chip: str, num_chips: int) -> float:
    """Return the time of a step's Pallas kernels on one chip, by their schedules."""
    if not traced.kernels:
        return 0.0
    schedules = schedule_kernels(jaxpr, chip).values()
    found = {(one.name, one.grid): one.seconds() for one in schedules}
    missing = {k.name for k in traced.kernels if (k.name, k.grid) not in found}
    if missing:
        raise KernelCompileError(f"no schedule was found for {', '.join(sorted(missing))}")
    return sum(
        found[kernel.name, kernel.grid] * kernel.times / num_chips for kernel in traced.kernels
    )


def _products(dots: Iterable[Dot], place: Callable[[Dot], str]) -> tuple[Product, ...]:
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for dot in dots:
        key = (" x ".join(dot.dtypes), place(dot))
        count, flops = groups.get(key, (0, 0))
        groups[key] = (count + dot.times, flops + dot.flops)
    made = [Product(*key, count, flops) for key, (count, flops) in groups.items()]
    return tuple(sorted(made, key=lambda one: -one.flops)[:_NUM_ROWS])


def _attention(traced: JaxprCost) -> tuple[AttentionUse, ...]:
    groups: dict[tuple[str, str, str], tuple[int, int]] = {}
    for kernel in traced.kernels:
        key = (generalised(kernel.module), kernel.name, "")
        count, total = groups.get(key, (0, 0))
        groups[key] = (count + kernel.times, total)
    smallest = _score_elements(traced)
    for score in traced.scores:
        # Other arrays may end in the same two sizes: a sequence may be as long as a layer is wide.
        if score.dtype != "bool" and math.prod(score.shape) < smallest:
            continue
        shape = f"{score.dtype}{list(score.shape)}"
        key = (generalised(score.module), FULL_SCORES, shape)
        count, total = groups.get(key, (0, 0))
        groups[key] = (count + 1, total + score.bytes)
    made = [AttentionUse(*key, count, total) for key, (count, total) in groups.items()]
    return tuple(sorted(made, key=lambda one: -one.bytes)[:_NUM_ROWS])


def _score_elements(traced: JaxprCost) -> int:
    """Return the elements of the smallest product of queries and keys behind `traced.scores`."""
    ends = {score.shape[-2:] for score in traced.scores}
    found = [
        dot.batch * dot.rows * dot.columns
        for dot in traced.dots
        if dot.batch > 1 and {(dot.rows, dot.columns), (dot.columns, dot.rows)} & ends
    ]
    return min(found, default=0)


def _collectives(found: Iterable[Collective], placement: OnMesh) -> tuple[Moved, ...]:
    groups: dict[tuple[str, str, str, int], tuple[int, int]] = {}
    for one in found:
        rule = cause_of(one, placement)
        key = (one.kind, generalised(one.module), rule, one.group_size)
        count, total = groups.get(key, (0, 0))
        groups[key] = (count + one.times, total + one.bytes * one.times)
    made = [
        Moved(kind, module, rule, count=count, group_size=size, bytes=total)
        for (kind, module, rule, size), (count, total) in groups.items()
    ]
    return tuple(sorted(made, key=lambda one: -one.bytes)[:_NUM_ROWS])


def cause_of(one: Collective, placement: OnMesh) -> str:
    """Return the rule that causes a collective, or "" if that is not clear.

    It is the rule of a weight of its module that is sharded over as many chips as take part; else
    that of the module's activations; else, in the backward pass, that of the sharded batch.
    """
    # In a scan over blocks one module represents those of all blocks.
    module = generalised(one.module)
    rows = [
        row for row in placement.plan.rows if generalised(row.name.rpartition(".")[0]) == module
    ]
    for row in rows:
        # libtpu turns an all-gather that overlaps with a product into permutes around a ring.
        ring = one.kind == "collective-permute"
        if row.axes and (ring or _num_chips(row, placement) == one.group_size):
            return f"{row.rule}: {shown(row.spec)}"
    for side in ("output", "input"):
        spec = placement.rules.activations.spec(one.module, side) if one.module else None
        if spec is not None and any(spec) and not rows:
            return f"{side} of {generalised(one.module)}: {shown(spec)}"
    if rows and "transpose(" in one.operation and placement.rules.inputs:
        rule = placement.rules.inputs[0]
        return f"input {rule.pattern}: {shown(rule.spec)}"
    return ""


def _num_chips(row: Row, placement: OnMesh) -> int:
    count = 1
    for axis in row.axes:
        count *= placement.mesh.shape.get(axis, 1)
    return count


def captured_constants(ahead: Ahead, modules: Collection[str]) -> tuple[Captured, ...]:
    """Return the constants of the host that a traced program holds, the largest first."""
    users: dict[int, str] = {}
    for eqn in ahead.jaxpr.jaxpr.eqns:
        module = innermost(scope_names(eqn.source_info.name_stack), modules)
        for var in eqn.invars:
            users.setdefault(id(var), module)
    found = []
    for var, value in zip(ahead.jaxpr.jaxpr.constvars, ahead.jaxpr.consts, strict=True):
        module = users.get(id(var), "")
        name = f"first used in {module}" if module else "used outside of modules"
        found.append(Captured(name, f"{value.dtype}{list(value.shape)}", int(value.nbytes)))
    return tuple(sorted(found, key=lambda one: -one.bytes))
