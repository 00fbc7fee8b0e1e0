"""Commands of the recipe that a test runs or reads the log of."""

import json
from pathlib import Path
from typing import Any

from recipes.recogdrive.__main__ import app


def command(*given: Any) -> None:
    """Run a command in this process."""
    app(list(map(str, given)), standalone_mode=False)


def logged(out: Path, name: str = "loss") -> dict[int, float]:
    """What a run logged under a name, by step."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def has_state(out: Path) -> bool:
    """Whether a run has a whole state on disk."""
    return any(p.name.isdigit() for p in out.glob("states/*"))
