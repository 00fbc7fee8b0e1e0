"""The outcome of `tpuport verify`: as text, JSON and a page."""

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tpuport.foundation.errors import UsageError
from tpuport.foundation.version import __version__
from tpuport.verify.compare import (
    Limits,
    Recording,
    Stage,
    behaviour,
    interface,
    moved_elsewhere,
    numbers,
    shown_problems,
    why_empty,
)
from tpuport.verify.draws import (
    NOTED,
    REPLAYED,
    caught_errors,
    count_programs,
    drew,
    why_not_replayed,
)
from tpuport.verify.files import renamed_files
from tpuport.verify.hub import OFFLINE, why_unreachable
from tpuport.verify.imports import packages_of
from tpuport.verify.left_gradients import LEFT
from tpuport.verify.port_decisions import FOLDER, KEPT
from tpuport.verify.processes import (
    EAGER,
    NO_REFERENCE,
    PORTED,
    RESULT,
    FinishedRun,
    VerifiedScript,
    prepare,
    run,
)
from tpuport.verify.rounding import ExplainedStage, Rounding
from tpuport.verify.stage_table import stage_table

STAGES = ("interface", "numbers", "behaviour")
EQUAL, DIFFERS, UNDECIDED, FAILED = "equal", "differs", "undecided", "failed"
_MOST_SHOWN = 3
_FIRST = "gradients of the first step"
# For the runs that tell rounding from a fault, if nothing else is said; and at least so many.
_ROUNDING_S, _LEAST_ROUNDING_S = 420.0, 60.0
# The name of the run of eager PyTorch on the port's random numbers.
_REPLAYED = "replayed"
_NOTHING_PORTED = (
    "Nothing was ported, so that eager PyTorch was compared with itself: no module was called on"
    " CUDA. Have the script use it, by its arguments."
)


@dataclass(frozen=True)
class Verification:
    """What comparing two runs of a script found.

    Attributes:
        script: The script.
        steps: The steps that were asked for.
        seed: The seed.
        stages: The stages, as far as the first that could be compared.
        failure: What the ported run printed last, if it failed; then there are no stages.
        notes: What a reader has to know.
        folder: Where the recordings, outputs and written files of both runs are.
        programs: How many calls of the ported run were programs.
        undecided: Why a difference could not be told from rounding, if so: then what differs by no
            more than numbers may be equal or not. If nothing differs, why that says nothing.
    """

    script: str
    steps: int
    seed: int
    stages: Sequence[Stage]
    failure: str
    notes: Sequence[str]
    folder: str
    programs: int
    undecided: str = ""

    @property
    def verdict(self) -> str:
        """Return `equal`, `differs`, `undecided` or `failed`."""
        if self.failure:
            return FAILED
        if self.passed:
            return EQUAL
        return UNDECIDED if self.undecided or not self.programs else DIFFERS

    @property
    def within(self) -> str:
        """Return how far apart is what may be rounding: `gradients of step 1 within 3.1e-05`."""
        checks = [check for stage in self.stages for check in stage.checks]
        found = [f"{c.what} within {c.error:.1e}" for c in checks if not c.passed and c.apart]
        return ", ".join(found)

    @property
    def passed(self) -> bool:
        """Return whether something was ported, and all stages were reached and agree."""
        return (
            self.programs > 0
            and not self.undecided
            and len(self.stages) == len(STAGES)
            and all(stage.passed for stage in self.stages)
        )

    def to_json(self) -> str:
        """Return everything as JSON."""
        stages = [
            {
                "name": stage.name,
                "passed": stage.passed,
                "checks": [{**asdict(c), "passed": c.passed} for c in stage.checks],
            }
            for stage in self.stages
        ]
        fields: dict[str, Any] = {**vars(self), "stages": stages, "passed": self.passed}
        fields |= {"verdict": self.verdict, "within": self.within}
        return json.dumps({"tpuport": __version__, **fields}, indent=1)

    def show(self, console: Console) -> None:
        """Print a table of the stages and what follows from them."""
        title = f"{self.script}: {self.steps} steps, seed {self.seed}"
        table = stage_table(title, STAGES, self.stages)
        console.print(table)
        for stage in self.stages:
            for check in stage.checks:
                for problem in shown_problems(check):
                    console.print(Text(f"  {check.what}: {problem}"))
        if self.failure:
            console.print(Text(f"The ported run failed:\n{self.failure}"))
        for note in self.notes:
            console.print(Text(note))
        if self.undecided:
            apart = (
                f"{self.within}: could not be told from rounding" if self.within else "undecided"
            )
            console.print(Text(f"{apart}: {self.undecided}"))
        console.print(Text(f"Recordings and what both runs wrote: {self.folder}"))

    def save(self, path: Path) -> None:
        """Write the report as .json, .html or .txt."""
        if path.suffix == ".json":
            path.write_text(self.to_json())
            return
        with Path("/dev/null").open("w") as nowhere:
            console = Console(record=True, width=120, file=nowhere)
            self.show(console)
        text = console.export_html() if path.suffix == ".html" else console.export_text()
        path.write_text(text)


