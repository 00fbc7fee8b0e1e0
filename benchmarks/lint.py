"""`python -m benchmarks.lint PATH`: speed of linting, next to other linters that are installed.

Writes docs/lint_speed.md. Every time is CPU or wall seconds as a multiple of one `ast.parse` and
one walk over the same files on one core, measured before and after in the same run.
"""

import argparse
import ast
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine

PAGE = Path(__file__).parent.parent / "docs" / "lint_speed.md"
LIMIT = 900


@dataclass(frozen=True)
class Run:
    """The cost of one command.

    Attributes:
        name: Name of the command.
        wall: Seconds until it ended, or None if it did not within the limit.
        cpu: CPU seconds of its processes.
        memory: Peak memory of its largest process, in MiB.
    """

    name: str
    wall: float | None
    cpu: float
    memory: float


def parse_and_walk(files: Sequence[Path]) -> float:
    """Return the CPU seconds of parsing and walking files once, in this process."""
    texts = [path.read_text(encoding="utf-8") for path in files]
    start = time.process_time()
    for text in texts:
        for _ in ast.walk(ast.parse(text)):
            pass
    return time.process_time() - start


def measure(
    name: str,
    command: Sequence[str],
    *,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> Run:
    """Return the medians of several runs of a command.

    Args:
        name: Name of the run.
        command: The command. Any exit code is accepted, since linters find something.
        rounds: Number of runs.
        before: Called before each run.
    """
    walls: list[float] = []
    cpus: list[float] = []
    memory = 0.0
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wall, cpu, peak = _wait(process, start)
        except TimeoutError:
            return Run(name, None, 0.0, 0.0)
        walls.append(wall)
        cpus.append(cpu)
        memory = max(memory, peak)
    return Run(name, statistics.median(walls), statistics.median(cpus), memory)


def _wait(process: "subprocess.Popen[bytes]", start: float) -> tuple[float, float, float]:
    """Return wall and CPU seconds and the peak MiB of a process and those that it waited for.

    Raises:
        TimeoutError: It did not end within the limit, and was killed.
    """
    while True:
        pid, _, usage = os.wait4(process.pid, os.WNOHANG)
        wall = time.perf_counter() - start
        if pid:
            process.returncode = 0  # it has been waited for
            return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        if wall > LIMIT:
            process.kill()
            process.wait()
            raise TimeoutError
        time.sleep(0.005)


def contestants(path: Path, folder: Path, others: dict[str, str | None]) -> list[Run]:
    """Measure every contestant: ours cold and warm, then the other linters."""
    config, cache = folder / "pyproject.toml", folder / "cache"
    config.write_text(f'[tool.tpuport]\ncache-dir = "{cache}"\n', encoding="utf-8")
    ours = [sys.executable, "-c", "from tpuport.cli.app import app; app()", "lint", str(path)]
    ours += ["--config", str(config), "--exit-zero", "--quiet"]

    def forget() -> None:
        shutil.rmtree(cache, ignore_errors=True)

    runs = [
        measure("tpuport lint, one process", [*ours, "--jobs", "1", "--no-cache"], rounds=3),
        measure("tpuport lint, cold", ours, rounds=3, before=forget),
        measure("tpuport lint, warm", ours, rounds=3),
    ]
    if ruff := others["ruff"]:
        command = [ruff, "check", "--isolated", "--no-cache", "--exit-zero", str(path)]
        runs.append(measure("ruff, default rules", command, rounds=3))
    if flake8 := others["flake8"]:
        command = [flake8, "--isolated", "--jobs", "2", "--exit-zero", str(path)]
        runs.append(
            measure("flake8, default rules", [*command, "--extend-ignore", "TOR"], rounds=1)
        )
        runs.append(measure("TorchFix in flake8", [*command, "--select", "TOR"], rounds=1))
    return runs


def page(path: Path, files: Sequence[Path], base: float, runs: Sequence[Run]) -> str:
    """Return the page that shows the runs."""
    lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
    known = machine.describe()
    described = f"{known['system']}, {known['processor']}, {known['cores']} cores"
    rows = [
        f"| {run.name} | {_times(run.wall, base)} | {_times(run.cpu or None, base)} |"
        f" {f'{run.memory:.0f} MiB' if run.wall is not None else ''} |"
        for run in runs
    ]
    return "\n".join(
        [
            "# How fast linting is",
            "",
            "Written by `python -m benchmarks.lint`; do not edit.",
            "",
            f"Over {len(files)} files with {lines:,} lines ({path.parent.name}/{path.name}), on"
            f" {described}. Each number is a multiple of what",
            "one `ast.parse` and one walk over the same files take on one core. Warm means that",
            "the answers for unchanged files come from the cache.",
            "",
            "| | wall time | CPU time | largest process |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _times(seconds: float | None, base: float) -> str:
    return f"did not end in {LIMIT} s" if seconds is None else f"{seconds / base:.2f}x"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lint", description=__doc__)
    parser.add_argument("path", type=Path, help="a folder of Python files")
    for name in ("ruff", "flake8"):
        found = shutil.which(name)
        parser.add_argument(f"--{name}", default=found, help=f"the command (default: {found})")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args()
    files = sorted(options.path.rglob("*.py"))
    others = {"ruff": options.ruff, "flake8": options.flake8}
    bases = [parse_and_walk(files)]
    with tempfile.TemporaryDirectory() as folder:
        runs = contestants(options.path, Path(folder), others)
    bases.append(parse_and_walk(files))
    base = statistics.mean(bases)
    text = page(options.path, files, base, runs)
    options.out.write_text(text, encoding="utf-8")
    print(f"{text}\nparse and walk: {base:.2f} s; {os.cpu_count()} cores\nwrote {options.out}")


if __name__ == "__main__":
    main()
