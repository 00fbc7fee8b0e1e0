"""`tpuport rewrite`: applies the rules' fixes to files, as a diff, in place or as a copy."""

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import FAILED, WRONG_CALL, errors_as_exit_codes, has_color, printable, say
from tpuport.cli._options import Choice
from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.markup import plural

if TYPE_CHECKING:
    from tpuport.lint.fixing import Change
    from tpuport.lint.records import Checked, Problem
    from tpuport.lint.settings import Settings

    # A file, and what was found in it.
    Pair = tuple[Path, Checked]

_WHERE = "Where to"
Diff = Annotated[
    bool,
    typer.Option("--diff", rich_help_panel=_WHERE, help="Print the changes (the default)."),
]
Write = Annotated[
    bool, typer.Option("--write", rich_help_panel=_WHERE, help="Change the files themselves.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        rich_help_panel=_WHERE,
        help="Write all files, changed or not, to another folder.",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="PACKAGE",
        rich_help_panel="What to do",
        help="Take a package out of scripts instead: torch_xla. Files that belong together, such as"
        " a class and those that extend it, go into one call.",
    ),
]
_PACKAGE = "torch_xla"


@dataclass(frozen=True)
class _Target:
    """Where changes go: into the files, to a folder, or as a diff or JSON to standard output."""

    write: bool
    out: Path | None
    as_json: bool


def rewrite(
    paths: options.Paths = None,
    diff: Diff = False,
    write: Write = False,
    out: Out = None,
    unsafe: options.Unsafe = False,
    from_: From = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    severity: options.Severity = None,
    force_exclude: options.ForceExclude = False,
    stdin_filename: options.StdinFilename = None,
    config: options.Config = None,
    isolated: options.Isolated = False,
    no_cache: options.NoCache = False,
    jobs: options.Jobs = None,
    as_json: options.AsJson = False,
) -> None:
    """Apply the fixes of `tpuport lint` that are proved not to change results.

    Formatting and comments stay, and a second run changes nothing. Findings left, with the reasons,
    go to standard error. Exits with 1 if a diff is not empty, and with 0 once changes are written.
    """
    with errors_as_exit_codes("tpuport rewrite"):
        choice = Choice(
            paths or ["."],
            select,
            ignore,
            severity,
            config,
            isolated,
            force_exclude,
            stdin_filename,
            no_cache,
            jobs,
        )
        if diff + write + (out is not None) > 1:
            raise UsageError("--diff, --write and --out exclude each other.")
        if choice.from_stdin and out is not None:
            raise UsageError("Standard input goes to standard output, with --write, not to --out.")
        if choice.from_stdin and as_json:
            raise UsageError("--json is about files; standard input goes to standard output.")
        settings = choice.settings()
        where = _Target(write, out, as_json)
        if from_ is not None:
            raise typer.Exit(_migrated(choice, settings, from_, where))
        run = _from_stdin if choice.from_stdin else _from_files
        raise typer.Exit(run(choice, settings, where, unsafe=unsafe))


def _from_stdin(choice: Choice, settings: "Settings", where: _Target, *, unsafe: bool) -> int:
    from tpuport.lint.fixing import Request, rewrite_source
    from tpuport.lint.records import Problem

    write = where.write
    data = typer.get_binary_stream("stdin").read()
    if choice.leaves_stdin_out(settings):
        typer.get_binary_stream("stdout").write(data if write else b"")
        return 0
    request = Request(settings, choice.codes(settings), unsafe)
    change = rewrite_source(data, choice.stdin_name, request)
    if isinstance(change, Problem):
        if write:
            typer.get_binary_stream("stdout").write(data)
        return _finish([], [change], 1, "")
    if write:
        typer.get_binary_stream("stdout").write(change.after.encode(change.encoding))
        return _finish([change], [], 1, "Rewrote")
    _print_diff(change)
    _finish([change], [], 1, "Would rewrite")
    return FAILED if change.changed else 0


def _from_files(choice: Choice, settings: "Settings", where: _Target, *, unsafe: bool) -> int:
    from tpuport.cli._progress import progress
    from tpuport.lint.run import run

    found = choice.files(settings)
    if not found.files:
        say("No Python files or notebooks there.")
    with progress("Rewriting") as advance:
        checked = run(found.files, jobs=choice.jobs, cache=choice.cache(settings), progress=advance)
        # A copy to another folder is complete: it has the files without findings too.
        pairs = list(zip(found.files, checked, strict=True))
        wanted = pairs if where.out else with_findings(pairs, settings)
        changes, problems = _rewritten(wanted, choice, settings, unsafe)
    unread = [problem for one in checked for problem in one.problems]
    problems = list({str(p): p for p in (*found.problems, *unread, *problems)}.values())
    return _shown(changes, problems, found.files, where)


def _shown(
    changes: "list[Change]",
    problems: "list[Problem]",
    files: Sequence[Path],
    where: _Target,
) -> int:
    """Write or print the changes of files, and return the exit code."""
    if where.as_json:
        typer.echo(_as_json(changes, problems))
    if where.out is not None:
        problems = problems + _copied(changes, files, where.out)
        return _finish(changes, problems, len(files), f"To {where.out}: rewrote")
    if where.write:
        written = [p for change in changes if change.changed for p in _written(change)]
        return _finish(changes, problems + written, len(files), "Rewrote")
    for change in changes if not where.as_json else ():
        _print_diff(change)
    code = _finish(changes, problems, len(files), "Would rewrite")
    return code or (FAILED if any(change.changed for change in changes) else 0)


