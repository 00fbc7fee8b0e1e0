"""Findings that are known already, so that a run shows only new ones.

A finding is identified by its rule, its file and the text of its line, so that it stays known when
code above it moves. The baseline counts findings on equal lines.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import write_atomically
from tpuport.lint.records import Reported

FORMAT = 1
DEFAULT_FILE = "tpuport-baseline.json"
_Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Compared:
    """Findings compared with a baseline.

    Attributes:
        new: The findings that are not in the baseline.
        known: Number of findings that are in the baseline.
        gone: Number of the baseline's findings in the checked files that no longer occur.
    """

    new: tuple[Reported, ...]
    known: int
    gone: int


class Baseline:
    """The findings of a baseline file. Paths in it are relative to its folder."""

    def __init__(self, path: Path, counts: Counter[_Key]) -> None:
        self._path = path
        self._counts = counts

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read the baseline in a file.

        Raises:
            UsageError: the file does not exist, cannot be read or is no baseline.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, _counts(content))
        except FileNotFoundError:
            raise UsageError(
                f"There is no baseline {path}. What to do: write one with --write-baseline."
            ) from None
        except OSError as error:
            raise UsageError(f"The baseline {path} cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{path} is no baseline of tpuport. What to do: write it again with"
                " --write-baseline."
            ) from None

    @classmethod
    def of(cls, path: Path, findings: Iterable[Reported]) -> "Baseline":
        """Make a baseline of these findings."""
        return cls(path, Counter(_key(finding, path.parent) for finding in findings))

    def write(self) -> None:
        """Write the baseline to its file, sorted so that diffs of it are readable.

        Raises:
            UsageError: it cannot be written.
        """
        files: dict[str, list[dict[str, Any]]] = {}
        for (file, code, rule, line), count in sorted(self._counts.items()):
            entry = {"code": code, "rule": rule, "line": line, "count": count}
            files.setdefault(file, []).append(entry)
        text = json.dumps({"tpuport-baseline": FORMAT, "files": files}, indent=1)
        try:
            write_atomically(self._path, f"{text}\n".encode())
        except OSError as error:
            raise UsageError(
                f"The baseline {self._path} cannot be written: {error.strerror}."
            ) from None

    def compare(self, findings: Sequence[Reported], files: Iterable[str]) -> Compared:
        """Separate new findings from known ones.

        Args:
            findings: Findings sorted by place. Of findings on equal lines, the first ones count as
                known.
            files: All files that were checked.
        """
        left = Counter(self._counts)
        new: list[Reported] = []
        for finding in findings:
            key = _key(finding, self._path.parent)
            if left[key] > 0:
                left[key] -= 1
            else:
                new.append(finding)
        seen = {_name(file, self._path.parent) for file in files}
        gone = sum(count for key, count in left.items() if key[0] in seen)
        return Compared(tuple(new), len(findings) - len(new), gone)


def _key(finding: Reported, root: Path) -> _Key:
    line = " ".join(finding.lines[0].split()) if finding.lines else ""
    return (_name(finding.file, root), finding.code, finding.rule, line)


def _name(file: str, root: Path) -> str:
    path = Path(file).absolute()
    try:
        return path.relative_to(root.absolute()).as_posix()
    except ValueError:
        return path.as_posix()


def _counts(content: Any) -> Counter[_Key]:
    if content["tpuport-baseline"] != FORMAT:
        raise ValueError("another format")
    return Counter(
        {
            (file, entry["code"], entry["rule"], entry["line"]): int(entry["count"])
            for file, entries in content["files"].items()
            for entry in entries
        }
    )
