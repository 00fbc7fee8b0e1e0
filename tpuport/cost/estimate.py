"""The estimated time of a step: dense products, memory, collectives and kernels in sequence."""

from collections.abc import Iterable

from tpuport.cost.chips import Chip
from tpuport.cost.records import Collective, Estimate, Part
from tpuport.foundation.errors import UsageError

# The share that libtpu schedules for a large bf16 product on v6e: 507,000 of 524,288 FLOP a bundle.
DENSE_EFFICIENCY = 0.967


def collective_seconds(chip: Chip, collective: Collective) -> float:
    """Return the time of all runs of one collective in a slice, with the links to itself.

    A chip at the corner of a slice has two links, so the bytes through a chip are limited by two
    (one in a group of two). For an array of V bytes in a group of n chips those bytes are
    V (n-1)/n for all-gather and reduce-scatter, twice that for all-reduce, and V over one link for
    collective-permute. In an all-to-all, half of the chips send half of their data to the other
    half: n V / 4 over the links across the middle of the group. The group is assumed to be as near
    to a square (a cube) as powers of two allow and to have no wrap-around: two links on 2 by 4
    chips.
    Source: "How to Scale Your Model", jax-ml.github.io/scaling-book/sharding.
    """
    num, size = collective.group_size, collective.bytes * collective.times
    link = chip.ici_link_bandwidth
    if num <= 1:
        return 0.0
    if collective.kind == "collective-permute":
        return size / link
    through = size * (num - 1) / num / (link if num == 2 else 2 * link)
    if collective.kind == "all-reduce":
        return 2 * through
    if collective.kind == "all-to-all":
        return max(through, num * size / 4 / (_links_across(num, chip.ici_dims) * link))
    return through


def _links_across(num: int, dims: int) -> float:
    """Return the links across the middle of a group: its chips over those of its longest side."""
    side = 1
    while side**dims < num:
        side *= 2
    return max(1.0, num / side)


def estimate_step(
    chip: Chip,
    *,
    dense_flops: float,
    hbm_bytes: float,
    collectives: Iterable[Collective],
    kernel_seconds: float,
    dense_efficiency: float = DENSE_EFFICIENCY,
    dense_peak: float | None = None,
) -> Estimate:
    """Estimate the seconds of a step on one chip, without any overlap of its parts.

    Args:
        chip: the chip that the step runs on.
        dense_flops: FLOPs of products outside of kernels, on one chip, repeated work included.
        hbm_bytes: bytes read and written outside of kernels, on one chip.
        collectives: collectives of a step.
        kernel_seconds: time of the kernels, from their schedules.
        dense_peak: peak FLOP a second of products outside of kernels; that of bf16 by default.
        dense_efficiency: share of the peak that products outside of kernels reach.

    Raises:
        UsageError: the efficiency is not within 0 to 1.
    """
    if not 0 < dense_efficiency <= 1:
        raise UsageError(
            "dense_efficiency is a share of the peak, above 0 and at most 1, not"
            f" {dense_efficiency}"
        )
    listed = list(collectives)
    gib = sum(one.bytes * one.times for one in listed) / 2**30
    peak = dense_peak or chip.bf16_flops
    parts = (
        Part(
            "dense",
            dense_flops / (peak * dense_efficiency),
            f"{dense_flops / 1e12:.4g} TFLOP at {dense_efficiency:.1%} of"
            f" {peak / 1e12:.0f} TFLOP/s",
        ),
        Part(
            "hbm",
            hbm_bytes / chip.hbm_bandwidth,
            f"{hbm_bytes / 1e12:.3g} TB at {chip.hbm_bandwidth / 1e12:.2f} TB/s",
        ),
        Part(
            "collectives",
            sum(collective_seconds(chip, one) for one in listed),
            f"{gib:.3g} GiB over links of {chip.ici_link_bandwidth / 1e9:.0f} GB/s each way",
        ),
        Part("kernels", kernel_seconds, "bundles of their schedules, one a cycle"),
    )
    return Estimate(
        parts,
        (
            "The parts run one after another: nothing overlaps.",
            f"Products reach {dense_efficiency:.1%} of the peak"
            + (
                ", which is what libtpu schedules for a large one."
                if dense_efficiency == DENSE_EFFICIENCY
                else "."
            ),
            "Each byte of HBM traffic that XLA counts is moved once, at"
            f" {chip.hbm_bandwidth / 1e12:.2f} TB/s.",
            "A collective stays within a slice and has two links of each chip to itself.",
            "Kernels do not stall: their data is there when they need it.",
        ),
    )