def _migrated(choice: Choice, settings: "Settings", package: str, where: _Target) -> int:
    """Take a package out of files, and say what was changed and what is left."""
    from tpuport.migrate.rewriting import migrate_files

    if package != _PACKAGE:
        raise UsageError(f"--from {package}: expected {_PACKAGE}, which is all that is known.")
    if choice.from_stdin:
        raise UsageError(f"--from {package} reads files, which may belong together, not `-`.")
    found = choice.files(settings)
    changes, explained, problems = migrate_files(found.files)
    for one in explained:
        say(str(one))
    problems = [*found.problems, *problems]
    return _shown(changes, problems, found.files, where)


def with_findings(pairs: "Sequence[Pair]", settings: "Settings") -> "list[Pair]":
    """Return the files with a selected finding: one to rewrite, or to explain why not."""
    return [
        (path, one)
        for path, one in pairs
        if any(settings.selects_in(finding.code, path) for finding in one.findings)
    ]


def fix_files(
    pairs: "Sequence[Pair]", choice: Choice, settings: "Settings", *, unsafe: bool
) -> "tuple[list[Change], list[Problem]]":
    """Rewrite files in place, and return the changes made and the problems met."""
    changes, problems = _rewritten(with_findings(pairs, settings), choice, settings, unsafe)
    changed = [change for change in changes if change.changed]
    problems += [problem for change in changed for problem in _written(change)]
    return changed, problems


def _rewritten(
    pairs: "Sequence[Pair]", choice: Choice, settings: "Settings", unsafe: bool
) -> "tuple[list[Change], list[Problem]]":
    from tpuport.lint.fixing import Change, Request, rewrite_files
    from tpuport.lint.records import Problem

    request = Request(settings, choice.codes(settings), unsafe)
    results = rewrite_files(pairs, request, jobs=choice.jobs, cache=choice.cache(settings))
    changes = [result for result in results if isinstance(result, Change)]
    return changes, [result for result in results if isinstance(result, Problem)]


def _written(change: "Change") -> "Iterator[Problem]":
    from tpuport.lint.fixing import write_in_place

    if problem := write_in_place(change):
        yield problem


def _copied(changes: "Sequence[Change]", files: Sequence[Path], out: Path) -> "list[Problem]":
    from tpuport.lint.fixing import common_root, write_to

    if not files:
        return []
    root = common_root(files)
    if out.absolute() == root:
        raise UsageError(f"--out {out} is where the files are. Use --write to change them there.")
    results = [write_to(change, root, out.absolute()) for change in changes]
    return [problem for problem in results if problem is not None]


# The report.


def _as_json(changes: "Sequence[Change]", problems: "Sequence[Problem]") -> str:
    files = [
        {
            "file": change.file,
            "changed": change.changed,
            "applied": dict(change.applied),
            "diff": "".join(_diff(change)),
            "left": [str(one) for one in change.left],
        }
        for change in changes
    ]
    return json.dumps({"files": files, "problems": [str(one) for one in problems]}, indent=1)


def _diff(change: "Change") -> "Iterator[str]":
    before, after = (text.splitlines(keepends=True) for text in (change.before, change.after))
    for line in difflib.unified_diff(before, after, f"a/{change.file}", f"b/{change.file}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _print_diff(change: "Change") -> None:
    color = has_color()
    for line in _diff(change):
        text = printable(line)
        typer.echo(_colored(text) if color else text, nl=False, color=color)


def _colored(line: str) -> str:
    code = {"+": "32", "-": "31", "@": "36"}.get(line[0])
    return line if code is None else f"\x1b[{code}m{line.rstrip()}\x1b[0m\n"


def _finish(
    changes: "Sequence[Change]", problems: "Sequence[Problem]", total: int, did: str
) -> int:
    """Report on standard error what was done and left, and return the exit code."""
    from tpuport.lint.records import Trouble

    for problem in problems:
        say(str(problem))
    for change in changes:
        for left in change.left:
            say(str(left))
    changed = [change for change in changes if change.changed]
    if did:
        say(_account(did, changed, total, sum(len(change.left) for change in changes)))
    if any(problem.trouble is Trouble.INTERNAL for problem in problems):
        return WRONG_CALL
    return FAILED if any(problem.trouble is Trouble.UNREAD for problem in problems) else 0


def _account(did: str, changed: "Sequence[Change]", total: int, left: int) -> str:
    fixes: Counter[str] = Counter()
    for change in changed:
        fixes.update(change.applied)
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(fixes.items()))
    files = f"{len(changed):,} of {plural(total, 'file')}"
    with_fixes = f" with {plural(fixes.total(), 'fix')} ({codes})" if codes else ""
    stay = f" Left: {plural(left, 'finding')}." if left else ""
    return f"{did} {files}{with_fixes}.{stay}"
