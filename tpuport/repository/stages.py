"""The stages of `tpuport port` that run nothing; each leaves a record."""

import difflib
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import write_atomically
from tpuport.foundation.reporting.markup import plural
from tpuport.foundation.version import __version__
from tpuport.lint.cache import Cache
from tpuport.lint.catalogue import known_codes
from tpuport.lint.files import find_files, shown_path
from tpuport.lint.fixing import Change, Request, rewrite_files
from tpuport.lint.outcome import decide
from tpuport.lint.records import Checked, Reported
from tpuport.lint.run import run as lint_files
from tpuport.lint.settings import Settings, load_settings
from tpuport.lint.settings import find_config as find_table
from tpuport.lint.summary import BLOCKING, summarise
from tpuport.repository.hydra_files import config_names, find_config
from tpuport.repository.packages import how_to_install
from tpuport.repository.scripts import (
    StartScript,
    add_packages,
    find_scripts,
    find_texts,
    shown_launches,
)
from tpuport.repository.sizes import (
    HYDRA,
    ChosenArguments,
    ScriptSettings,
    choose_arguments,
    read_settings,
)
from tpuport.verify.hub import why_unreachable

DONE, NEEDS_YOU, NOT_ASKED, FAILED = "done", "needs you", "not asked", "failed"
_MOST_FINDINGS = 200
# What is a fault inside of a program only: `loss.backward()` of a training loop.
_ANSWERED = {"TPU419"}
# Minutes: of all runs of a comparison, or of one slice that is compiled for; and of all up to the
# verdict of the comparison.
_STOPPED_AFTER, _IN_TIME = 15.0, 5.0
# The part of them after which no more is done: the rest is for stopping, and for writing what was
# found. A command that is stopped as a whole has written nothing.
_SEARCHED = 0.95


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
        slice_name: The slice of TPUs, such as `v6e-8`; None for the smallest that fits.
        minutes: The time that the comparison, and compiling for a slice, may take; None for the
            usual one, with less to tell a difference from rounding.
        run_options: Options of `tpuport run`.
        changes: Settings of the script by name.
        full_size: Whether the comparison has the sizes of the script, not small ones.
        made_up: Whether data that is not there is made up.
        autocast: Whether regions of autocast stay on.
    """

    root: Path
    out: Path
    entry: str | None = None
    arguments: Sequence[str] = ()
    run: bool = False
    steps: int = 5
    model: str | None = None
    slice_name: str | None = None
    minutes: float | None = None
    run_options: Sequence[str] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    full_size: bool = False
    made_up: bool = True
    autocast: bool = False

    @property
    def most_minutes(self) -> float:
        """Return the minutes after which a comparison, or compiling for a slice, is stopped."""
        return _STOPPED_AFTER if self.minutes is None else self.minutes

    @property
    def rounding_minutes(self) -> float:
        """Return the minutes after which no more is done to tell a difference from rounding."""
        return _SEARCHED * (_IN_TIME if self.minutes is None else self.minutes)


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
    """A repository on its way through the stages.

    Attributes:
        wanted: What a person asked for.
        settings: Those of lint.
        files: Its Python files and notebooks.
        checked: What lint found in each.
        problems: Files that could not be read.
        entries: The scripts that can be started.
        others: The files that say how scripts are started.
        began: When this call did.
        has_no_model: Whether a run in this call came to no gradient of a model.
    """

    wanted: PortRequest
    settings: Settings
    files: list[Path]
    checked: list[Checked]
    problems: tuple[str, ...]
    entries: list[StartScript]
    others: list[Path]
    began: float = field(default_factory=time.monotonic)
    has_no_model: bool = False

    @cached_property
    def entry(self) -> StartScript | None:
        """Return the script that was named, or the likeliest one."""
        wanted, scripts = self.wanted.entry, self.scripts
        known = {one.path: one for one in self.entries}
        if wanted is None:
            found = self.entries[0] if self.entries else None
        else:
            named = StartScript(wanted, trains=False, reasons=("it was named",))
            found = known.get(wanted) or named
        if found is None:
            return None
        config = find_config(self.wanted.root / found.path, found, *self._words)
        targets = config.targets() if config is not None else set()
        return add_packages(found, self.wanted.root, scripts, targets)

    @property
    def _words(self) -> tuple[list[str], list[str]]:
        """Return the arguments and the settings that a person gave, as hydra takes them."""
        changes = [f"{name}={value}" for name, value in self.wanted.changes.items()]
        return list(self.wanted.arguments), changes

    @property
    def scripts(self) -> list[Path]:
        """Return the Python files."""
        return [path for path in self.files if path.suffix == ".py"]

    @cached_property
    def settings_of_entry(self) -> ScriptSettings:
        """Return how the entry point takes its settings."""
        assert self.entry is not None
        script, *modules = self.files_of_entry
        return read_settings(script, modules, self.entry, *self._words)

    @property
    def files_of_entry(self) -> list[Path]:
        """Return the script, and the modules of the repository that it imports."""
        assert self.entry is not None
        return [self.wanted.root / name for name in (self.entry.path, *self.entry.modules)]

    @cached_property
    def arguments(self) -> ChosenArguments:
        """Return the arguments of the entry point.

        Raises:
            UsageError: it has no setting of a name that was given.
        """
        if self.entry is None:
            return ChosenArguments((), ())
        wanted = self.wanted
        return choose_arguments(
            self.settings_of_entry, self.entry, wanted.arguments, wanted.changes
        )

    @cached_property
    def hub_offline(self) -> str:
        """Return why the Hugging Face hub cannot be reached, the same for all runs."""
        return why_unreachable(self.entry.packages) if self.entry is not None else ""

    def digest(self) -> str:
        """Return a digest of the files that are read, and of the version of tpuport."""
        found = hashlib.sha256(__version__.encode())
        for path in (*self.files, *self.others):
            found.update(os.fsencode(path.relative_to(self.wanted.root)) + b"\0")
            with suppress(OSError):  # a link to nothing, or one that may not be read
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
    settings = load_settings(find_table(wanted.root), start=wanted.root)
    found = find_files([str(wanted.root)], settings, inside=wanted.root)
    inside = wanted.out.resolve()
    files = [path.resolve() if path.exists() else path.absolute() for path in found.files]
    files = [path for path in files if not path.is_relative_to(inside)]
    checked = lint_files(files)
    problems = [str(p) for p in (*found.problems, *(p for one in checked for p in one.problems))]
    scripts = find_scripts(wanted.root, [path for path in files if path.suffix == ".py"])
    others = [path for path in find_texts(wanted.root) if not path.is_relative_to(inside)]
    return Repository(wanted, settings, files, checked, tuple(problems), scripts, others)


def read_stage(project: Repository) -> StageRecord:
    """Say what stands in the way, in the order in which to work on it."""
    codes = known_codes(Cache(None))
    outcome = decide(project.checked, project.settings, known=codes)
    summary = summarise(outcome)
    work = sorted(
        (f for f in outcome.counted if f.severity in BLOCKING and not _is_answered(f)),
        key=lambda f: (f.code, f.key),
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
    if unread := result["unread"]:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        answer += f" Not read: {'; '.join(unread[:3])}{more}."
    return StageRecord("read", DONE, "read", answer, "", result)


def _is_answered(finding: Reported) -> bool:
    """Return whether `tpuport run` needs no change there: only calls of modules are programs."""
    return finding.code in _ANSWERED and not finding.function


def entry_stage(project: Repository) -> StageRecord:
    """Propose the script to start."""
    entry = project.entry
    others = [asdict(one) for one in project.entries[:10]]
    if entry is None:
        answer = "No script of the repository can be started: none has a main part, and no shell"
        answer += " script or document starts one."
        unread = [_relative(problem, project.wanted.root) for problem in project.problems]
        ask = "name a script with --entry, or a function that returns a model and its inputs with"
        ask += " --model file.py:function"
        if unread:
            ask = f"mend what cannot be read ({'; '.join(unread[:3])}), or {ask}"
        return StageRecord("entry", NEEDS_YOU, "read", answer, ask, {"candidates": others})
    chosen = project.arguments
    result = {"script": entry.path, "candidates": others, **asdict(entry)}
    result |= {"settings": project.settings_of_entry.style, "arguments": asdict(chosen)}
    answer = f"{entry.path}: {', '.join(entry.reasons)}."
    if not chosen.full and (shown := shown_launches(entry)):
        answer += f" Here it starts without arguments; {shown[0]}, which you can give after --."
    if entry.maybe_missing:
        names = ", ".join(entry.maybe_missing)
        answer += f" Imported in some cases only, and not installed here: {names}."
    if entry.missing:
        names = ", ".join(entry.missing)
        return StageRecord(
            *("entry", NEEDS_YOU, "read", f"{answer} Not installed here: {names}."),
            *(how_to_install(entry.missing, project.wanted.root, entry.maybe_missing), result),
        )
    lacking = list(chosen.lacking)
    if project.settings_of_entry.style == HYDRA and not project.settings_of_entry.options:
        names = config_names(project.wanted.root / entry.path)
        lacking += [f"--config-name (one of {', '.join(names[:12])})"] if names else []
    if lacking:
        needs = ", ".join(lacking)
        return StageRecord(
            *("entry", NEEDS_YOU, "read", f"{answer} It needs {needs}."),
            *("give the values after --, or with --set", result),
        )
    ask = "; ".join(f"fill in {blank.hint}" for blank in chosen.blanks)
    ask = f"{ask}: run.sh and the launch files have a blank for it" if ask else ""
    if names := ", ".join(name for name, _ in chosen.variables):
        set_them = f"set the environment variables that its configuration reads: {names}"
        ask = f"{ask}; {set_them}" if ask else set_them
    return StageRecord("entry", DONE, "read", answer, ask, result)


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
        write_atomically(project.wanted.out / name, text.encode(errors="surrogateescape"))
    rest = counts["unproved.patch"] - counts["port.patch"]
    answer = f"{counts['port.patch']} rewrites are proved not to change results"
    answer += f"; {rest} more are in unproved.patch, which has both." if rest else "."
    result = {"proved": counts["port.patch"], "unproved": rest}
    return StageRecord("patch", DONE, "read", answer, "", result)


def _relative(place: str, root: Path) -> str:
    """Return a place as the repository names it: findings have the path as it was given."""
    for prefix in (root.resolve().as_posix(), root.as_posix(), shown_path(root)):
        place = place.replace(f"{prefix}/", "")
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
