"""Tests newer releases of torch, torchax and jax: what works with the pinned ones only.

`make try-newer` makes two environments in `build/newer`, one with the versions of constraints.txt
and one in which the packages below are the newest, and runs the same tests in both. Nothing of
`.venv` changes. It takes an hour, and gigabytes of disk.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FREED = ("torch", "torchax", "jax", "jaxlib", "libtpu")
# The tests that notice most of what a newer version changes.
TESTS = ("tests/exactness", "tests/model", "tests/training", "tests/zoo", "tests/running")
_OUTCOME = re.compile(r"^(FAILED|ERROR) (\S+)")


# XLA ends the process at a flag that it does not know, and the one of jaxlib 0.11 lacks this one.
_EMITTERS = "xla_cpu_use_fusion_emitters"


def fusion_emitters(*, used: bool) -> dict[str, Any]:
    """Return XLA's option for its newer emitters of loops; nothing where jaxlib has none."""
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    return {_EMITTERS: used} if (int(major), int(minor)) < (0, 11) else {}


def without_emitters() -> list[str]:
    """Return what turns them off in `XLA_FLAGS`."""
    return [f"--{name}=false" for name in fusion_emitters(used=False)]


@dataclass(frozen=True)
class Tried:
    """What one environment came to: its versions, and the tests that failed in it."""

    versions: dict[str, str]
    failed: frozenset[str]


def freed(constraints: str, names: Sequence[str] = FREED) -> str:
    """Return constraints without those of some packages."""
    lines = constraints.splitlines()
    return "\n".join(one for one in lines if one.partition("==")[0] not in names) + "\n"


def failures(output: str) -> frozenset[str]:
    """Return the tests that pytest names as failed, without their messages."""
    found = (_OUTCOME.match(line) for line in output.splitlines())
    return frozenset(match[2] for match in found if match)


def compared(pinned: Tried, newer: Tried) -> str:
    """Return which versions differ, and which tests fail with the newer ones only."""
    lines = []
    for name, version in newer.versions.items():
        before = pinned.versions.get(name, "nothing")
        lines.append(f"{name}: {before}" + (f" -> {version}" if before != version else ""))
    broken = sorted(newer.failed - pinned.failed)
    mended = sorted(pinned.failed - newer.failed)
    lines += [f"broken: {name}" for name in broken] or ["nothing broke"]
    lines += [f"mended: {name}" for name in mended]
    return "\n".join(lines)


def try_versions(folder: Path, constraints: str, tests: Sequence[str], pre: bool) -> Tried:
    """Make an environment, install the package into it, and run tests."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    file = folder / "constraints.txt"
    file.write_text(constraints)
    # Without the upper bounds of the package: they are what is tried.
    wanted = [*(f"{name}" for name in FREED), "numpy", "optax", "safetensors"]
    install = [python, "-m", "pip", "install", "--quiet", "-c", file]
    subprocess.run([*install, *(["--pre"] if pre else []), *wanted], check=True)
    subprocess.run([*install, "-e", f"{ROOT}[recipes,train,dev]"], check=True)
    code = (
        "import importlib.metadata as m, json;"
        f"print(json.dumps({{n: m.version(n) for n in {FREED!r}}}))"
    )
    shown = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    command = [python, "-m", "pytest", "-q", "-W", "default", "-rfE", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    return Tried(json.loads(shown.stdout), failures(done.stdout))


def main() -> None:
    """Try both environments, and print how they differ; the exit code is 1 if something broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pre", action="store_true", help="Nightly builds too.")
    parser.add_argument("tests", nargs="*", default=TESTS, help="Tests to run.")
    given = parser.parse_args()
    pins = (ROOT / "constraints.txt").read_text()
    folder = ROOT / "build/newer"
    pinned = try_versions(folder / "pinned", pins, given.tests, pre=True)
    newer = try_versions(folder / "newest", freed(pins), given.tests, pre=given.pre)
    print(compared(pinned, newer))
    sys.exit(bool(newer.failed - pinned.failed))


if __name__ == "__main__":
    main()
