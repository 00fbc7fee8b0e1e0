"""The stages of `tpuport port` that run code of the repository, in a copy of it."""

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.foundation.reporting.markup import plural
from tpuport.repository.advised import what_helps
from tpuport.repository.batches import written_batches
from tpuport.repository.capture import SETTINGS, SHARE
from tpuport.repository.copies import copy_repository
from tpuport.repository.logs import (
    TELL,
    around_a_fault,
    how_it_died,
    is_of_tpuport,
    is_own_fault,
    last_error,
    last_line,
    needed_stack,
    overflowed,
    remedy,
)
from tpuport.repository.processes import Finished, run_command
from tpuport.repository.scripts import StartScript
from tpuport.repository.slices import FIRST_SLICE, next_slice
from tpuport.repository.stages import (
    DONE,
    FAILED,
    NEEDS_YOU,
    NOT_ASKED,
    PortRequest,
    Repository,
    StageRecord,
)
from tpuport.verify.hub import OFFLINE
from tpuport.verify.processes import (
    KILLED,
    MORE_TIME,
    NO_REFERENCE,
    TRAINED,
    ended_by_signal,
    last_lines,
)

_WORK = "work"
_TRIALS = 4
# Less of what the optimizer trains is a part of the model, and said to be one.
_WHOLE = 0.99
# What libraries would do unasked: send a run to a service, open a window, shorten a traceback.
_QUIET = {"WANDB_MODE": "disabled", "MPLBACKEND": "Agg", "HYDRA_FULL_ERROR": "1"}
# libtpu would write its logs where it may not, and say so in each line.
_QUIET["TPU_LOG_DIR"] = "disabled"
_REPORT = f"it is more than rounding: {TELL}"
_KINDS = (
    "made up",
    "refused write",
    "process",
    "connection",
    "autocast off",
    "workers",
    "batches",
    "terminal",
    "hub offline",
    "not copied",
)


