"""What to do next in a folder: what `tpuport` says without a command."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tpuport.repository.scripts import find_scripts

_MOST_FILES = 2000
_LEFT_OUT = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_MODULE = re.compile(rb"^class (\w+)\([\w., ]*Module\w*\):", re.MULTILINE)


def next_in(folder: Path) -> list[str]:
    """Return lines that say what to do next in a folder; nothing of it is run.

    An earlier report of `tpuport port` comes first, then scripts that train, then modules.
    """
    reports = sorted(folder.glob("*/report.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(reports):
        if lines := _from_report(path.parent, path):
            return [*lines, *_LAST]
    files = list(_python_files(folder))
    scripts = find_scripts(folder, files)
    training = [one for one in scripts if one.trains]
    if training:
        name = training[0].path
        return [
            f"{name} looks like the script that trains. Next:",
            "    tpuport port .          # reads everything, writes a page; runs nothing of it",
            "    tpuport port . --run    # also compares it with eager PyTorch and compiles it",
            *_LAST,
        ]
    name, where = next(_modules(files), ("", folder))
    if name:
        module = where.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        return [
            f"{name} in {where.relative_to(folder)} is a module, and nothing here trains it. Next:",
            "    tpuport lint .          # what breaks, goes silently wrong or gets slow",
            f'    python -c "import tpuport; from {module} import {name}; ..."  # tpuport.convert',
            *_LAST,
        ]
    if scripts or files:
        return ["Python files are here, and no module of PyTorch. Next:", *_GENERAL, *_LAST]
    return ["No Python file is here. Next:", *_GENERAL, *_LAST]


_GENERAL = [
    "    tpuport port FOLDER     # a repository: what starts it, what stands in the way",
    "    tpuport demo            # two models ported and compared",
]
_LAST = [
    "    tpuport doctor          # is the installation complete",
    "    tpuport --help          # all commands",
]


def _from_report(folder: Path, path: Path) -> list[str]:
    try:
        found = json.loads(path.read_text())
        steps, outcome, root = found["next_steps"], found["outcome"], found["repository"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    heading = f"tpuport port of {root} ended as: {outcome} ({folder.name}/report.html)."
    if not steps:
        return [heading, "Next:", f"    sh {folder.name}/run.sh     # starts it by tpuport run"]
    return [heading, "Next:", *(f"    {step}" for step in steps)]


def _python_files(folder: Path) -> Iterator[Path]:
    count = 0
    for here, names, files in os.walk(folder):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py"):
                count += 1
                yield Path(here, name)
        if count >= _MOST_FILES:
            return


def _modules(files: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the classes that look like modules of PyTorch, each with its file."""
    for path in files:
        try:
            found = _MODULE.search(path.read_bytes())
        except OSError:
            continue
        if found:
            yield found[1].decode(), path
