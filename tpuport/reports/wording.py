"""The wording of a port report's numbers, names and verdict, the same for a terminal and HTML."""

from tpuport.foundation.reporting.markup import plural
from tpuport.reports.data import ReportData
from tpuport.reports.records import (
    KINDS,
    AttentionCall,
    Divergence,
    HostPart,
    Parity,
    RepeatedBlocks,
)


def number(value: float) -> str:
    """Return at most three significant digits: `0`, `12.3`, `2.1e-6`, `nan`."""
    if value == 0 or not 0 < abs(value) < float("inf"):
        return f"{value:g}"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def element(value: float) -> str:
    """Return a tensor element with the digits that tell two nearly equal ones apart."""
    return f"{value:.9g}"


def seconds(value: float) -> str:
    """Return a duration such as `3 ms`, `1.2 s`, `2 min 5 s`."""
    if value < 1:
        return f"{value * 1e3:.0f} ms" if value >= 1e-3 or value == 0 else "<1 ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def count(value: int) -> str:
    """Return a count such as `812`, `12,345`, `1.24 M`, `8.33 B`."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,}"


def size(num_bytes: int) -> str:
    """Return a size such as `512 B`, `1.5 KiB`, `31.0 GiB`."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def tera(flops: float) -> str:
    """Return FLOPs in units of 10**12: `0.0687`, `135`, `7,241`."""
    amount = flops / 1e12
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def array(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a dtype and shape such as `float32[2, 16]`."""
    return f"{dtype}{list(shape)}"


def short_path(path: str) -> str:
    """Return the part of a path that a reader needs: from the package on, or the last three."""
    _, found, package_path = path.rpartition("site-packages/")
    if found:
        return package_path
    parts = path.split("/")
    return path if len(parts) <= 4 else "/".join(parts[-3:])


def place(file: str, line: int) -> str:
    """Return a place such as `package/file.py:12`."""
    return f"{short_path(file)}:{line}"


def headline(report: ReportData) -> str:
    """Return the verdict as one sentence that starts with the model's name."""
    if report.verdict == "agrees":
        return f"{report.model} agrees with eager PyTorch"
    if report.verdict == "not verified":
        return f"{report.model} has not been verified against eager PyTorch"
    return f"{report.model} does not agree with eager PyTorch"


def explanation(report: ReportData) -> str:
    """Return the reasons for the verdict: how many values were compared, and the worst."""
    sentences = []
    worst = report.worst
    if worst is not None:
        failed = sum(not p.ok for p in report.parity)
        within = f"{failed:,} of them out of tolerance" if failed else "all within tolerance"
        sentences.append(f"{plural(len(report.parity), 'value')} compared, {within}.")
        sentences.append(worst_value(worst))
        sentences += _turned(report)
    for reason in _reasons(report):
        sentences.append(f"{reason[:1].upper()}{reason[1:].rstrip('.')}.")
    return " ".join(sentences)


def _turned(report: ReportData) -> list[str]:
    taken = [parity.turned for parity in report.parity if parity.turned]
    if not taken:
        return []
    values, decisions = plural(len(taken), "value"), plural(max(taken), "decision")
    return [
        f"Eager PyTorch takes up to {decisions} as the port does where {values} of these are"
        " compared: rounding turned them, as it may the sign that a ReLU sees."
    ]


def _reasons(report: ReportData) -> list[str]:
    if report.verdict == "agrees":
        return []
    if report.why_not_verified:
        return [report.why_not_verified]
    return [] if report.parity else ["No value has been compared"]


def worst_value(worst: Parity) -> str:
    """Return the worst value in a sentence, against its tolerance."""
    if worst.problem:
        return f"The worst is {worst.path}: {worst.problem}."
    if worst.used == 0:
        return "Every value is identical."
    error = f"The worst is {worst.path}, {number(worst.max_rel)} relative"
    if worst.is_rounding:
        return f"{error}, which is rounding: {from_float64(worst)}."
    found = from_float64(worst)
    return f"{error} where {number(worst.tolerance)} is allowed{found and f'; {found}'}."


def from_float64(parity: Parity) -> str:
    """Return how far eager PyTorch and the port are from eager PyTorch in float64, if known."""
    if parity.eager_error is None or parity.port_error is None:
        return ""
    eager, port = number(parity.eager_error), number(parity.port_error)
    said = f"from its result in float64, eager PyTorch is {eager} away and the port {port}"
    taken = f", with {plural(parity.turned, 'decision')} of rounding taken as the port does"
    return said + (taken if parity.turned else "")


def error_and_limit(parity: Parity) -> tuple[str, str]:
    """Return the error and its limit: relative, or from float64 where that accepted it."""
    if parity.is_rounding and parity.port_error is not None and parity.rounding:
        limit = parity.port_error / parity.rounding
        return f"{number(parity.port_error)} abs", f"{number(limit)} abs"
    return number(parity.max_rel), number(parity.tolerance)


def worst_element(parity: Parity) -> str:
    """Return both sides at the worst element, or why there are not two sides."""
    if parity.problem:
        return parity.problem
    if parity.used == 0:
        return "identical"
    at = f" at {list(parity.where)}" if parity.where else ""
    return f"{element(parity.got)} where eager PyTorch gives {element(parity.expected)}{at}"


def by_kind(parity: list[Parity]) -> dict[str, list[Parity]]:
    """Return the compared values by kind, in the order outputs, gradients, buffers, arguments."""
    groups = {kind: [p for p in parity if p.kind == kind] for kind in KINDS}
    return {kind: group for kind, group in groups.items() if group}


def divergence(found: Divergence) -> str:
    """Return a sentence about the submodule where the first difference appears."""
    return (
        f"The first submodule that differs is {found.module} ({found.cls}): its inputs agree to "
        f"{number(found.input_max_rel)}, its output is off by {number(found.max_rel)}."
    )


def attention(call: AttentionCall) -> str:
    """Return the kernel and shapes: `splash: queries [2, 16, 512, 128], 54 calls`."""
    shapes = f"queries {list(call.query)}, keys {list(call.key)}"
    return f"{call.kernel}: {shapes}, {plural(call.calls, 'call')}"


def attention_detail(call: AttentionCall) -> str:
    """Return why the kernel was chosen, the mask, how it is spread, and the call's place."""
    module = f"first {call.module}" if call.module else ""
    mask = f"mask: {call.mask}" if call.mask else ""
    parts = (call.reason, mask, call.spread, module, place(call.file, call.line))
    return " · ".join(part for part in parts if part)


def blocks(found: RepeatedBlocks) -> str:
    """Return which blocks are alike: `layers.0 to layers.31, 32 blocks`."""
    return f"{found.first} to {found.last}, {plural(found.count, 'block')}"


def blocks_detail(found: RepeatedBlocks) -> str:
    """Return how many programs the calls of the blocks are."""
    calls = plural(found.programs + found.shared, "call")
    return f"{calls}, {plural(found.programs, 'program')}"


def host(part: HostPart) -> str:
    """Return what a part that runs on the host costs: `Matcher.forward, 3 calls, 0.2 s, 1.0 MB`."""
    runs = plural(part.calls, "call")
    if part.backward_calls:
        runs += f" and {plural(part.backward_calls, 'gradient')}"
    return f"{part.name}, {runs}, {seconds(part.seconds)}, {size(part.bytes)} moved"


def host_detail(part: HostPart) -> str:
    """Return why a part runs on the host, and its place."""
    return f"{part.reason} · {place(part.file, part.line)}"


def facts(report: ReportData) -> list[str]:
    """Return the file and size of the model's class."""
    found = [short_path(report.class_file)] if report.class_file else []
    for noun, num, num_bytes in (
        ("parameter", report.num_parameters, report.parameter_bytes),
        ("buffer element", report.num_buffers, report.buffer_bytes),
    ):
        if num:
            found.append(f"{count(num)} {noun}{'' if num == 1 else 's'} ({size(num_bytes)})")
    return found


def versions(report: ReportData) -> list[str]:
    """Return package versions such as `torch 2.13.0`."""
    return [f"{name} {version}" for name, version in report.versions.items()]
