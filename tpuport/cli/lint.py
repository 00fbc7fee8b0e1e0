"""`tpuport lint`: finds code that breaks, goes silently wrong or gets slow on TPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpuport.cli import _options as options
from tpuport.cli._common import FAILED, WRONG_CALL, errors_as_exit_codes, has_color, printable, say
from tpuport.cli._options import Choice
from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.markup import plural

if TYPE_CHECKING:
    from tpuport.lint.records import Checked, Outcome, Problem
    from tpuport.lint.settings import Settings

_OUTPUT, _KNOWN = "Output", "Known findings"

Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict/--no-strict",
        rich_help_panel="Rules",
        help="Treat unknown values inside a step as traced: more findings, more false positives.",
        show_default=False,
    ),
]
Format = Annotated[
    Literal["full", "concise", "json", "sarif", "github", "html"],
    typer.Option("--format", rich_help_panel=_OUTPUT, help="Output format."),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output-file", "-o", metavar="FILE", rich_help_panel=_OUTPUT, help="Write to a file."
    ),
]
Statistics = Annotated[
    bool,
    typer.Option("--statistics", rich_help_panel=_OUTPUT, help="Count findings instead."),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", rich_help_panel=_OUTPUT, help="Leave the summary out."),
]
Fix = Annotated[
    bool,
    typer.Option(
        "--fix",
        rich_help_panel="Rules",
        help="Rewrite the files as `tpuport rewrite --write` does, then report what is left.",
    ),
]
ExitZero = Annotated[
    bool,
    typer.Option("--exit-zero", rich_help_panel="Run", help="Exit with 0 in spite of findings."),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        rich_help_panel=_KNOWN,
        help="Show only findings that are not in this baseline.",
    ),
]
WriteBaseline = Annotated[
    bool,
    typer.Option(
        "--write-baseline",
        rich_help_panel=_KNOWN,
        help="Write the baseline with the findings of this run.",
    ),
]


@dataclass(frozen=True)
class _Wanted:
    """The options of a run of `lint`."""

    choice: Choice
    form: str
    output_file: Path | None
    quiet: bool
    fix: bool
    unsafe: bool
    exit_zero: bool
    baseline: Path | None
    write_baseline: bool


def lint(
    paths: options.Paths = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    severity: options.Severity = None,
    strict: Strict = None,
    fix: Fix = False,
    unsafe: options.Unsafe = False,
    form: Format = "full",
    as_json: options.AsJson = False,
    output_file: OutputFile = None,
    statistics: Statistics = False,
    quiet: Quiet = False,
    baseline: BaselineFile = None,
    write_baseline: WriteBaseline = False,
    force_exclude: options.ForceExclude = False,
    stdin_filename: options.StdinFilename = None,
    config: options.Config = None,
    isolated: options.Isolated = False,
    no_cache: options.NoCache = False,
    jobs: options.Jobs = None,
    exit_zero: ExitZero = False,
) -> None:
    """Find what breaks, goes silently wrong or gets slow when PyTorch code is moved to TPU.

    Reads Python files and notebooks without running them; needs neither torch nor jax. Options can
    also be set in the table tool.tpuport of pyproject.toml. A comment "# tpuport: ignore" at the
    end of a line hides its findings; followed by codes in brackets, only those with these codes.
    """
    with errors_as_exit_codes("tpuport lint"):
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
            strict,
        )
        form = "json" if as_json else form
        if statistics and form not in ("full", "concise"):
            raise UsageError(f"--statistics counts on a terminal and does not go with {form}.")
        form_name = "statistics" if statistics else form
        wanted = _Wanted(
            choice, form_name, output_file, quiet, fix, unsafe, exit_zero, baseline, write_baseline
        )
        raise typer.Exit(_lint(wanted))


def _lint(wanted: _Wanted) -> int:
    from tpuport.lint.baseline import DEFAULT_FILE, Baseline
    from tpuport.lint.outcome import decide

    settings = wanted.choice.settings()
    checked, problems = _checked(wanted, settings)
    path = wanted.baseline or settings.baseline
    known = Baseline.read(path) if path and not wanted.write_baseline else None
    codes = wanted.choice.codes(settings)
    outcome = decide(checked, settings, known=codes, baseline=known, problems=problems)
    for problem in outcome.problems:
        say(str(problem))
    if wanted.write_baseline:
        path = path or settings.root / DEFAULT_FILE
        Baseline.of(path, outcome.shown).write()
        say(f"Wrote {plural(len(outcome.shown), 'finding')} to {path}.")
        return _exit_code(outcome, ignore_findings=True)
    _write(outcome, wanted)
    return _exit_code(outcome, ignore_findings=wanted.exit_zero)


def _checked(wanted: _Wanted, settings: "Settings") -> "tuple[list[Checked], list[Problem]]":
    from tpuport.cli._progress import progress
    from tpuport.lint.run import run, run_source

    choice = wanted.choice
    if choice.from_stdin:
        if wanted.fix:
            raise UsageError("--fix changes files. For standard input: tpuport rewrite - --write")
        data = typer.get_binary_stream("stdin").read()
        if choice.leaves_stdin_out(settings):
            return [], []
        return [run_source(data, choice.stdin_name, strict=settings.strict)], []
    found = choice.files(settings)
    if not found.files:
        say("No Python files or notebooks there.")
    problems = list(found.problems)
    cache = choice.cache(settings)
    with progress("Linting") as advance:
        checked = run(
            found.files, strict=settings.strict, jobs=choice.jobs, cache=cache, progress=advance
        )
        if wanted.fix:
            from tpuport.cli.rewrite import fix_files

            pairs = list(zip(found.files, checked, strict=True))
            changed, more = fix_files(pairs, choice, settings, unsafe=wanted.unsafe)
            problems += more
            if changed:
                checked = run(found.files, strict=settings.strict, jobs=choice.jobs, cache=cache)
    return checked, problems


def _write(outcome: "Outcome", wanted: _Wanted) -> None:
    from tpuport.lint.output import Style, write

    to_file = wanted.output_file
    style = Style(color=to_file is None and has_color(), summary=not wanted.quiet)
    text = printable(write(outcome, wanted.form, style))
    if to_file is None:
        typer.echo(text, nl=False, color=style.color)
        return
    try:
        to_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{to_file} cannot be written: {error.strerror}.") from None


def _exit_code(outcome: "Outcome", *, ignore_findings: bool) -> int:
    from tpuport.lint.records import Trouble

    troubles = {problem.trouble for problem in outcome.problems}
    if Trouble.INTERNAL in troubles:
        return WRONG_CALL
    if (outcome.shown or Trouble.UNREAD in troubles) and not ignore_findings:
        return FAILED
    return 0
