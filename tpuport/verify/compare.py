"""What two runs recorded, compared in stages: interface, numbers, behaviour, files."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tpuport.verify.files import compare_files, is_compared

# Gradients below this share of the largest one are zero but for rounding. Adam makes steps of full
# size of them.
_NO_GRADIENT = 1e-6
# How much further than a disturbed run a port may be: both are samples of rounding.
_ROUNDING = 5.0
# What rounding moves a number of a gradient by is no more, as a share of the largest one: in
# float32, and of the tolerance that somebody gave because the script computes in fewer digits.
_MOST_NOISE = 1e-5
_NOISE_OF_LIMIT = 0.1
# How much further than eager PyTorch a port may be from the run in float64.
_FACTOR = 4.0
# Rounding of a value at the start is no more, as a share of the largest one.
_SMALL_START = 1e-6
_MOST_NAMED = 5

Tensors = dict[str, torch.Tensor]


@dataclass
class Comparison:
    """One comparison of a stage.

    Attributes:
        what: What was compared.
        count: How many of them.
        error: The largest difference, relative to what `limit` is of; None where nothing was
            measured.
        limit: The largest difference that passes.
        worst: The name of what differs most.
        problems: What is not even comparable, or beyond the limit.
        errors: Each difference by name.
        allowed: Larger limits, by name.
        apart: How many differences are beyond their limit, and finite.
    """

    what: str
    count: int = 0
    error: float | None = None
    limit: float = 0.0
    worst: str = ""
    problems: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    apart: int = 0

    @property
    def may_be_rounding(self) -> bool:
        """Return whether all that is wrong are numbers that are beyond a limit."""
        return len(self.problems) == self.apart

    @property
    def passed(self) -> bool:
        """Return whether everything agrees."""
        return not self.problems

    @property
    def is_rounding(self) -> bool:
        """Return whether it agrees only because rounding does as much in eager PyTorch."""
        return self.passed and self.error is not None and self.error > self.limit > 0

    def add(self, name: str, error: float) -> None:
        """Add the difference of one more value; NaN is a difference."""
        self.count += 1
        self.errors[name] = error
        if self.error is None or not error <= self.error:
            self.error, self.worst = error, name
        limit = max(self.limit, self.allowed.get(name, 0.0))
        if not error <= limit:
            self.apart += math.isfinite(error)
            self.problems.append(f"{name}: {error:.1e} apart, more than {limit:.0e}")


@dataclass(frozen=True)
class Stage:
    """The checks of one stage."""

    name: str
    checks: Sequence[Comparison]

    @property
    def passed(self) -> bool:
        """Return whether all checks agree."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Limits:
    """The largest differences that pass.

    Attributes:
        numbers: Of the first step's losses (relative to the loss) and gradients (relative to the
            largest element of each).
        behaviour: Of later losses, and of parameters and states, relative to how far each moved.
    """

    numbers: float = 1e-4
    behaviour: float = 1e-3


class Recording:
    """What one run recorded, read from its folder."""

    def __init__(self, folder: Path) -> None:
        record = json.loads((folder / "record.json").read_text())
        self.files = folder / "files"
        self.record: dict[str, Any] = record
        self.losses: list[list[float]] = record["losses"]
        self.tensors: Tensors = load_file(folder / "tensors.safetensors")

    def part(self, kind: str) -> Tensors:
        """Return the tensors of one kind by their keys."""
        start = f"{kind}/"
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}


_NOTHING = "no optimizer made a step, and no file of images or tensors was written"


def why_empty(eager: Recording) -> str:
    """Return why equality with a run says nothing, if so: NaN is equal to NaN, and zero to zero."""
    if not eager.record["optimizers"]:
        # A log, or a folder that was made for a checkpoint, is not compared and says nothing.
        compared = any(path.is_file() and is_compared(path) for path in eager.files.rglob("*"))
        return "" if compared else _NOTHING
    losses = [loss for step in eager.losses for loss in step]
    if losses and not any(map(math.isfinite, losses)):
        return "every loss is NaN or infinite in eager PyTorch, too"
    gradients = eager.part("gradient").values()
    if gradients and not any(bool((t.isfinite() & (t != 0)).any()) for t in gradients):
        return "every gradient of the first step is zero, NaN or infinite in eager PyTorch, too"
    return ""


