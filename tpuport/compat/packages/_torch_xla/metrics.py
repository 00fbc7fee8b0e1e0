"""`torch_xla.debug.metrics`: tpuport's own counters, under torch_xla's names where it has them."""

from collections import Counter
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.compat.packages._torch_xla.state import STATE

# What the counters of the block's programs said at the last `clear_counters()`, and how many
# compilations were over at the last `clear_metrics()`.
_BEFORE: Counter[str] = Counter()
_CLEARED = {"compilations": 0}


def _programs() -> list[Any]:
    settings = active()
    return [] if settings is None else settings.report.programs


def _of_programs() -> Counter[str]:
    """Return the counters of the programs: each trace is a graph that was compiled."""
    settings = active()
    calls = 0 if settings is None else settings.calls.counts.total()
    return Counter(UncachedCompile=traces(), CachedCompile=max(0, calls - traces()))


def traces() -> int:
    """Return the number of programs that were traced so far."""
    settings = active()
    return 0 if settings is None else settings.calls.traces


def _counters() -> dict[str, int]:
    found = _of_programs()
    # A new block has a new report.
    since = {name: n - _BEFORE[name] if n >= _BEFORE[name] else n for name, n in found.items()}
    return {name: n for name, n in {**since, **STATE.counts}.items() if n}


# From here on, each function is named and called as in torch_xla.


def counter_names() -> list[str]:
    """Return the names of the counters that are not 0."""
    return list(_counters())


def counter_value(name: str) -> int | None:
    """Return the value of a counter, None if there is none of that name."""
    return _counters().get(name)


def clear_counters() -> None:
    """Count from 0."""
    STATE.counts.clear()
    _BEFORE.clear()
    _BEFORE.update(_of_programs())


def metric_names() -> list[str]:
    """Return the names of the metrics that have samples."""
    return ["CompileTime"] if _compilations() else []


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """Return the number of samples, their sum and a list of (time, value).

    There is `CompileTime`, in nanoseconds, with a sample for each module that became a program;
    times are not kept and are 0.
    """
    found = _compilations() if name == "CompileTime" else []
    return (len(found), sum(found), [(0.0, one) for one in found]) if found else None


def _compilations() -> list[float]:
    spent = [(r.timing.trace + r.timing.lower + r.timing.compile) * 1e9 for r in _programs()]
    return spent[_CLEARED["compilations"] :]


def clear_metrics() -> None:
    """Forget the samples."""
    _CLEARED["compilations"] = len(_programs())


def clear_all() -> None:
    """Forget the samples, and count from 0."""
    clear_metrics()
    clear_counters()


def metrics_report() -> str:
    """Return the counters and metrics as text."""
    return short_metrics_report(counter_names(), metric_names())


def short_metrics_report(counter_names: Any = None, metric_names: Any = None) -> str:
    """Return some counters and metrics as text."""
    lines = []
    for name in metric_names or ["CompileTime"]:
        data = metric_data(name)
        if data is not None:
            lines += [
                f"Metric: {name}",
                f"  TotalSamples: {data[0]}",
                f"  Accumulator: {data[1] / 1e9:.3f}s",
            ]
    for name in counter_names or ["CachedCompile", "MarkStep"]:
        value = counter_value(name)
        if value is not None:
            lines += [f"Counter: {name}", f"  Value: {value}"]
    return "".join(f"{line}\n" for line in lines)


def executed_fallback_ops() -> list[str]:
    """Return the names of modules that could not be one program, and ran as their parts."""
    settings = active()
    return [] if settings is None else [one.what for one in settings.report.descended]


def end() -> None:
    """Forget what a block left."""
    _BEFORE.clear()
    _CLEARED["compilations"] = 0
