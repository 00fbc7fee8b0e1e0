"""`tpuport port`: all that can be said about a repository, in one folder."""

from collections.abc import Callable
from dataclasses import replace

from tpuport.foundation.errors import UsageError
from tpuport.repository.launch import write_launch_files
from tpuport.repository.report import RepositoryReport, is_ours, read_stages
from tpuport.repository.stages import (
    NEEDS_YOU,
    NOT_ASKED,
    STAGES,
    PortRequest,
    Repository,
    StageRecord,
    read_repository,
    stage_key,
)
from tpuport.sharding.topology import find_topology

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
    find_topology(wanted.slice_name)
    wanted = replace(wanted, root=wanted.root.resolve())
    if not is_ours(wanted.out):
        raise UsageError(f"{wanted.out} holds other files. Name another folder with --out.")
    tell("reading the repository")
    project = read_repository(wanted)
    wanted.out.mkdir(parents=True, exist_ok=True)
    known, digest = read_stages(wanted.out), project.digest()
    waiting = {n: StageRecord(n, NOT_ASKED, "read", "This was not reached.") for n in STAGES}
    report = RepositoryReport(str(wanted.root), wanted.slice_name, waiting, dict(_FILES))
    for name, (stage, _) in STAGES.items():
        key, before = stage_key(name, project, digest), known.get(name)
        if before is not None and before.key == key and before.state != NEEDS_YOU:
            done = before
        else:
            tell(name)
            done = replace(stage(project), key=key)
        report = replace(report, stages={**report.stages, name: done})
        report.save(wanted.out)
    report = replace(report, files={**report.files, **_launched(project)})
    report.save(wanted.out)
    return report


def _launched(project: Repository) -> dict[str, str]:
    """Write the files that start the script; return what each is for."""
    wanted, entry = project.wanted, project.entry
    if entry is None:
        return {}
    written = write_launch_files(
        *(wanted.root, wanted.out, entry.path),
        *(wanted.arguments, wanted.run_options, wanted.slice_name),
    )
    return {file: _LAUNCH[file] for file in written}
