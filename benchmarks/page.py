"""The tables of docs/benchmarks.md, made from the results and put between its markers."""

from pathlib import Path
from typing import Any

from benchmarks.contestants import COMPILED, EAGER, HAND, PLAIN

_AGAINST = (PLAIN, HAND, EAGER, COMPILED)


def update(page: Path, results: dict[str, Any]) -> None:
    """Put the tables of these results into a page that has the markers."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables(results).items():
        text = replaced(text, name, table)
    page.write_text(text, encoding="utf-8")


def replaced(text: str, name: str, content: str) -> str:
    """Return the text with `content` between the two markers of a name.

    Raises:
        ValueError: The text has no such markers.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        msg = f"Expected the markers {start.strip()} and {end} in the page, one of them is missing."
        raise ValueError(msg)
    return f"{before}{start}{content}\n{end}{after}"


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return each table as Markdown, by the name of its markers."""
    return {
        "setting": _setting(results),
        "steps": _steps(results),
        "staging": _staging(results),
        "programs": _programs(results),
        "depth": _depth(results),
        "calls": _calls(results),
    }


def _setting(results: dict[str, Any]) -> str:
    machine = results["machine"]
    cores = f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"Taken on {machine['system']}, {machine['processor']}, {cores},"
        f" {machine['memory_gib']} GiB; {versions}.",
    ]
    lines += [
        f"Not measured: {one['what']}, because {one['reason']}." for one in results["skipped"]
    ]
    return "\n".join(lines)


def _steps(results: dict[str, Any]) -> str:
    rows = {(r["model"], r["what"], r["against"]): r for r in results["step"]}
    lines = [_head("model", "step", *(f"against {name}" for name in _AGAINST))]
    for model, what in dict.fromkeys((r["model"], r["what"]) for r in results["step"]):
        found = [rows.get((model, what, name)) for name in _AGAINST]
        cells = ["" if r is None else f"{r['cpu']:.2f} ({r['median']:.2f})" for r in found]
        lines.append(_row(model, what, *cells))
    return "\n".join(lines)


def _staging(results: dict[str, Any]) -> str:
    chosen = [r for r in results["staging"] if r["against"] == PLAIN]
    rows = {(r["model"], r["what"], r["stage"]): r["median"] for r in chosen}
    stages = ("trace", "lower", "trace and lower", "compile", "first result")
    lines = [_head("model", "step", *stages)]
    for model, what in dict.fromkeys((r["model"], r["what"]) for r in chosen):
        found = [rows.get((model, what, stage)) for stage in stages]
        lines.append(
            _row(model, what, *("" if value is None else f"{value:.2f}" for value in found))
        )
    return "\n".join(lines)


def _programs(results: dict[str, Any]) -> str:
    names = ("instructions", "flops", "temporary_memory")
    lines = [_head("model", "step", "against", *(name.replace("_", " ") for name in names))]
    for row in results["program"]:
        cells = (f"{row[name]:.3f}" for name in names)
        lines.append(_row(row["model"], row["what"], row["against"], *cells))
    return "\n".join(lines)


def _depth(results: dict[str, Any]) -> str:
    stages = list(dict.fromkeys(row["stage"] for row in results["depth"]))
    rows = {(r["layers"], r["who"], r["stage"]): r["time"] for r in results["depth"]}
    lines = [_head("layers", "", *stages)]
    for layers, who in dict.fromkeys((r["layers"], r["who"]) for r in results["depth"]):
        lines.append(_row(str(layers), who, *(f"{rows[layers, who, s]:.2f}" for s in stages)))
    return "\n".join(lines)


def _calls(results: dict[str, Any]) -> str:
    lines = [_head("call", "CPU time", "wall time")]
    lines += [
        _row(f"`{r['call']}`", f"{r['cpu']:.1f}", f"{r['median']:.1f}") for r in results["calls"]
    ]
    return "\n".join(lines)


def _head(*names: str) -> str:
    return f"{_row(*names)}\n{_row(*('---' for _ in names))}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