def interface(
    eager: Recording, ported: Recording, limit: float = 0.0, exact: Recording | None = None
) -> Stage:
    """Compare optimizers, their parameters, and the values that these start with.

    Args:
        eager: Eager PyTorch.
        ported: The port.
        limit: The largest difference of values that passes: a first call may have computed some.
        exact: Eager PyTorch in float64. What a call computes may be zero but for rounding, as the
            mean of what is centred: a port may miss a few times what eager PyTorch does.
    """
    allowed = {} if exact is None else _rounded_starts(eager, exact)
    starts = Comparison("values at the start", limit=limit, allowed=allowed)
    # What another optimizer has moved before is no start: rounding has moved it, too.
    moved = set(eager.record["moved"]) & set(ported.record["moved"])
    _each(starts, eager, ported, "start", lambda a, b, _: _relative(a, b), moved)
    return Stage("interface", [_form(eager.record, ported.record), starts])


def _rounded_starts(eager: Recording, exact: Recording) -> dict[str, float]:
    """Return how far a port may be from values at the start that are small, by name."""
    sizes = (float(t.abs().max()) for t in eager.part("start").values() if t.numel())
    small = _SMALL_START * max(sizes, default=0.0)
    known = Comparison("")

    def missed(a: torch.Tensor, b: torch.Tensor, _: str) -> float:
        # More than that is no rounding: the run in float64 started otherwise.
        near = a.numel() and float((a.double() - b.double()).abs().max()) <= small
        return _FACTOR * _relative(a, b) if near else 0.0

    _each(known, eager, exact, "start", missed)
    return known.errors


def numbers(
    eager: Recording, ported: Recording, limit: float, missed: Stage | None = None
) -> Stage:
    """Compare losses and gradients of the first step.

    Args:
        eager: Eager PyTorch, or its run in float64.
        ported: The port.
        limit: The largest difference that passes.
        missed: What eager PyTorch misses of its run in float64: a port may miss a few times that.
    """
    allowed = {
        check.what: {name: _FACTOR * error for name, error in check.errors.items()}
        for check in (() if missed is None else missed.checks)
    }
    gradients, of_losses = "gradients of step 1", "losses of step 1"
    check = Comparison(gradients, limit=limit, allowed=allowed.get(gradients, {}))
    sizes = (float(t.abs().max()) for t in eager.part("gradient").values() if t.numel())
    at_least = max(sizes, default=0.0) * _NO_GRADIENT / limit if limit else 0.0
    _each(check, eager, ported, "gradient", lambda a, b, _: _relative(a, b, at_least))
    losses = Comparison(of_losses, limit=limit, allowed=allowed.get(of_losses, {}))
    _add_losses(losses, eager.losses[:1], ported.losses[:1])
    return Stage("numbers", [losses, check])


def gradient_noise(eager: Recording, ported: Recording, limit: float = 0.0) -> dict[str, float]:
    """Return how far apart first gradients typically are, by optimizer and position.

    That is the rounding of sums, which is more than that of one number. None is more than a share
    of its gradient, so that a wrong gradient which is small beside all others is no rounding.

    Args:
        eager: Eager PyTorch.
        ported: The port.
        limit: The largest difference of first gradients that passes.
    """
    most = max(_MOST_NOISE, _NOISE_OF_LIMIT * limit)
    mine, other = eager.part("gradient"), ported.part("gradient")
    found = {}
    for key in mine.keys() & other.keys():
        a, b = mine[key].double(), other[key].double()
        if a.shape == b.shape and a.numel() and bool((a.isfinite() & b.isfinite()).all()):
            apart = float((a - b).square().mean().sqrt())
            found[key.partition("/")[0]] = min(apart, most * float(a.abs().max()))
    return found


