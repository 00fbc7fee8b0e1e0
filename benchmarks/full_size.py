"""`python -m benchmarks.full_size`: full-size models compiled for slices without hardware.

Writes docs/benchmarks/full_size.json and docs/full_size.md. Each case takes minutes, and up to 5
GiB of memory. `--only` compiles some cases, and keeps the rows of the others. `--quick` compiles
with `quick=True`, for the columns that show its effect.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.full_size_models import Case, hunyuan_video, internvl, llama

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "benchmarks" / "full_size.json"
_PARTS = ("dense", "hbm", "collectives", "kernels")
_TRAINED = "training step, AdamW, bf16, blocks recomputed"

CASES = {
    "llama-v6e": Case(
        "Llama 3.1 8B", f"{_TRAINED}; 16 x 8192 tokens", "v6e-16", lambda: llama(16), {"fsdp": -1}
    ),
    "llama-v5p": Case(
        "Llama 3.1 8B", f"{_TRAINED}; 16 x 8192 tokens", "v5p-32", lambda: llama(16), {"fsdp": -1}
    ),
    "internvl-v6e": Case(
        "like InternVL3-8B",
        f"{_TRAINED}; 16 x 4096 tokens, 13 tiles each",
        "v6e-16",
        lambda: internvl(16),
        {"fsdp": -1},
    ),
    "hunyuan-v6e": Case(
        "HunyuanVideo 1.5, 54 blocks",
        "forward, bf16; 2 x 112,856 tokens (121 frames of 720p)",
        "v6e-8",
        lambda: hunyuan_video(2),
        {"sequence": -1},
        sequence_parallel="ulysses",
    ),
}


def compiled(case: Case, *, quick: bool = False) -> Any:
    """Compile a case and return its report."""
    import tpuport

    ported, options = case.make()
    with tpuport.attention_options(sequence_parallel=case.sequence_parallel):
        return tpuport.compile_for(ported, case.topology, mesh=case.mesh, quick=quick, **options)


def row(case: Case, report: Any) -> dict[str, Any]:
    """Return the fields of a report that the page shows, as JSON."""
    work, estimate = report.work, report.estimate
    kernels = sorted({one.kernel for one in work.attention})
    return {
        "name": case.name,
        "setting": case.setting,
        "topology": case.topology,
        "mesh": {axis: size for axis, size in report.mesh.items() if size > 1},
        "fits": report.fits,
        "available": report.memory.available,
        "peak": report.memory.peak,
        "memory": report.memory.parts(),
        "model_flops": work.model_flops,
        "product_flops": sum(one.flops for one in work.products),
        "chip_flops": work.chip_flops,
        "chips": report.num_chips,
        "collectives": work.bytes_by_kind(),
        "attention": kernels,
        "step": None if estimate is None else {p.name: p.seconds for p in estimate.parts},
        "unknown": list(work.unknown),
        "findings": list(report.findings),
        "seconds": {
            "trace": report.seconds.trace,
            "lower": report.seconds.lower,
            "compile": report.seconds.compile,
        },
    }


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Return the page of these rows."""
    rows = list(rows)
    lines = [
        "# Models at their full size",
        "",
        "Compiled by `tpuport.compile_for` for slices that were not there, without weights:"
        " `python -m benchmarks.full_size`.",
        "",
        "| model | what | slice, mesh | fits | peak a chip | compile | `quick=True` |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        mesh = " ".join(f"{axis}={size}" for axis, size in one["mesh"].items())
        share = one["peak"] / one["available"]
        lines.append(
            f"| {one['name']} | {one['setting']} | {one['topology']}, {mesh} |"
            f" {'yes' if one['fits'] else 'no'} | {_gib(one['peak'])} GiB, {share:.0%} |"
            f" {one['seconds']['compile']:.0f} s | {_quickly(one)} |"
        )
    lines += [
        "",
        "| model | parameters, optimizer, temporaries | sent in a step, a chip | attention |",
        "|---|---|---|---|",
    ]
    for one in rows:
        held = " + ".join(
            _gib(one["memory"][part]) for part in ("parameters", "optimizer", "temporaries")
        )
        sent = ", ".join(f"{kind} {_gib(size)}" for kind, size in one["collectives"].items())
        name = f"{one['name']}, {one['topology']}"
        lines.append(f"| {name} | {held} GiB | {sent} GiB | {_attention(one)} |")
    lines += [
        "",
        "| model | PFLOP a step | products: chips / model | a step, estimated"
        " | dense | hbm | collectives | kernels |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        lines.append(_time_row(one))
    lines += [
        "",
        "The estimate adds the parts up: nothing overlaps in it. Products: 1.00 means that no chip"
        " computes what another one does, too; what is computed",
        "again for the backward pass is in both. Compile times are those of two cores that other"
        " work was using, too.",
        "",
        "Taken with "
        + ", ".join(f"{name} {version}" for name, version in machine.versions().items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def _quickly(one: dict[str, Any]) -> str:
    """Return the time and the results of compiling a case with `quick=True`."""
    if "quick" not in one:
        return "?"
    quick = one["quick"]
    seconds = quick["seconds"]["compile"]
    return f"{seconds:.0f} s: {_gib(quick['peak'])} GiB, {_step(quick)} a step"


def _step(one: dict[str, Any]) -> str:
    """Return the estimate for a step."""
    parts = one["step"] or {}
    # The sum is unknown if the time of a part could not be read.
    return f"{sum(parts.values()):.2f} s" if set(_PARTS) <= set(parts) else "?"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def _attention(one: dict[str, Any]) -> str:
    scores = [kernel for kernel in one["attention"] if kernel == "full scores"]
    if scores:
        return "an array of scores"
    # `splash_mha_fwd_residuals` and `splash_mha_dq_no_residuals` are one kind.
    return ", ".join(sorted({kernel.partition("_")[0] for kernel in one["attention"]})) or "none"


def _time_row(one: dict[str, Any]) -> str:
    products = one["chip_flops"] * one["chips"] / max(1, one["product_flops"])
    parts = one["step"] or {}
    cells = [f"{parts[name]:.2f} s" if name in parts else "?" for name in _PARTS]
    return (
        f"| {one['name']}, {one['topology']} | {one['model_flops'] / 1e15:.2f} | {products:.2f}"
        f" | {_step(one)} | {' | '.join(cells)} |"
    )


def add(name: str, rows: dict[str, Any], say: Callable[[str], None], *, quick: bool) -> None:
    """Compile a case, and put the result into its row."""
    report = compiled(CASES[name], quick=quick)
    say(str(report))
    found = row(CASES[name], report)
    if not quick:
        rows[name] = {**found, **{k: v for k, v in rows.get(name, {}).items() if k == "quick"}}
    elif name in rows:
        rows[name]["quick"] = {key: found[key] for key in ("peak", "step", "seconds")}
    else:
        say(f"{name} has no row yet: compile it without --quick first")


def main() -> None:
    """Compile, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="compile with quick=True")
    options = parser.parse_args()
    for name in options.only:
        rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        add(name, rows, print, quick=options.quick)
        ordered = {known: rows[known] for known in CASES if known in rows}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        (DOCS / "full_size.md").write_text(page(ordered.values()), encoding="utf-8")


if __name__ == "__main__":
    main()