def verify(
    what: VerifiedScript, out: Path, limits: Limits, seconds: float | None = None
) -> Verification:
    """Run a script in eager PyTorch and ported, and compare the two.

    Args:
        what: The script.
        out: The folder for the results.
        limits: The largest differences that pass.
        seconds: The time after which no more is done to tell a difference from rounding. A minute
            is left for that in any case.

    Raises:
        UsageError: there is no such script, or its run in eager PyTorch fails.
    """
    began = time.monotonic()
    prepare(out, what.script)
    unreachable = why_unreachable(packages_of(what.script))
    if unreachable:
        what = replace(what, environment={**what.environment, **OFFLINE})
    eager = run(what, EAGER, out)
    if not eager.recorded:
        raise UsageError(
            f"The script fails in eager PyTorch (exit status {eager.status}), {NO_REFERENCE}."
            f" It ends with:\n{eager.tail}"
        )
    ported = run(what, PORTED, out, {"around": [NOTED, LEFT, KEPT]})
    failed = not ported.recorded
    stages, notes, undecided = [], [], ""
    if not failed:
        what, reference, settings, notes = _on_same_numbers(what, eager, ported, out)
        left = _ROUNDING_S if seconds is None else began + seconds - time.monotonic()
        left = max(left, _LEAST_ROUNDING_S)
        stages, more, undecided = _compared(what, reference, ported, out, limits, settings, left)
        notes += more
    notes += caught_errors(ported.folder)
    shutil.rmtree(ported.folder / FOLDER, ignore_errors=True)
    programs = count_programs(ported.folder)
    if not failed and not programs:
        notes.append(_NOTHING_PORTED)
    if unreachable:
        notes.append(f"All runs had HF_HUB_OFFLINE=1, as the hub does not answer: {unreachable}.")
    found = Verification(
        str(what.script),
        what.steps,
        what.seed,
        stages,
        ported.tail if failed else "",
        [*_notes(eager, what, stages), *notes],
        str(out),
        programs,
        undecided,
    )
    (out / RESULT).write_text(found.to_json())
    return found


def _on_same_numbers(
    what: VerifiedScript, eager: FinishedRun, ported: FinishedRun, out: Path
) -> tuple[VerifiedScript, FinishedRun, dict[str, Any] | None, list[str]]:
    """Run eager PyTorch on the random numbers that the port drew in its programs, if it drew any.

    Returns:
        The script, the run to compare with, settings of further ones (None if it drew other
        numbers), and notes.
    """
    draws = drew(ported.folder)
    if draws is None:
        return what, eager, {}, []
    # The calls that are programs are known where CUDA is emulated.
    emulated = replace(what, plain=False)
    settings = {"around": [REPLAYED], "draws": str(draws)}
    again = run(emulated, _REPLAYED, out, settings)
    why_not = why_not_replayed(again.folder) if again.recorded else "it failed"
    if why_not:
        note = f"Eager PyTorch did not draw the random numbers of the port's programs: {why_not}."
        return what, eager, None, [note]
    note = "Eager PyTorch drew the random numbers that the port's programs draw."
    return emulated, again, settings, [note]


