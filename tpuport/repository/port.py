"""`tpuport port`: all that can be said about a repository, in one folder."""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.repository.launch import write_launch_files
from tpuport.repository.report import RepositoryReport, is_ours, read_stages
from tpuport.repository.runs import fit_stage, verify_stage
from tpuport.repository.stages import (
    DONE,
    NOT_ASKED,
    PortRequest,
    Repository,
    StageRecord,
    entry_stage,
    patch_stage,
    read_repository,
    read_stage,
)
from tpuport.sharding.topology import find_topology

# The slice of the launch files if nothing was compiled and none was asked for.
_USUAL_SLICE = "v6e-8"
# Locked while a call is at work; a folder with nothing else is no result of an earlier call.
_LOCK = ".report.lock"


def _arguments(wanted: PortRequest) -> list[Any]:
    return [wanted.entry, list(wanted.arguments), dict(wanted.changes)]


# A stage and the options that it depends on, besides the files and the entry point.
STAGES: dict[str, tuple[Callable[[Repository], StageRecord], Callable[[PortRequest], Any]]] = {
    "read": (read_stage, lambda wanted: None),
    "entry": (entry_stage, _arguments),
    "patch": (patch_stage, lambda wanted: None),
    "verify": (
        verify_stage,
        lambda wanted: [
            *(_arguments(wanted), wanted.run, wanted.steps, wanted.minutes),
            *(list(wanted.run_options), wanted.full_size, wanted.made_up, wanted.autocast),
        ],
    ),
    "fit": (
        fit_stage,
        lambda wanted: [
            *(_arguments(wanted), wanted.model, wanted.run, wanted.slice_name, wanted.minutes),
            *(wanted.made_up, wanted.autocast),
        ],
    ),
}


def stage_key(name: str, project: Repository, digest: str) -> str:
    """Return what the outcome of a stage depends on."""
    missing = project.entry.missing if project.entry else ()
    parts = [name, digest, missing, STAGES[name][1](project.wanted)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


_FILES = {
    "report.html": "this page",
    "report.json": "the same for programs",
    "port.patch": "the proved rewrites, for `git apply`",
    "unproved.patch": "all rewrites, those that may change results as well",
}
_LAUNCH = {
    "run.sh": "starts the script",
    "tpu_vm.sh": "a TPU VM by queued resources",
    "jobset.yaml": "GKE by JobSet",
    "sky.yaml": "SkyPilot",
}


def port_repository(wanted: PortRequest, tell: Callable[[str], None]) -> RepositoryReport:
    """Take a repository through the stages, and write the report after each.

    A stage that an earlier call finished is not done again while its files and options are the
    same.

    Args:
        wanted: What was asked for.
        tell: Called with each stage before it begins.

    Raises:
        UsageError: the folder for results holds something else, or there is no such repository,
            script or slice.
    """
    if wanted.slice_name is not None:
        find_topology(wanted.slice_name)
    wanted = replace(wanted, root=wanted.root.resolve())
    if not is_ours(wanted.out):
        raise UsageError(f"{wanted.out} holds other files. Name another folder with --out.")
    tell("reading the repository")
    project = read_repository(wanted)
    settings = project.arguments  # a wrong --set is said before anything is written
    del settings
    try:
        wanted.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted.out):
            pass
    except OSError as error:
        raise UsageError(
            f"{wanted.out} cannot be written to ({error.strerror}). Name another folder with --out."
        ) from None
    with _alone_in(wanted.out):
        return _take_through(wanted, project, tell)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other calls out of a folder for results: each would delete the copy the other runs in.

    The lock ends with this process, however it ends.

    Raises:
        UsageError: another call is at work there.
    """
    with (folder / _LOCK).open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another call of `tpuport port` is at work in {folder}. Wait for its end, or name"
                " another folder with --out."
            ) from None
        except (ImportError, OSError):  # a system, or a file system, without such locks
            pass
        yield


def _take_through(
    wanted: PortRequest, project: Repository, tell: Callable[[str], None]
) -> RepositoryReport:
    known, digest = read_stages(wanted.out), project.digest()
    waiting = {n: StageRecord(n, NOT_ASKED, "read", "This was not reached.") for n in STAGES}
    report = RepositoryReport(
        str(wanted.root), wanted.slice_name or _USUAL_SLICE, waiting, dict(_FILES)
    )
    for name, (stage, _) in STAGES.items():
        key, before = stage_key(name, project, digest), known.get(name)
        if before is not None and before.key == key and before.state in (DONE, NOT_ASKED):
            done = before
        else:
            tell(name)
            done = replace(stage(project), key=key)
        report = replace(report, stages={**report.stages, name: done})
        if name == "patch":  # what follows runs code for minutes, and may be stopped
            launched = _launched(project, report.slice_name, unlimited_stack=False)
            report = replace(report, files={**_FILES, **launched})
        report.save(wanted.out)
    fitting = report.stages["fit"].result.get("slice", report.slice_name)
    report = replace(report, slice_name=fitting)
    needs_stack = bool(report.stages["fit"].result.get("needs_stack"))
    launched = _launched(project, fitting, unlimited_stack=needs_stack)
    page = wanted.out / "compile.html"
    if "compiled" in report.stages["fit"].result and page.is_file():
        launched = {page.name: "memory and time on the slice", **launched}
    else:  # one of an earlier call says nothing about what is asked now
        page.unlink(missing_ok=True)
    report = replace(report, files={**_FILES, **launched})
    report.save(wanted.out)
    return report


def _launched(project: Repository, slice_name: str, *, unlimited_stack: bool) -> dict[str, str]:
    """Write the files that start the script; return what each is for."""
    wanted, entry = project.wanted, project.entry
    if entry is None:
        for name in _LAUNCH:  # of an earlier call
            (wanted.out / name).unlink(missing_ok=True)
        return {}
    chosen = project.arguments
    written = write_launch_files(
        *(wanted.root, wanted.out, [entry.word, *chosen.launched]),
        *(wanted.run_options, slice_name, chosen.blanks),
        unlimited_stack=unlimited_stack,
    )
    return {file: _LAUNCH[file] for file in written}
