"""What `tpuport port` does with a repository, stage by stage; each leaves a record."""

import difflib
import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import write_atomically
from tpuport.foundation.reporting.markup import plural
from tpuport.foundation.version import __version__
from tpuport.lint.cache import Cache
from tpuport.lint.catalogue import known_codes
from tpuport.lint.files import find_files
from tpuport.lint.fixing import Change, Request, rewrite_files
from tpuport.lint.outcome import decide
from tpuport.lint.records import Checked
from tpuport.lint.run import run as lint_files
from tpuport.lint.settings import Settings, find_config, load_settings
from tpuport.lint.summary import BLOCKING, summarise
from tpuport.repository.processes import Finished, run_command
from tpuport.repository.scripts import StartScript, find_scripts, shown_launches

DONE, NEEDS_YOU, NOT_ASKED, FAILED = "done", "needs you", "not asked", "failed"
_MOST_FINDINGS = 200
_SCRATCH = "work"


@dataclass(frozen=True)
class PortRequest:
    """What a person asked for.

    Attributes:
        root: The folder of the repository.
        out: The folder for the results.
        entry: The script, relative to the repository; None to propose one.
        arguments: Arguments of the script.
        run: Whether the code of the repository may run.
        steps: The optimizer steps to compare.
        model: A function for `tpuport compile`, as `file.py:function`.
        slice_name: The slice of TPUs, such as `v6e-8`.
        minutes: The time that running, and compiling, may take.
        run_options: Options of `tpuport run`.
    """

    root: Path
    out: Path
    entry: str | None = None
    arguments: Sequence[str] = ()
    run: bool = False
    steps: int = 5
    model: str | None = None
    slice_name: str = "v6e-8"
    minutes: float = 15.0
    run_options: Sequence[str] = ()


@dataclass(frozen=True)
class StageRecord:
    """The outcome of one stage, as `report.json` has it.

    Attributes:
        name: The stage.
        state: `done`, `needs you`, `not asked` or `failed`.
        how: How it was found out: `read`, `run` or `compiled`.
        answer: The outcome in a sentence.
        next: What a person has to do, if anything.
        result: Its details.
        key: What it depends on: it is done again once that changes.
    """

    name: str
    state: str
    how: str
    answer: str
    next: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    key: str = ""