def _compared(
    what: VerifiedScript,
    eager: FinishedRun,
    ported: FinishedRun,
    out: Path,
    limits: Limits,
    settings: dict[str, Any] | None,
    seconds: float,
) -> tuple[list[Stage], list[str], str]:
    """Compare two runs.

    Returns:
        The stages, as far as the interface lets them be compared; notes on them; why a difference
        could not be told from rounding, if so.
    """
    mine, other = Recording(eager.folder), Recording(ported.folder)
    stages = [interface(mine, other, limits.numbers)]
    notes = renamed_files(mine.files, other.files)
    kept = ported.folder / FOLDER
    rounding = Rounding(
        *(what, out, mine, other, limits, settings or {}),
        seconds=seconds,
        longest=eager.seconds,
        # Without CUDA emulated nobody tells which calls were programs.
        kept=kept if kept.exists() and not what.plain else None,
    )
    with contextlib.closing(rounding):
        stages[0] = _started(stages[0], rounding)
        if not stages[0].passed:
            return stages, notes, ""
        stages += [numbers(mine, other, limits.numbers), behaviour(mine, other, limits.behaviour)]
        if caught_errors(ported.folder):  # the port goes another way, which is no rounding
            return stages, notes, _empty(stages, mine)
        if settings is None and not stages[1].passed:
            return stages, notes, _undecided(stages, "eager PyTorch drew other random numbers")
        if not stages[1].passed:
            explained = rounding.of_numbers()
            notes += _explained(explained, _FIRST)
            if explained is None:
                if rounding.beside is not None:
                    stages[1] = rounding.beside.stage
                    notes += _explained(rounding.beside, _FIRST)
                return stages, notes, _undecided(stages, rounding.why_not)
            stages[1] = explained.stage
        elif not stages[2].passed:
            stages[2] = rounding.disturbed(what, settings) or stages[2]
        if not stages[2].passed and settings is not None:
            explained = rounding.of_behaviour()
            notes += _explained(explained, "what is there at the end")
            stages[2] = stages[2] if explained is None else explained.stage
        why_not = rounding.why_not or _elsewhere(stages[2])
        if settings is None:
            why_not = why_not or "eager PyTorch drew other random numbers"
    return stages, notes, _undecided(stages, why_not) or _empty(stages, mine)


def _elsewhere(stage: Stage) -> str:
    """Return why values that differ may be rounding which has hit others in eager PyTorch."""
    most = moved_elsewhere(stage)
    if most is None:
        return ""
    return (
        f"rounding moves other values in eager PyTorch by up to {most:.1e}, and none of the port's"
        " is much further from it; which ones it moves is chance"
    )


def _started(stage: Stage, rounding: Rounding) -> Stage:
    """Return the first stage, compared once more if rounding may be all that differs."""
    if stage.passed or not all(check.may_be_rounding for check in stage.checks):
        return stage
    return rounding.of_starts() or stage


def _undecided(stages: Sequence[Stage], why: str) -> str:
    """Return why a difference cannot be told from rounding; nothing if it cannot be rounding."""
    wrong = [check for stage in stages for check in stage.checks if not check.passed]
    return why if wrong and all(check.may_be_rounding for check in wrong) else ""


def _empty(stages: Sequence[Stage], eager: Recording) -> str:
    """Return why it says nothing that all agree, if so."""
    return why_empty(eager) if all(stage.passed for stage in stages) else ""


def _explained(found: ExplainedStage | None, what: str) -> list[str]:
    """Say what rounding has to do with a difference."""
    if found is None or not found.turned:
        return []
    shown = "; ".join(str(one) for one in found.turned[:_MOST_SHOWN])
    more = len(found.turned) - _MOST_SHOWN
    shown += f"; and {more} more" if more > 0 else ""
    outcome = "agree" if found.stage.passed else "still differ"
    return [
        f"rounding: in the port, numbers are on the other side of a kink, or another one is the"
        f" largest ({shown}). With the same in eager PyTorch, {what} {outcome}."
    ]


def _notes(eager: FinishedRun, what: VerifiedScript, stages: Sequence[Stage]) -> list[str]:
    notes = []
    if any(check.is_rounding for stage in stages for check in stage.checks):
        notes.append(
            "rounding: eager PyTorch is as far from itself if rounding is added to its gradients."
        )
    if eager.overwritten:
        names = ", ".join(eager.overwritten[:3])
        notes.append(f"The first run changed files that the second one found changed: {names}.")
    if eager.left:
        names = ", ".join(eager.left[:3])
        names += f" and {len(eager.left) - 3} more" if len(eager.left) > 3 else ""
        notes.append(
            f"New files stay where they are and were not compared: {names}. Somebody else may have"
            " written them, or a program or library that the script uses; if so, the second run"
            " found them."
        )
    record = json.loads((eager.folder / "record.json").read_text())
    if not record["optimizers"]:
        notes.append("No optimizer made a step: only written files were compared.")
    elif max(record["steps"]) < what.steps:
        notes.append(f"The script ended after {max(record['steps'])} steps.")
    ends = Recording(eager.folder).part("end").values()
    lost = sum(not bool(end.isfinite().all()) for end in ends)
    if lost:
        notes.append(f"{lost} of {len(ends)} parameters are NaN or infinite at the end in both.")
    return notes
