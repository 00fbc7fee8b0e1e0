"""Suggestions for a program that does not fit, the most effective first."""

import dataclasses
from collections.abc import Iterator

from tpuport.aot.records import AttentionUse
from tpuport.aot.report import CompileReport
from tpuport.aot.work import FULL_SCORES
from tpuport.cost.chips import chip_of
from tpuport.foundation.errors import UsageError
from tpuport.reports import wording as fmt
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.topology import TOPOLOGIES, find_topology

# State that takes this many times an even share is not sharded well.
_UNEVEN = 1.5
# The share of a chip's memory that an estimate for a larger slice may fill.
_ROOM = 0.8
# An optimizer's state below this share of the memory is not worth advice.
_COUNTS = 0.05


def advise(report: CompileReport, plan: ShardingPlan, *, recomputes: bool) -> CompileReport:
    """Return the report with its advice, the most effective first.

    The figures are those of this program: each suggestion can be tried alone, or all of them by
    `search`.

    Args:
        report: report of a program that does not fit.
        plan: sharding plan of its rules.
        recomputes: whether the backward pass recomputes blocks already.
    """
    return dataclasses.replace(report, advice=tuple(_advice(report, plan, recomputes)))


def _advice(report: CompileReport, plan: ShardingPlan, recomputes: bool) -> Iterator[str]:
    yield from _spread_state(report, plan)
    yield from _scores(report)
    yield from _dtypes(report, plan)
    memory = report.memory
    left = memory.available - memory.state
    needed = memory.peak - memory.state
    if needed > left > 0:
        yield from _activations(report, left, needed, recomputes)
    counts = memory.optimizer > _COUNTS * memory.available
    if counts and report.optimizer != "adafactor":
        yield (
            f"an optimizer with less state: {report.optimizer or 'it'} takes"
            f" {fmt.size(memory.optimizer)} a chip; optimizer='adafactor' keeps row and column sums"
        )
    yield from _larger_slice(report, plan)


def _whole_state(report: CompileReport, plan: ShardingPlan) -> int:
    """Return the bytes of the unsharded state, each array counted once."""
    memory = report.memory
    held = memory.parameters + memory.buffers
    return round(plan.num_bytes * memory.state / max(1, held))


def _spread_state(report: CompileReport, plan: ShardingPlan) -> Iterator[str]:
    memory, chips = report.memory, report.num_chips
    share = _whole_state(report, plan) // chips
    if chips > 1 and memory.state > _UNEVEN * share:
        whole = "parameters and the optimizer's state" if memory.optimizer else "parameters"
        yield (
            f"spread {whole} over all {chips} chips: rules='fsdp' with mesh={{'fsdp': {chips}}}"
            f" holds about {fmt.size(share)} a chip instead of {fmt.size(memory.state)}"
        )


def _scores(report: CompileReport) -> Iterator[str]:
    full: list[AttentionUse] = []
    if report.work is not None:
        full = [one for one in report.work.attention if one.kernel == FULL_SCORES]
    if full:
        total = sum(one.bytes for one in full)
        yield (
            f"attention without the array of scores: {full[0].shape} in"
            f" {full[0].module or 'the model'} is one of {sum(one.count for one in full)},"
            f" {fmt.size(total)} on all chips. Have F.scaled_dot_product_attention compute it"
            " (attn_implementation='sdpa'), which a kernel serves on TPU"
        )


def _dtypes(report: CompileReport, plan: ShardingPlan) -> Iterator[str]:
    wide = sum(row.bytes_a_chip for row in plan.rows if row.dtype == "float32")
    if wide > plan.bytes_a_chip / 2:
        less = wide // 2 + (report.memory.optimizer // 2)
        state = f"{fmt.size(less)} less a chip for state, and " if less > 1 << 20 else ""
        yield (
            "weights in bfloat16, with policy=lambda ported: tpuport.cast(ported, 'bf16'):"
            f" {state}half of what is kept of activations"
        )


def _activations(report: CompileReport, left: int, needed: int, recomputes: bool) -> Iterator[str]:
    share = left / needed
    if report.what == "training step" and not recomputes:
        yield (
            "compute blocks again in the backward pass instead of keeping what is in them:"
            " tpuport.remat(ported, 'full') in the same policy= ('dots' keeps products)"
        )
    if report.num_chips > 1 and report.mesh.get("sequence", 1) == 1:
        yield (
            "spread the tokens, too: rules='sequence_parallel' with a mesh that has a sequence"
            f" axis, such as mesh={{'fsdp': {report.num_chips // 2}, 'sequence': 2}}"
        )
    yield (
        f"a smaller batch: temporaries take {fmt.size(needed)} and {fmt.size(left)} are left for"
        f" them, so about {share:.0%} of the batch would fit if they grow with it (gradients can be"
        " accumulated over parts)"
    )


def _larger_slice(report: CompileReport, plan: ShardingPlan) -> Iterator[str]:
    """Suggest the smallest slice of these chips that would hold the state and all other memory."""
    try:
        family = chip_of(report.device).name
    except UsageError:
        return
    memory = report.memory
    rest = max(0, memory.peak - memory.state)
    whole = _whole_state(report, plan) + rest * report.num_chips
    for name in TOPOLOGIES:
        chips = find_topology(name).num_chips
        if not name.startswith(f"{family}-") or chips <= report.num_chips:
            continue
        if whole / chips <= _ROOM * memory.available:
            yield (
                f"a larger slice: on {name} everything divided by {chips} chips would be"
                f" {fmt.size(whole // chips)} a chip"
            )
            return