@dataclass
class Repository:
    """A repository on its way through the stages."""

    wanted: PortRequest
    settings: Settings
    files: list[Path]
    checked: list[Checked]
    problems: tuple[str, ...]
    entries: list[StartScript]

    @property
    def entry(self) -> StartScript | None:
        """Return the script that was named, or the likeliest one."""
        wanted = self.wanted.entry
        if wanted is None:
            return self.entries[0] if self.entries else None
        known = {one.path: one for one in self.entries}
        return known.get(wanted) or StartScript(wanted, trains=False, reasons=("it was named",))

    def digest(self) -> str:
        """Return a digest of the Python files and of the version of tpuport."""
        found = hashlib.sha256(__version__.encode())
        for path in self.files:
            found.update(path.relative_to(self.wanted.root).as_posix().encode() + b"\0")
            found.update(hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()


def read_repository(wanted: PortRequest) -> Repository:
    """Lint a repository and find its entry points, without running any of it.

    Raises:
        UsageError: there is no such folder or script.
    """
    if not wanted.root.is_dir():
        raise UsageError(f"{wanted.root} is no folder.")
    if wanted.entry is not None and not (wanted.root / wanted.entry).is_file():
        raise UsageError(f"There is no script {wanted.entry} in {wanted.root}.")
    settings = load_settings(find_config(wanted.root), start=wanted.root)
    found = find_files([str(wanted.root)], settings, force_exclude=False)
    inside = wanted.out.resolve()
    files = [path.resolve() for path in found.files if not path.resolve().is_relative_to(inside)]
    checked = lint_files(files)
    problems = [str(p) for p in (*found.problems, *(p for one in checked for p in one.problems))]
    scripts = [path for path in files if path.suffix == ".py"]
    return Repository(
        wanted, settings, files, checked, tuple(problems), find_scripts(wanted.root, scripts)
    )


def read_stage(project: Repository) -> StageRecord:
    """Say what stands in the way, in the order in which to work on it."""
    codes = known_codes(Cache(None))
    outcome = decide(project.checked, project.settings, known=codes)
    summary = summarise(outcome)
    work = sorted(
        (f for f in outcome.counted if f.severity in BLOCKING), key=lambda f: (f.code, f.key)
    )
    todo = [
        {
            "place": _relative(f.place, project.wanted.root),
            "code": f.code,
            "what": f.message,
            "fix": f"tpuport rewrite ({f.safety})" if f.safety in ("exact", "close") else "by hand",
            "line": f.lines[0].strip() if f.lines else "",
        }
        for f in work
    ]
    result = {
        "files": len(project.files),
        "unread": [_relative(problem, project.wanted.root) for problem in project.problems],
        "step_functions": summary.functions,
        "ready": summary.ready,
        "findings": summary.total,
        "todo": todo[:_MOST_FINDINGS],
        "todo_left_out": max(0, len(todo) - _MOST_FINDINGS),
        "host_code_for_cuda": {
            _relative(file, project.wanted.root): list(lines) for file, lines in summary.devices
        },
    }
    if not project.files:
        answer = "There is no Python file here."
        return StageRecord("read", NEEDS_YOU, "read", answer, "name another folder", result)
    share = f"{summary.ready} of {summary.functions} functions of traced steps are ready"
    by_itself = sum(item["fix"] != "by hand" for item in todo)
    answer = f"{plural(len(project.files), 'file')}: {share}. {plural(len(todo), 'finding')}"
    answer += f" would break it or change its results; {by_itself} of them are rewritten for you."
    return StageRecord("read", DONE, "read", answer, "", result)


def entry_stage(project: Repository) -> StageRecord:
    """Propose the script to start."""
    entry = project.entry
    others = [asdict(one) for one in project.entries[:10]]
    if entry is None:
        answer = "No script of the repository can be started: none has a main part, and no shell"
        answer += " script or document starts one."
        return StageRecord(
            "entry", NEEDS_YOU, "read", answer, "name a script with --entry", {"candidates": others}
        )
    result = {"script": entry.path, "candidates": others, **asdict(entry)}
    answer = f"{entry.path}: {', '.join(entry.reasons)}."
    if entry.missing:
        names = ", ".join(entry.missing)
        return StageRecord(
            *("entry", NEEDS_YOU, "read", f"{answer} Not installed here: {names}."),
            *(f"install {names}", result),
        )
    return StageRecord("entry", DONE, "read", answer, "", result)


def patch_stage(project: Repository) -> StageRecord:
    """Write the rewrites that are proved to `port.patch`, and the others to `unproved.patch`."""
    pairs = [
        (p, one) for p, one in zip(project.files, project.checked, strict=True) if one.findings
    ]
    counts, texts = {}, {}
    for name, unsafe in (("port.patch", False), ("unproved.patch", True)):
        request = Request(project.settings, known_codes(Cache(None)), unsafe)
        done = rewrite_files(pairs, request)
        changes = [one for one in done if isinstance(one, Change) and one.changed]
        texts[name] = "".join(_diff(change, project.wanted.root) for change in changes)
        counts[name] = sum(sum(change.applied.values()) for change in changes)
    if counts["unproved.patch"] == counts["port.patch"]:
        texts["unproved.patch"] = ""
    for name, text in texts.items():
        write_atomically(project.wanted.out / name, text.encode())
    rest = counts["unproved.patch"] - counts["port.patch"]
    answer = f"{counts['port.patch']} rewrites are proved not to change results"
    answer += f"; {rest} more are in unproved.patch, which has both." if rest else "."
    result = {"proved": counts["port.patch"], "unproved": rest}
    return StageRecord("patch", DONE, "read", answer, "", result)


def verify_stage(project: Repository) -> StageRecord:
    """Run the script in eager PyTorch and ported, and compare, if that is allowed."""
    wanted, entry = project.wanted, project.entry
    if entry is None or entry.missing:
        return StageRecord("verify", NOT_ASKED, "run", "Nothing was run: see `entry`.")
    command = ["verify", entry.path, "--steps", str(wanted.steps), "--json"]
    command += [f"--run-option={option}" for option in wanted.run_options]
    command += ["--", *wanted.arguments] if wanted.arguments else []
    shown = f"tpuport {shlex.join(command)}"
    if not wanted.run:
        answer = "Nothing of the repository was run."
        ask = "call again with --run to let its code run here"
        return StageRecord("verify", NOT_ASKED, "run", answer, ask, {"command": shown})
    folder = (wanted.out / _SCRATCH).resolve()
    folder.mkdir(exist_ok=True)
    command[1:1] = ["--out", str(folder / "verify")]
    seconds = 60 * wanted.minutes
    ended = run_command(command, folder=wanted.root, log=folder / "verify.log", seconds=seconds)
    result = {"command": shown, "log": ended.tail}
    if ended.status is None:
        answer = f"The script did not make {wanted.steps} steps in {wanted.minutes:g} minutes."
        ask = "give the script smaller sizes after --, or more time with --minutes"
        return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)
    return _verified(ended, result, wanted, entry)