@dataclass(frozen=True)
class Workspace:
    """The copy of a repository in which its code runs.

    Attributes:
        folder: The folder for everything.
        copy: The copy of the repository.
        before: The file that is executed before the script.
        hub_offline: Why the Hugging Face hub cannot be reached, if so.
        variables: Environment variables that are made up.
        unread: Files of the repository that could not be copied.
    """

    folder: Path
    copy: Path
    before: Path
    hub_offline: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return variables for a process that runs the script."""
        paths = [str(self.copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        quiet = {name: value for name, value in _QUIET.items() if name not in os.environ}
        offline = OFFLINE if self.hub_offline else {}
        return {**quiet, **offline, **dict(self.variables), "PYTHONPATH": os.pathsep.join(paths)}

    def without_paths(self, text: str) -> str:
        """Return a text in which paths are relative to the repository."""
        return text.replace(f"{self.copy}/", "").replace(str(self.copy), ".")

    def seen(self, folder: Path) -> dict[str, list[dict[str, str]]]:
        """Return what a run did, by kind: made-up files, refused writes and so on."""
        found: dict[str, list[dict[str, str]]] = {kind: [] for kind in _KINDS}
        if self.hub_offline:
            found["hub offline"].append({"what": self.hub_offline, "instead": "HF_HUB_OFFLINE=1"})
        found["not copied"] = [{"what": name, "instead": ""} for name in self.unread]
        try:
            lines = (folder / "seen.jsonl").read_text().splitlines()
        except OSError:
            return found
        for line in lines:
            try:
                one = json.loads(line)
                found[one["kind"]].append(
                    {"what": self.without_paths(one["what"]), "instead": one["instead"]}
                )
            except (ValueError, KeyError):  # the process was stopped while it wrote
                continue
        return found


def prepare_workspace(project: Repository, batches: Sequence[int] = ()) -> Workspace:
    """Copy the repository, and the file that is executed before its script.

    Args:
        project: The repository.
        batches: The sizes of batches of data loaders that are made smaller.
    """
    wanted = project.wanted
    folder = (wanted.out / _WORK).resolve()
    folder.mkdir(exist_ok=True)
    copy = folder / "copy"
    unread = copy_repository(wanted.root, copy, without=wanted.out)
    target = folder / "before.py"
    shutil.copy(Path(__file__).with_name("before.py"), target)
    settings = {
        "writable": [str(copy)],
        "made_up": wanted.made_up,
        "autocast": wanted.autocast,
        "workers": wanted.full_size,
        "batches": list(batches),
        "quiet": "WANDB_MODE" not in os.environ,
    }
    target.with_suffix(".json").write_text(json.dumps(settings))
    return Workspace(
        *(folder, copy, target, project.hub_offline, project.arguments.variables, tuple(unread))
    )


def verify_stage(project: Repository) -> StageRecord:
    """Run the script in eager PyTorch and ported, and compare, if that is allowed."""
    wanted, entry, chosen = project.wanted, project.entry, project.arguments
    if entry is None or entry.missing or chosen.lacking:
        return StageRecord("verify", NOT_ASKED, "run", "Nothing was run: see `entry`.")
    arguments = chosen.full if wanted.full_size else chosen.small
    command = ["verify", entry.word, "--steps", str(wanted.steps), "--json"]
    command += [f"--run-option={option}" for option in wanted.run_options]
    command += ["--", *arguments] if arguments else []
    shown = f"tpuport {shlex.join(command)}"
    if not wanted.run:
        answer = "Nothing of the repository was run."
        ask = "call again with --run to let its code run here"
        return StageRecord("verify", NOT_ASKED, "run", answer, ask, {"command": shown})
    batches = [] if wanted.full_size else written_batches(project.files_of_entry)
    work = prepare_workspace(project, batches)
    ended = _compare(project, work, command)
    results = work.folder / "verify"
    seen = _both_seen(work, results)
    if seen["batches"] and ended.status is not None and _json(ended.output) is None:
        # The script may count on its sizes elsewhere.
        work = prepare_workspace(project)
        ended = _compare(project, work, command)
        seen = _both_seen(work, results)
    result: dict[str, Any] = {"command": shown, "log": _log(work, results, ended), "seen": seen}
    if chosen.blanks:
        result["filled_in"] = [f"{blank.setting} {blank.value}" for blank in chosen.blanks]
    smaller = list(chosen.changed) if arguments != chosen.full else []
    smaller += [f"batches: {one['what']} to {one['instead']}" for one in seen["batches"]]
    if smaller:
        result["smaller"] = smaller
    made = [side for side in ("eager", "ported") if (results / side / "record.json").exists()]
    made += ["began"] if (results / "ported").exists() else []
    trained = _has_trained(work)
    record = _verified(ended, result, project, entry, made, trained=trained)
    project.has_no_model = record.state == NEEDS_YOU and not trained
    return record


def _compare(project: Repository, work: Workspace, command: Sequence[str]) -> Finished:
    """Run `tpuport verify` in the copy of the repository."""
    wanted, entry = project.wanted, project.entry
    assert entry is not None
    left = max(1.0, wanted.rounding_minutes - (time.monotonic() - project.began) / 60)
    options = ["--out", str(work.folder / "verify"), "--before", str(work.before)]
    options += [f"--minutes={left:.2f}", f"--original={wanted.root}"]
    if "/" in entry.path:
        options.append(f"--run-option=--path={work.copy}")
    return run_command(
        [command[0], *options, *command[1:]],
        folder=work.copy,
        log=work.folder / "verify.log",
        seconds=60 * wanted.most_minutes,
        environment=work.environment(),
    )


def _has_trained(work: Workspace) -> bool:
    """Return whether a run of the comparison called `backward()`, perhaps in an earlier call."""
    return any((work.folder / "verify" / side / TRAINED).exists() for side in ("eager", "ported"))


def _both_seen(work: Workspace, results: Path) -> dict[str, list[dict[str, str]]]:
    sides = [work.seen(results / side) for side in ("eager", "ported")]
    return {
        kind: [*sides[0][kind], *(one for one in sides[1][kind] if one not in sides[0][kind])]
        for kind in _KINDS
    }


def _log(work: Workspace, results: Path, ended: Finished) -> str:
    """Return the last lines of the run that was the last, or of the command itself."""
    for side in ("ported", "eager"):
        file = results / side / "output.txt"
        text = _end_of(file) if file.is_file() else ""
        if ended.status != 0 and text.strip():
            return work.without_paths(last_lines(text))
    return work.without_paths(ended.tail)


def _end_of(file: Path, most: int = 1 << 20) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - most))
        return opened.read().decode(errors="replace")


def _verified(
    ended: Finished,
    result: dict[str, Any],
    project: Repository,
    entry: StartScript,
    made: Sequence[str],
    *,
    trained: bool,
) -> StageRecord:
    found, wanted = _json(ended.output), project.wanted
    refused = [one["what"] for one in result["seen"]["refused write"]]
    if refused and (ended.status is None or found is None):
        answer = f"The script writes outside of the repository, which is refused: {refused[0]}."
        ask = "let it write below the repository, by its arguments or --set"
        return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)
    if ended.status is None:
        return _out_of_time(result, wanted, made)
    if ended.status == 2 or found is None:
        return _fails_alone(ended, result, project, entry)
    result["verification"] = found
    if found["failure"]:
        return _fails_ported(found, result)
    if not found["programs"]:
        answer = "The script runs, and nothing of it was ported: it calls no module on CUDA."
        ask = "give the argument with which it uses CUDA after --, or with --set"
        if entry.trains and not trained:
            answer = "The script ends by itself before it trains: it called no `backward()`, and no"
            answer += " module on CUDA."
            ask = "give the arguments with which it trains after --, or with --set; the end of its"
            ask += " output may say why it ends"
        return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)
    if found["undecided"]:
        return _undecided(found, result)
    if not found["passed"]:
        wrong = [stage["name"] for stage in found["stages"] if not stage["passed"]]
        answer = f"The port differs from eager PyTorch in {', '.join(wrong)}."
        ask = "; ".join([*found.get("notes", ()), _REPORT])
        return StageRecord("verify", FAILED, "run", answer, ask, result)
    rounding = " but for rounding" if _has_rounding(found) else ""
    answer = f"Losses, gradients, parameters and states of {wanted.steps} steps equal eager"
    answer += f" PyTorch's{rounding}{_on_what(result)}."
    return StageRecord("verify", DONE, "run", answer, "", result)


def _out_of_time(result: dict[str, Any], wanted: PortRequest, made: Sequence[str]) -> StageRecord:
    """Say what a comparison came to that was stopped.

    Args:
        result: Its details.
        wanted: What was asked for.
        made: The runs that made their steps, and `began` if the ported one has begun.
    """
    minutes = f"{wanted.most_minutes:g} minutes"
    answer = f"The script did not make {plural(wanted.steps, 'step')} in {minutes}."
    ask = "give the script smaller sizes after -- or with --set, or more time with --minutes"
    if "ported" in made:
        answer = f"Both runs made their steps; what they gave was not compared in {minutes}."
        ask = "give more time with --minutes"
    elif made and "began" not in made:
        answer = f"The script made its steps, and then did not end in {minutes}."
        ask = "let it end: a thread, or what runs at its exit, may wait for something"
    return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)


def _fails_ported(found: dict[str, Any], result: dict[str, Any]) -> StageRecord:
    """Say why a script fails when it is ported, and whose fault that is."""
    answer, log = "The script runs in eager PyTorch, and fails when it is ported", result["log"]
    if KILLED in found["failure"]:
        return _killed(answer, result)
    error = last_error(log)
    ask = remedy(log) or "see the end of its output; `--run-option` passes options to `tpuport run`"
    if is_own_fault(log):
        answer += ", by a fault of tpuport and not of the script"
        ask = around_a_fault(log)
    return StageRecord(
        *("verify", FAILED, "run", f"{answer}: {error}" if error else f"{answer}.", ask, result)
    )


def _undecided(found: dict[str, Any], result: dict[str, Any]) -> StageRecord:
    if not found["within"]:
        answer = f"Nothing differs{_on_what(result)}, which says nothing: {found['undecided']}."
        ask = "give the script arguments or data with which its losses are finite numbers"
        return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)
    answer = f"The port has {found['within']} of eager PyTorch{_on_what(result)}; could not be"
    answer += f" told from rounding: {found['undecided']}."
    ask = "compare fewer steps with --steps"
    if MORE_TIME in found["undecided"]:
        ask = f"give the search more time with --minutes, or {ask}"
    return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)


def _fails_alone(
    ended: Finished, result: dict[str, Any], project: Repository, entry: StartScript
) -> StageRecord:
    """Say why a script fails in eager PyTorch, and what helps."""
    answer = "The script fails in eager PyTorch, before anything is ported"
    if KILLED in ended.tail:
        return _killed(answer, result)
    error, chosen = last_error(result["log"]), project.arguments
    if is_of_tpuport(result["log"]) or is_own_fault(result["log"]):
        answer = "tpuport, which stands in for CUDA, stops the script before anything is ported"
        answer += f": {error}"
        ask = remedy(result["log"]) or f"see the end of its output; if that is no help, {TELL}"
        return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)
    if "(exit status 0)" in ended.tail:
        answer = "The script ends by itself, without an error and before its steps are recorded"
    answer += f": {error}" if error else f"{_how_it_ended(ended, result['log'])}."
    ask = what_helps(error, project.wanted.root, entry, project.settings_of_entry, chosen)
    return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)


def _how_it_ended(ended: Finished, log: str) -> str:
    """Return how a script ended that showed no error: its status, and what it printed last."""
    if by_signal := ended_by_signal(ended.status):
        return f", and the comparison with it: {by_signal.rstrip('.')}"
    status = re.search(r"exit status (-?\d+)", ended.tail)
    said = [status[0]] if status and not status[1].startswith("-") else []
    if NO_REFERENCE not in log and (line := last_line(log)):  # else the script said nothing
        said.append(f"it ends with: {line.rstrip('.')}")
    return f" ({'; '.join(said)})" if said else ""


def _killed(answer: str, result: dict[str, Any]) -> StageRecord:
    answer += f". {KILLED}"
    ask = "give the script smaller sizes with --set, or a machine with more memory"
    return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)


def _has_rounding(found: dict[str, Any]) -> bool:
    """Return whether something agrees only because rounding does as much in eager PyTorch."""
    checks = [check for stage in found["stages"] for check in stage["checks"]]
    return any(one["limit"] and (one["error"] or 0.0) > one["limit"] for one in checks)


def _on_what(result: dict[str, Any]) -> str:
    """Return what a claim depends on: made-up data, small sizes."""
    made = [one["what"] for one in result["seen"]["made up"]]
    parts = []
    if result.get("filled_in"):
        parts.append(f"with {', '.join(result['filled_in'])} filled in")
    if made:
        more = f" and {len(made) - 2} more" if len(made) > 2 else ""
        parts.append(f"on made-up data ({', '.join(made[:2])}{more} could not be read)")
    if result.get("smaller"):
        parts.append(f"with smaller sizes ({', '.join(result['smaller'])})")
    if result["seen"].get("terminal"):
        parts.append("with a terminal of 80 columns, as it asks for one")
    if result["seen"].get("workers"):
        parts.append("with data loaded without processes")
    if result["seen"]["autocast off"]:
        parts.append("with autocast off, in the dtypes of the inputs")
    return f", {', '.join(parts)}" if parts else ""


def fit_stage(project: Repository) -> StageRecord:
    """Compile the model for a slice: of a function that was named, or the one the script calls."""
    wanted, entry = project.wanted, project.entry
    by_script = wanted.model is None
    if by_script and (entry is None or entry.missing or project.arguments.lacking):
        answer = "No program was compiled for a TPU: see `entry`."
        return StageRecord("fit", NOT_ASKED, "compiled", answer)
    if by_script and project.has_no_model:
        answer = "No program was compiled for a TPU: the script did not get to train a model, as"
        answer += " `verify` says."
        return StageRecord("fit", NOT_ASKED, "compiled", answer)
    target = wanted.model or "tpuport.repository.capture:program"
    if not wanted.run:
        answer = "No program was compiled: that runs code of the repository."
        ask = "call again with --run to let its code run here"
        return StageRecord("fit", NOT_ASKED, "compiled", answer, ask)
    entry = entry or StartScript("", trains=False, reasons=())
    work = prepare_workspace(project)
    name = wanted.slice_name or FIRST_SLICE
    tried: list[str] = []
    result: dict[str, Any] = {}
    while True:
        ended = _compile(project, work, entry, target, name)
        result |= {
            "command": f"tpuport compile {shlex.quote(target)} --topology {name}",
            "slice": name,
            "log": work.without_paths(ended.tail),
            "seen": work.seen(work.folder / "compile"),
            "needs_stack": needed_stack(ended.log),
        }
        found = _json(ended.output)
        if found is None:
            return _not_compiled(ended, result, wanted)
        result["compiled"] = found
        result["share"] = _captured_share(work) if by_script else 1.0
        tried.append(name)
        larger = next_slice(name, found) if wanted.slice_name is None else None
        if found["fits"] or larger is None or len(tried) >= _TRIALS:
            break
        name = larger
    return _fitted(result, tried, project, by_script)


def _captured_share(work: Workspace) -> float:
    """Return how much of what the optimizer trains the compiled model has."""
    file = work.folder / "compile" / SHARE
    return float(json.loads(file.read_text())["share"]) if file.is_file() else 1.0


def _compile(
    project: Repository, work: Workspace, entry: StartScript, target: str, name: str
) -> Finished:
    wanted = project.wanted
    folder = work.folder / "compile"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = {
        "script": str(work.copy / entry.path),
        "arguments": list(project.arguments.single),
        "trains": entry.trains or _has_trained(work),
        "before": str(work.before),
        "folder": str(folder),
    }
    file = folder / "capture.json"
    file.write_text(json.dumps(settings))
    page = folder / "compile.html"

    ended = run_command(
        ["compile", target, "--topology", name, "--json", "--quick", "--out", str(page)],
        folder=work.copy,
        log=work.folder / "compile.log",
        seconds=60 * wanted.most_minutes,
        environment={**work.environment(), SETTINGS: str(file)},
    )
    if page.is_file():
        os.replace(page, wanted.out / "compile.html")
    return ended


def _not_compiled(ended: Finished, result: dict[str, Any], wanted: PortRequest) -> StageRecord:
    answer = "The model was not compiled"
    if ended.status is None:
        answer += f" in {wanted.most_minutes:g} minutes."
        ask = "give more time with --minutes, or smaller sizes with --set"
        return StageRecord("fit", FAILED, "compiled", answer, ask, result)
    if died := how_it_died(ended.status, ended.log):
        ask = "give the script smaller sizes with --set, or a machine with more memory"
        if died != KILLED:
            ask = _around_a_crash(ended)
        return StageRecord("fit", FAILED, "compiled", f"{answer}. {died}", ask, result)
    log = result["log"]
    if is_own_fault(log):
        answer += ", by a fault of tpuport and not of the script"
    error = last_error(log) or last_line(log)
    answer += f": {error}" if error else "."
    ask = remedy(log) or "see the end of its output"
    ask += "; or name a function that returns the model and its inputs with --model"
    ask += " file.py:function"
    if is_own_fault(log):
        ask = f"{TELL}; {ask}"
    return StageRecord("fit", FAILED, "compiled", answer, ask, result)


def _around_a_crash(ended: Finished) -> str:
    """Return what to do about a process that crashed while it compiled."""
    ask = "try another batch size with --set, another slice with --for, or another libtpu"
    if overflowed(ended.status, ended.log):
        ask = f"allow an unlimited stack (`ulimit -Hs unlimited`, by root) and call again; or {ask}"
    return f"{ask}; {TELL}"


def _fitted(
    result: dict[str, Any], tried: Sequence[str], project: Repository, by_script: bool
) -> StageRecord:
    wanted, chosen = project.wanted, project.arguments
    found, name = result["compiled"], result["slice"]
    fits = bool(found["fits"])
    what = f"{found['model']}, {found['what']}"
    answer = f"{what}: {'fits' if fits else 'does not fit'} {name}"
    if wanted.slice_name is None and fits:
        too_small = ", ".join(one for one in tried if one != name)
        answer += ", the smallest slice that was tried"
        answer += f" after {too_small}" if too_small else ""
    answer += f", {_tenths(found['peak'] / 2**30, '')} GiB a chip"
    seconds = sum(part["seconds"] for part in (found.get("estimate") or {}).get("parts", ()))
    answer += f", {_tenths(1e3 * seconds, 'about ')} ms a step." if seconds else "."
    if by_script:
        answer += " The model and the inputs are those of the script's first call"
        share = result["share"]
        if share < _WHOLE:
            answer += f", a part with {share:.0%} of what the optimizer trains"
        made = [one["what"] for one in result["seen"]["made up"]]
        answer += f", on made-up data ({made[0]} could not be read)" if made else ""
        filled = [f"{blank.setting} {blank.value}" for blank in chosen.blanks]
        answer += f", with {', '.join(filled)} filled in." if filled else "."
        if result["seen"]["autocast off"]:
            answer += " The script's autocast is not part of it."
        if found["what"] == "training step":
            answer += " A loss that the script computes outside of the model is not in the program."
    if result["needs_stack"]:
        answer += " libtpu crashes on it unless the stack is unlimited (`ulimit -s unlimited`), as"
        answer += " run.sh and the launch files say."
    ask = "" if fits else "a larger slice with --for, or a smaller batch with --set"
    return StageRecord("fit", DONE if fits else FAILED, "compiled", answer, ask, result)


def _tenths(number: float, before: str) -> str:
    """Return a number with one decimal and a word before it; one near zero is said to be small."""
    return f"{before}{number:.1f}" if number >= 0.05 else "less than 0.1"


def _json(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a command printed, the longest one.

    A script prints before it, and what it imports may print while Python ends.
    """
    starts = [0] if text.startswith("{") else []
    starts += [match.start() + 1 for match in re.finditer(r"\n\{", text)]
    read, found, size = json.JSONDecoder(), None, 0
    for start in starts:
        try:
            made, end = read.raw_decode(text, start)
        except ValueError:
            continue
        if isinstance(made, dict) and end - start > size:
            found, size = made, end - start
    return found
