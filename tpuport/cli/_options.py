"""The options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpuport.foundation.errors import UsageError

if TYPE_CHECKING:
    from tpuport.lint.cache import Cache
    from tpuport.lint.files import Found
    from tpuport.lint.settings import Settings

STDIN = "-"
_FILES, _RULES, _RUN = "Files", "Rules", "Run"

Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATHS",
        show_default=False,
        help="Files, folders or patterns; `-` is standard input. The current folder if left out.",
    ),
]
Select = Annotated[
    str | None,
    typer.Option(
        metavar="CODES",
        rich_help_panel=_RULES,
        help="Codes or starts of codes, with commas: TPU1,TPU501. ALL if left out.",
    ),
]
Ignore = Annotated[
    str | None,
    typer.Option(metavar="CODES", rich_help_panel=_RULES, help="Codes to ignore."),
]
Severity = Annotated[
    Literal["error", "silent", "slow", "device", "note"] | None,
    typer.Option(
        rich_help_panel=_RULES,
        help="The mildest severity to show: error stops the trace, silent gives wrong results, "
        "slow costs time or memory, device is host code for CUDA, note is worth knowing. "
        "Default: slow.",
        show_default=False,
    ),
]
Unsafe = Annotated[
    bool,
    typer.Option("--unsafe", rich_help_panel=_RULES, help="Apply fixes that can change results."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_RUN,
        help="The pyproject.toml to read; the nearest with a table tool.tpuport if left out.",
    ),
]
Isolated = Annotated[
    bool, typer.Option("--isolated", rich_help_panel=_RUN, help="Read no configuration file.")
]
ForceExclude = Annotated[
    bool,
    typer.Option(
        "--force-exclude",
        rich_help_panel=_FILES,
        help="Leave excluded files out even if they are named.",
    ),
]
StdinFilename = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        rich_help_panel=_FILES,
        help="The file name to use for standard input.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", rich_help_panel=_RUN, help="Neither read nor write the cache."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=_RUN,
        help="Number of parallel processes; the number of processors if left out.",
    ),
]


RunOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--run-option",
        metavar="OPTION",
        rich_help_panel="Runs",
        help="An option of `tpuport run` for the ported run: --run-option=--eager=CLASS; --absent "
        "is for all runs. May be repeated.",
    ),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", show_default=False, help="Arguments of the script."),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        rich_help_panel="Result",
        show_default=False,
        help="Write the report there: .html, .json, .txt.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel="Result", help="Print JSON.")]


def check_report_name(report: Path | None) -> None:
    """Check the name of a report before the work that it is about.

    Raises:
        UsageError: no report ends like that.
    """
    if report is not None and report.suffix not in (".html", ".json", ".txt"):
        raise UsageError(f"Expected a report ending in .json, .html or .txt, got {report}.")


@dataclass(frozen=True)
class Choice:
    """The options of a command line that `lint` and `rewrite` share."""

    paths: list[str]
    select: str | None
    ignore: str | None
    severity: str | None
    config: Path | None
    isolated: bool
    force_exclude: bool
    stdin_filename: str | None
    no_cache: bool
    jobs: int | None
    strict: bool | None = None

    @property
    def from_stdin(self) -> bool:
        """Return whether the source comes from standard input.

        Raises:
            UsageError: files are given as well.
        """
        if STDIN not in self.paths:
            return False
        if len(self.paths) > 1:
            raise UsageError("`-` is standard input and goes with no other path.")
        return True

    @property
    def stdin_name(self) -> str:
        """Return the file name used for standard input."""
        return self.stdin_filename or "stdin.py"

    def leaves_stdin_out(self, settings: "Settings") -> bool:
        """Return whether the file name of standard input is excluded; an editor cannot tell."""
        from tpuport.lint.files import is_excluded

        return self.force_exclude and is_excluded(Path(self.stdin_name), settings)

    def settings(self) -> "Settings":
        """Load the configuration and override it with the command line.

        Raises:
            UsageError: an option of either is wrong.
        """
        from tpuport.lint.settings import find_config, load_settings, override
        from tpuport.source.rewrite.finding import Severity as Levels

        if self.config is not None and self.isolated:
            raise UsageError("--config and --isolated exclude each other.")
        config = self.config
        if config is None and not self.isolated:
            config = find_config(self._start())
        settings = override(
            load_settings(config, start=Path.cwd()),
            select=self.select,
            ignore=self.ignore,
            severity=Levels(self.severity) if self.severity else None,
            strict=self.strict,
        )
        settings.check_codes(self.codes(settings))
        return settings

    def _start(self) -> Path:
        """Return the folder from which to search for a configuration file: one around all paths."""
        import os

        paths = [self.stdin_name if path == STDIN else path for path in self.paths]
        existing = [Path(path).absolute() for path in paths if Path(path).exists()]
        if not existing:
            return Path.cwd()
        folders = [path if path.is_dir() else path.parent for path in existing]
        return Path(os.path.commonpath(folders))

    def files(self, settings: "Settings") -> "Found":
        """Find the files to work on.

        Raises:
            UsageError: a path does not exist, or a pattern matches nothing.
        """
        from tpuport.lint.files import find_files

        return find_files(self.paths, settings, force_exclude=self.force_exclude)

    def codes(self, settings: "Settings") -> list[str]:
        """Return the codes of all rules."""
        from tpuport.lint.catalogue import known_codes

        return known_codes(self.cache(settings))

    def cache(self, settings: "Settings") -> "Cache":
        """Return the cache of results."""
        from tpuport.lint.cache import Cache

        return Cache(None if self.no_cache else settings.cache_dir)