def missed_elsewhere(reference: Recording, ported: Recording, missed: Stage) -> float | None:
    """Return what eager PyTorch misses most, if the port misses nowhere more than a few times that.

    Which number rounding moves most is chance: `numbers` allows each only what eager misses of it.

    Args:
        reference: Eager PyTorch in float64.
        ported: The port.
        missed: What eager PyTorch misses of that.
    """
    most = max((check.error or 0.0 for check in missed.checks), default=0.0)
    return most if most and numbers(reference, ported, _FACTOR * most).passed else None


def behaviour(eager: Recording, ported: Recording, limit: float, *rounded: Recording) -> Stage:
    """Compare losses of all steps, and what is there after the last one.

    Differences that rounding makes in eager PyTorch as well, as `rounded` show, are allowed: runs
    with rounding put in, or in float64.
    """
    known: dict[str, Comparison] = {}
    for other in rounded:
        for what, check in _differences(eager, other, limit, {}).items():
            if what in known:
                # The same names: all are of one script.
                largest = known[what].errors
                for name, error in check.errors.items():
                    largest[name] = max(largest.get(name, 0.0), error)
            else:
                known[what] = check
    found = _differences(eager, ported, limit, known)
    return Stage("behaviour", list(found.values()))


def moved_elsewhere(stage: Stage) -> float | None:
    """Return how far rounding moves other values, if nothing that differs is further apart.

    Of thousands of numbers near zero it is chance which ones rounding gives another sign, and an
    optimizer such as Adam a step of full size the other way.

    Args:
        stage: The comparison of behaviour, with what rounding moves.
    """
    wrong = [check for check in stage.checks if not check.passed]
    most = [max(check.allowed.values(), default=0.0) for check in wrong]
    near = zip(wrong, most, strict=True)
    if not wrong or not all(c.may_be_rounding and (c.error or 0.0) <= limit for c, limit in near):
        return None
    return max(most) / _ROUNDING


def _differences(
    eager: Recording, other: Recording, limit: float, known: dict[str, Comparison]
) -> dict[str, Comparison]:
    """Return what differs by kind; `known` are differences that rounding makes."""

    def check(what: str) -> Comparison:
        errors = known[what].errors if what in known else {}
        allowed = {name: _ROUNDING * error for name, error in errors.items()}
        made = found[what] = Comparison(what, limit=limit, allowed=allowed)
        return made

    found: dict[str, Comparison] = {}
    _add_losses(check("losses of all steps"), eager.losses, other.losses)
    ends = check("parameters at the end")
    _each(ends, eager, other, "end", _movement(eager.part("start"), other.part("start")))
    for kind, what in (("buffer", "buffers at the end"), ("state", "optimizers at the end")):
        _each(check(what), eager, other, kind, lambda a, b, _: _apart(a, b, a))
    written, files = check("written files"), compare_files(eager.files, other.files)
    written.problems += files.problems
    for name, error in files.errors:
        written.add(name, error)
    return found


def _form(eager: dict[str, Any], ported: dict[str, Any]) -> Comparison:
    check = Comparison("optimizers, parameters")
    both = itertools.zip_longest(eager["optimizers"], ported["optimizers"])
    for index, (mine, other) in enumerate(both):
        check.count += len((mine or other)["parameters"])
        if mine is None or other is None:
            side = "eager" if other is None else "ported"
            check.problems.append(f"optimizer {index} steps in the {side} run only")
            continue
        check.problems += [
            f"optimizer {index}: {what} {_short(mine[what])} in eager, {_short(other[what])} ported"
            for what in ("class", "groups")
            if mine[what] != other[what]
        ]
        check.problems += _unlike(mine["parameters"], other["parameters"])
    if eager["steps"] != ported["steps"]:
        check.problems.append(f"steps made: {eager['steps']} in eager, {ported['steps']} ported")
    return check


def _unlike(mine: dict[str, Any], other: dict[str, Any]) -> Iterable[str]:
    for key in [*mine, *(k for k in other if k not in mine)]:
        if mine.get(key) != other.get(key):
            yield f"{_name(key)}: {mine.get(key)} in eager, {other.get(key)} ported"


