"""Results of measurements as a TPU would give them, for tests without one."""

from typing import Any

from tpuport.doctor.finding import Check, Status
from tpuport.doctor.versions import TESTED
from tpuport.measurement.judging import judge
from tpuport.measurement.records import Device, FailedJob, Measurements, Quantity, Result

TPU = Device("tpu", "TPU v6 lite", 8, "v6e", small=False)
CPU = Device("cpu", "cpu", 1, "v5e", small=True)
LINK = 9e10


def rate(job: str, name: str, value: float, expected: float | None, feeds: str = "") -> Result:
    return Result(job, name, Quantity.RATE, value, "B/s", expected, "remark", feeds)


def seconds(job: str, name: str, value: float, expected: float | None, feeds: str = "") -> Result:
    return Result(job, name, Quantity.SECONDS, value, "s", expected, "remark", feeds)


def error(job: str, value: float, limit: float = 2e-2) -> Result:
    return Result(job, job, Quantity.ERROR, value, "", limit, "output of 8 queries")


def links(*values: float) -> list[Result]:
    return [rate("links", f"link {i} - {i + 1}", v, LINK) for i, v in enumerate(values)]


HEALTHY = (
    rate("products", "product, bfloat16", 0.9 * 918e12, 888e12, "dense_efficiency"),
    rate("products", "product, int8", 1.6e15, 1775e12, "int8_ops"),
    rate("memory", "read and write", 1.4e12, 1.638e12, "hbm_bandwidth"),
    rate("memory", "read", 1.5e12, 1.638e12),
    *links(8e10, 8.1e10, 8.2e10),
    seconds("collectives", "all-reduce", 2.5e-3, 2e-3, "ici_link_bandwidth"),
    seconds("collectives", "all-gather", 1.6e-3, 2e-3, "ici_link_bandwidth"),
    error("kernel splash", 4e-3),
    seconds("kernel times", "dense", 1.2e-2, 1e-2, "kernel_factor"),
)


def outcome(
    *results: Result, device: Device | None = TPU, troubles: tuple[FailedJob, ...] = ()
) -> Measurements:
    return Measurements(device, results, troubles, {one.job: 1.5 for one in results})


def findings(found: Measurements, *, has_tpu: bool = True, **versions: str | None) -> list[Check]:
    return list(judge(found, {**TESTED, **versions}, has_tpu=has_tpu))


def not_ok(found: Measurements, **given: Any) -> list[tuple[str, str, str, str | None]]:
    return [
        (one.status.value, one.topic, one.text, one.fix)
        for one in findings(found, **given)
        if one.status is not Status.OK
    ]