def _verified(
    ended: Finished, result: dict[str, Any], wanted: PortRequest, entry: StartScript
) -> StageRecord:
    found = _json(ended.output)
    if ended.status == 2 or found is None:
        answer = "The script fails in eager PyTorch, before anything is ported."
        ask = "make it run with `python` first: give the arguments that it needs after --"
        ask += "".join(f"; {launch}" for launch in shown_launches(entry)[:1])
        return StageRecord("verify", NEEDS_YOU, "run", answer, ask, result)
    result["verification"] = found
    if found["failure"]:
        answer = "The script runs in eager PyTorch, and fails when it is ported."
        ask = "see the end of its output; `--run-option` passes options to `tpuport run`"
        return StageRecord("verify", FAILED, "run", answer, ask, result)
    if not found["passed"]:
        wrong = [stage["name"] for stage in found["stages"] if not stage["passed"]]
        answer = f"The port differs from eager PyTorch in {', '.join(wrong)}."
        ask = "set dropout to 0 if the model draws random numbers; otherwise report it"
        return StageRecord("verify", FAILED, "run", answer, ask, result)
    answer = (
        f"Losses, gradients, parameters and states of {wanted.steps} steps equal eager PyTorch's."
    )
    return StageRecord("verify", DONE, "run", answer, "", result)


def fit_stage(project: Repository) -> StageRecord:
    """Compile the model for a slice, if a function that makes it was named."""
    wanted = project.wanted
    if wanted.model is None:
        answer = "No program was compiled for a TPU."
        ask = "name a function that returns the model and its inputs with --model file.py:function"
        return StageRecord("fit", NOT_ASKED, "compiled", answer, ask)
    command = ["compile", wanted.model, "--topology", wanted.slice_name, "--json"]
    result: dict[str, Any] = {"command": f"tpuport {shlex.join(command)}"}
    if not wanted.run:
        answer = "No program was compiled: that calls a function of the repository."
        ask = "call again with --run to let its code run here"
        return StageRecord("fit", NOT_ASKED, "compiled", answer, ask, result)
    folder = (wanted.out / _SCRATCH).resolve()
    folder.mkdir(exist_ok=True)
    seconds = 60 * wanted.minutes
    page = (wanted.out / "compile.html").resolve()
    ended = run_command(
        [*command, "--out", str(page)],
        folder=wanted.root,
        log=folder / "compile.log",
        seconds=seconds,
    )
    result["log"] = ended.tail
    found = _json(ended.output)
    if found is None:
        late = ended.status is None
        answer = "The model was not compiled" + (
            f" in {wanted.minutes:g} minutes." if late else "."
        )
        ask = "give more time with --minutes" if late else "see the end of its output"
        return StageRecord("fit", FAILED, "compiled", answer, ask, result)
    result["compiled"] = found
    fits = bool(found["fits"])
    answer = f"The program {'fits' if fits else 'does not fit'} {wanted.slice_name}."
    ask = "" if fits else f"tpuport compile {wanted.model} -t {wanted.slice_name} --search"
    return StageRecord("fit", DONE if fits else FAILED, "compiled", answer, ask, result)


# A stage and the options that it depends on, besides the files and the entry point.
STAGES: dict[str, tuple[Callable[[Repository], StageRecord], Callable[[PortRequest], Any]]] = {
    "read": (read_stage, lambda wanted: None),
    "entry": (entry_stage, lambda wanted: wanted.entry),
    "patch": (patch_stage, lambda wanted: None),
    "verify": (
        verify_stage,
        lambda wanted: [
            *(wanted.entry, list(wanted.arguments), wanted.run, wanted.steps),
            *(wanted.minutes, list(wanted.run_options)),
        ],
    ),
    "fit": (
        fit_stage,
        lambda wanted: [wanted.model, wanted.run, wanted.slice_name, wanted.minutes],
    ),
}


def stage_key(name: str, project: Repository, digest: str) -> str:
    """Return what the outcome of a stage depends on."""
    missing = project.entry.missing if project.entry else ()
    parts = [name, digest, missing, STAGES[name][1](project.wanted)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _relative(place: str, root: Path) -> str:
    """Return a place as the repository names it: findings have the path as it was given."""
    for prefix in (f"{root.resolve().as_posix()}/", f"{root.as_posix()}/"):
        place = place.replace(prefix, "")
    return place


def _diff(change: Change, root: Path) -> str:
    """Return a change as a diff that `git apply` takes in the folder of the repository."""
    assert change.path is not None
    name = change.path.relative_to(root.resolve()).as_posix()
    before, after = (text.splitlines(keepends=True) for text in (change.before, change.after))
    lines = []
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _json(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a command printed, after whatever a script printed before it."""
    start = 0 if text.startswith("{") else text.find("\n{") + 1
    try:
        found = json.loads(text[start:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