def _each(
    check: Comparison,
    eager: Recording,
    ported: Recording,
    kind: str,
    error: Callable[[torch.Tensor, torch.Tensor, str], float],
    left_out: Collection[str] = (),
) -> None:
    mine, other = eager.part(kind), ported.part(kind)
    shown = _names({**mine, **other}.keys())
    for key, name in shown.items():
        if key in left_out:
            continue
        if key not in mine or key not in other:
            side = "eager" if key in mine else "ported"
            check.problems.append(f"{name}: in the {side} run only")
        elif mine[key].shape != other[key].shape or mine[key].dtype != other[key].dtype:
            forms = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in (mine[key], other[key])]
            check.problems.append(f"{name}: {forms[0]} in eager, {forms[1]} ported")
        else:
            check.add(name, error(mine[key], other[key], key))


def _add_losses(check: Comparison, eager: list[list[float]], ported: list[list[float]]) -> None:
    if list(map(len, eager)) != list(map(len, ported)):
        counts = [sum(map(len, side)) for side in (eager, ported)]
        check.problems.append(
            f"backward() is called {counts[0]} times in eager, {counts[1]} ported"
        )
    for step, (mine, other) in enumerate(zip(eager, ported, strict=False), 1):
        for number, (a, b) in enumerate(zip(mine, other, strict=False), 1):
            pair = torch.tensor([[a], [b]], dtype=torch.float64)
            name = f"step {step}" if len(mine) == 1 else f"step {step}, backward {number}"
            check.add(name, _relative(pair[0], pair[1]))


def _movement(mine: Tensors, other: Tensors) -> Callable[[torch.Tensor, torch.Tensor, str], float]:
    """Return how far apart two movements are, of what begins with the values `mine` and `other`."""

    def apart(a: torch.Tensor, b: torch.Tensor, key: str) -> float:
        start = mine[key].double()
        if torch.equal(mine[key], other.get(key, mine[key])):  # they began alike, as nearly always
            return _apart(a, b, a.double() - start)
        begun = other[key].double()
        begun = begun if begun.shape == start.shape else start
        later = torch.where(start == begun, 0.0, start - begun)
        return _apart(a, b.double() + later, a.double() - start)

    return apart


def _relative(mine: torch.Tensor, other: torch.Tensor, at_least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest element or to `at_least`."""
    if torch.equal(mine, other):
        return 0.0
    a, b = mine.double(), other.double()
    largest = float((a - b).abs_().max())
    if math.isfinite(largest):  # then all is; what follows takes twice as many passes
        size = max(float(a.abs().max()), at_least)
        if not largest or not size:
            return math.inf if largest else 0.0
        return largest / size
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    size = max(float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 0.0, at_least)
    difference = float((a - b)[~same].abs().max())
    return difference / size if size else float("inf")


def _apart(mine: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the norm of a difference, relative to that of `scale`."""
    if mine.dtype == other.dtype and torch.equal(mine, other):
        return 0.0
    a, b = mine.double(), other.double()
    difference = (a - b).norm()
    if not difference.isfinite():
        difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm()
    if not difference:  # the same infinity has moved by no number
        return 0.0
    size = max(float(scale.double().norm()), torch.finfo(torch.float32).eps * float(a.norm()))
    return float(difference) / size if size else float(difference > 0)


def _name(key: str) -> str:
    """Return the name of a parameter or state without its optimizer and position."""
    first, _, rest = key.partition("/")
    return rest if first.replace(".", "").isdigit() else key


def _names(keys: Iterable[str]) -> dict[str, str]:
    """Return a name for each key, with optimizer and position where two would have one name.

    Networks of one script often have the same names inside, such as a generator and its critic.
    """
    names = {key: _name(key) for key in keys}
    counts = Counter(names.values())
    for key, name in names.items():
        if counts[name] > 1 and key != name:
            optimizer, position = key.split("/", 1)[0].split(".")
            names[key] = f"{name} (optimizer {optimizer}, position {position})"
    return names


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def shown_problems(check: Comparison) -> list[str]:
    """Return the first problems of a check, and how many more there are."""
    rest = len(check.problems) - _MOST_NAMED
    return [*check.problems[:_MOST_NAMED], *([f"and {rest} more"] if rest > 0 else [])]
