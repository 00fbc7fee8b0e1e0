"""What the results of a run mean: findings with remedies, and rates to calibrate with."""

import math
from collections.abc import Iterator, Mapping
from statistics import geometric_mean, median
from typing import Any

from tpuport.cost.calibration import Calibration
from tpuport.cost.chips import CHIPS
from tpuport.doctor.checks import explain_refusal
from tpuport.doctor.finding import Check, note, ok, problem
from tpuport.doctor.versions import TESTED
from tpuport.foundation.reporting.markup import plural
from tpuport.measurement.records import FailedJob, Measurements, Quantity, Result
from tpuport.reports import wording as fmt

# A link or a rate below this share of what it should be is worth a look.
SLOW = 0.5
# And one above this share: then the cost model is wrong.
_FAST = 1.5
_OUR_FAULT = "attach the page to an issue of tpuport"

Versions = Mapping[str, str | None]


def judge(outcome: Measurements, versions: Versions, *, has_tpu: bool) -> Iterator[Check]:
    """Yield the findings, the most serious kinds first.

    Args:
        outcome: What was measured.
        versions: Installed versions by package.
        has_tpu: Whether the machine has the device file of a TPU.
    """
    yield from _devices(outcome, has_tpu=has_tpu)
    yield from _libtpu(outcome, versions)
    for trouble in outcome.troubles:
        yield _trouble(trouble, versions, outcome)
    for result in outcome.results:
        if result.kind is Quantity.ERROR:
            yield _error(result)
    if outcome.device is not None and not outcome.device.small:
        yield from _links(outcome)
        for result in outcome.results:
            yield from _speed(result)


def _devices(outcome: Measurements, *, has_tpu: bool) -> Iterator[Check]:
    device = outcome.device
    if device is None:
        return
    text = f"{device.count} x {device.kind} ({device.platform})"
    if has_tpu and device.platform != "tpu":
        more = "this machine has a TPU that jax does not use"
        yield problem("devices", f"{text}, and {more}", "unset JAX_PLATFORMS; tpuport doctor")
    elif device.small:
        yield note("devices", f"{text}: jax has no TPU or GPU, so every speed below is meaningless")
    elif not device.chip:
        yield note("devices", f"{text}: the cost model knows TPUs only, so nothing is expected")
    else:
        yield ok("devices", text)


def _libtpu(outcome: Measurements, versions: Versions) -> Iterator[Check]:
    if outcome.device is not None and outcome.device.platform == "tpu" and _is_other(versions):
        text = f"{versions.get('libtpu')}; tpuport is tested with {TESTED['libtpu']}"
        yield note("libtpu", text, _RIGHT_LIBTPU)


_RIGHT_LIBTPU = f"pip install libtpu=={TESTED['libtpu']}"


def _is_other(versions: Versions) -> bool:
    have = versions.get("libtpu")
    return have is not None and have != TESTED["libtpu"]


def _trouble(trouble: FailedJob, versions: Versions, outcome: Measurements) -> Check:
    """Say what failed, with libtpu's version if that explains it."""
    if trouble.job == "devices" and not trouble.fix:
        text, fix = explain_refusal(trouble.text)
        if _blames_libtpu(trouble.text, text) and _is_other(versions):
            return problem(trouble.job, trouble.text, _RIGHT_LIBTPU)
        return problem(trouble.job, text, fix)
    on_tpu = outcome.device is not None and outcome.device.platform == "tpu"
    if on_tpu and not trouble.fix and _is_other(versions):
        text = f"{trouble.text}; libtpu {versions['libtpu']} is not the one that is tested"
        return problem(trouble.job, text, _RIGHT_LIBTPU)
    if not trouble.fix and "What to do: " in trouble.text:
        text, _, fix = trouble.text.partition(" What to do: ")
        return problem(trouble.job, text, fix)
    return problem(trouble.job, trouble.text, trouble.fix or _OUR_FAULT)


def _blames_libtpu(error: str, explained: str) -> bool:
    """Return whether another version of libtpu is a likely cause of a refusal."""
    named = any(word in error for word in ("libtpu", "PJRT", "Mosaic"))
    return named and "held by another process" not in explained


