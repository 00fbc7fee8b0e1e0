"""The first place where a port's values leave those of the original."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuport.foundation.user_frames import CodePlace
from tpuport.verify.ports.original import OriginalRun
from tpuport.verify.ports.program import ProgramRun

_MOST_LINES = 4
EXACT = 1e-9


@dataclass(frozen=True)
class PartingSite:
    """A place in the code of one side.

    Attributes:
        op: What computed the value there.
        where: File and line; empty where there is none.
        source: The code there.
        inside: The module of the original or the function of the port.
    """

    op: str
    where: str
    source: str
    inside: str

    def __str__(self) -> str:
        inside = f" in {self.inside}" if self.inside else ""
        return f"{self.where or '(no line)'}: {self.source or self.op} [{self.op}{inside}]"


@dataclass(frozen=True)
class FirstDifference:
    """Where two programs part: all that these ops read is the same on both sides.

    Attributes:
        target: The result that differs.
        original: Places of the original, in the order of execution.
        port: Places of the port.
        matched: How many values of the original were found in the port.
        compared: How many there are.
    """

    target: str
    original: list[PartingSite]
    port: list[PartingSite]
    matched: int
    compared: int


class ValuesInBetween:
    """The values in between of both sides, and which of them are the same.

    Two arrays are the same if one holds the elements of the other, in any order: what a layout
    moves is no difference, and what it moves wrongly shows in the next product or sum.

    Args:
        original: The run of the original, with the values.
        truth: The same values in float64.
        port: The run of the port.
        rounding: What of an array's largest element two roundings may be apart.
        strict: Whether what eager PyTorch misses of the truth is a difference.
    """

    def __init__(
        self,
        original: OriginalRun,
        truth: OriginalRun,
        port: ProgramRun,
        *,
        rounding: float,
        strict: bool = False,
    ) -> None:
        self.original, self.port = original, port
        self.in_original = [False] * len(original.steps)
        self.in_port = [False] * len(port.made)
        by_size: dict[tuple[int, bool], list[int]] = {}
        others = [_Sorted(value) for value in port.values]
        for j, one in enumerate(others):
            by_size.setdefault((one.size, one.is_whole), []).append(j)
        for i, (mine, exact) in enumerate(zip(original.values, truth.values, strict=True)):
            one = _Sorted(exact)
            missed = 0.0 if strict or one.is_whole else _largest(mine, exact)
            limit = max(rounding * one.scale, missed)
            for j in by_size.get((one.size, one.is_whole), ()):
                if one.equals(others[j], limit):
                    self.in_original[i] = self.in_port[j] = True

    def first(self, target: str, mine: int | None, other: int | None) -> FirstDifference:
        """Find where the two part on the way to a result.

        Args:
            target: The name of the result.
            mine: Its number among the values of the original.
            other: Its number among those of the port.
        """
        steps, made = self.original.steps, self.port.made
        before = [
            PartingSite(s.op.removesuffix(".default"), *_code(s.place), s.module)
            for s in (steps[i] for i in _frontier(mine, steps, self.in_original))
        ]
        after = [
            PartingSite(m.op, *_code(m.place), m.function)
            for m in (made[j] for j in _frontier(other, made, self.in_port))
        ]
        looked = [i for i, step in enumerate(steps) if not step.is_constant]
        found = sum(self.in_original[i] for i in looked)
        return FirstDifference(target, _lines(before), _lines(after), found, len(looked))


def _frontier(start: int | None, nodes: Sequence[Any], matched: Sequence[bool]) -> list[int]:
    """Return the values that are not on the other side, though all that they are made of is."""
    if start is None:
        return []
    found, seen, open_ones = [], {start}, [start]
    while open_ones:
        node = open_ones.pop()
        unlike = [p for p in nodes[node].parents if not matched[p] and not nodes[p].is_constant]
        if not unlike and (node == start or not matched[node]):
            found.append(node)
        for parent in unlike:
            if parent not in seen:
                seen.add(parent)
                open_ones.append(parent)
    return sorted(found)


def _lines(sites: list[PartingSite]) -> list[PartingSite]:
    """Return one site a line, the first ones."""
    by_line = {(site.where or site.op): site for site in reversed(sites)}
    return list(reversed(by_line.values()))[:_MOST_LINES]


def _code(place: CodePlace | None) -> tuple[str, str]:
    return ("", "") if place is None else (str(place), place.source or "")


def _largest(mine: np.ndarray, other: np.ndarray) -> float:
    if mine.shape != other.shape or not mine.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.asarray(mine, np.float64) - np.asarray(other, np.float64))
    return float(np.nan_to_num(apart, nan=0.0, posinf=0.0).max())


class _Sorted:
    """The elements of an array in order, with what tells most arrays apart at a glance."""

    def __init__(self, value: np.ndarray) -> None:
        flat = np.asarray(value).reshape(-1)
        self.is_whole = not np.issubdtype(flat.dtype, np.inexact)
        if np.iscomplexobj(flat):
            flat = np.concatenate([np.real(flat), np.imag(flat)])
        wide = flat.astype(np.float64)
        self.size = wide.size
        self.elements = np.sort(wide)
        self.finite = self.elements[np.isfinite(self.elements)]
        self.scale = float(np.abs(self.finite).max()) if self.finite.size else 0.0

    def equals(self, other: "_Sorted", limit: float) -> bool:
        """Return whether another array has the same elements within a limit."""
        if self.finite.size != other.finite.size:
            return False
        if not self.finite.size:
            return True
        ends = (0, self.finite.size // 2, -1)
        if any(abs(self.finite[i] - other.finite[i]) > limit for i in ends):
            return False
        return float(np.abs(self.finite - other.finite).max()) <= limit