def _error(result: Result) -> Check:
    limit = result.expected or 0.0
    words = f"{result.name}: {shown(result.value, result)} where {fmt.number(limit)} is allowed"
    if result.value <= limit:
        return ok(result.job, words)
    fix = _OUR_FAULT
    if result.job.startswith("kernel"):
        fix = "tpuport.attention_options(kernel='full') until it is mended; " + _OUR_FAULT
    return problem(result.job, f"differs: {words} ({result.remark})", fix)


def _links(outcome: Measurements) -> Iterator[Check]:
    """Yield the links that are slow beside the others, or beside what is stated."""
    found = [one for one in outcome.results if one.job == "links"]
    if not found:
        return
    usual = median(one.value for one in found)
    slow = [one for one in found if one.value < SLOW * max(usual, one.expected or 0.0)]
    for one in slow:
        text = f"{one.name} carries {rate(one.value)}, the median is {rate(usual)}"
        text += f", and {rate(one.expected)} is stated" if one.expected else ""
        yield problem("links", text, "measure again; if it stays, have the machine replaced")
    if not slow:
        yield ok("links", f"{plural(len(found), 'link')}, {rate(usual)} in the middle")


def _speed(result: Result) -> Iterator[Check]:
    """Yield a note where the cost model is far from what was measured."""
    ratio = result.ratio
    if ratio is None or result.job == "links" or SLOW <= ratio <= _FAST:
        return
    text = f"{result.name}: {shown(result.value, result)}, where {expectation(result)} is expected"
    yield note(result.job, text)


def calibrate(outcome: Measurements, measured_at: str, versions: Versions) -> Calibration | None:
    """Return the rates that the estimate of a step takes; None without devices."""
    device = outcome.device
    if device is None:
        return None
    chip = CHIPS.get(device.chip)
    rates: dict[str, Any] = {}
    if chip is not None:
        rates = {
            "dense_efficiency": _share(_best(outcome, "dense_efficiency"), chip.bf16_flops),
            "int8_ops": _best(outcome, "int8_ops"),
            "hbm_bandwidth": _best(outcome, "hbm_bandwidth"),
            "ici_link_bandwidth": _times(
                chip.ici_link_bandwidth, _mean_ratio(outcome, "ici_link_bandwidth")
            ),
            "kernel_factor": _inverse(_mean_ratio(outcome, "kernel_factor")),
        }
    known = {name: version for name, version in versions.items() if version and name in _NAMED}
    return Calibration(
        device.kind, device.platform, device.count, measured_at, versions=known, **rates
    )


_NAMED = ("jax", "libtpu")


def _best(outcome: Measurements, name: str) -> float | None:
    return max((one.value for one in outcome.results if one.feeds == name), default=None)


def _mean_ratio(outcome: Measurements, name: str) -> float | None:
    ratios = [one.ratio for one in outcome.results if one.feeds == name and one.ratio]
    return geometric_mean(ratios) if ratios else None


def _share(value: float | None, whole: float) -> float | None:
    # A clock that runs a little faster than it is stated to must not make more than all.
    return None if value is None else min(1.0, value / whole)


def _times(value: float, factor: float | None) -> float | None:
    return None if factor is None else value * factor


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


def rate(value: float) -> str:
    """Return a rate of bytes: `812 GB/s`."""
    return scaled(value, "B/s")


def scaled(value: float, unit: str) -> str:
    """Return a rate with the prefix that fits: `1.6 Pop/s`."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def shown(value: float, result: Result) -> str:
    """Return a number of a result in its unit."""
    if result.kind is Quantity.ERROR:
        return fmt.number(value) if math.isfinite(value) else "not a number"
    if result.kind is Quantity.RATE:
        return scaled(value, result.unit)
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if math.isfinite(value) else str(value)


def expectation(result: Result) -> str:
    """Return what was expected of a result in its unit, "" if nothing was."""
    return "" if result.expected is None else shown(result.expected, result)
