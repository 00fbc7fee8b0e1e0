"""Settings of a run: `[tool.tpuport]` of a pyproject.toml, overridden by the command line."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.lint.spelling import nearest
from tpuport.source.rewrite.finding import Severity

CONFIG_FILE = "pyproject.toml"
DEFAULT_CACHE = ".tpuport_cache"
ALL = "ALL"

# Option of the configuration -> the form of its value, in the words of error messages.
_STRINGS, _STRING, _BOOL, _TABLE = "a list of strings", "a string", "true or false", "a table"
KEYS = {
    "select": _STRINGS,
    "ignore": _STRINGS,
    "severity": _STRING,
    "strict": _BOOL,
    "exclude": _STRINGS,
    "extend-exclude": _STRINGS,
    "per-file-ignores": _TABLE,
    "baseline": _STRING,
    "cache-dir": _STRING,
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        root: The folder that patterns and paths are relative to: that of the configuration file,
            or the current one.
        config: The configuration file, if there is one.
        select: Codes, starts of codes, or `ALL`.
        ignore: The same for codes to leave out. The longest match of both lists wins, and `ignore`
            wins among equals.
        severity: The mildest severity that is shown.
        strict: Whether values of unknown kind count as traced inside a step.
        exclude: Patterns of files not to lint, in place of the default ones; None for those.
        extend_exclude: Patterns of files not to lint, in addition to `exclude`.
        per_file_ignores: Pattern of paths -> codes that are ignored there.
        baseline: The file of known findings.
        cache_dir: The folder of cached results.
    """

    root: Path
    config: Path | None = None
    select: tuple[str, ...] = (ALL,)
    ignore: tuple[str, ...] = ()
    severity: Severity = Severity.SLOW
    strict: bool = False
    exclude: tuple[str, ...] | None = None
    extend_exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: Path | None = None
    cache_dir: Path = Path(DEFAULT_CACHE)

    def selects(self, code: str) -> bool:
        """Return whether findings of this code are selected, without per-file ignores."""
        return _longest(code, self.select) > _longest(code, self.ignore)

    def selects_in(self, code: str, path: Path) -> bool:
        """Return whether findings of this code are selected in one file."""
        return self.selects(code) and not any(
            _longest(code, codes) > 0 and spec.match_file(path) for spec, codes in self._file_specs
        )

    @cached_property
    def _file_specs(self) -> "list[tuple[PathPatterns, tuple[str, ...]]]":
        return [
            (PathPatterns(self.root, [pattern]), codes)
            for pattern, codes in self.per_file_ignores.items()
        ]

    def check_codes(self, known: Iterable[str]) -> None:
        """Check that every selector matches a code.

        Raises:
            UsageError: no code starts with a selector.
        """
        codes = list(known)
        groups = [self.select, self.ignore, *self.per_file_ignores.values()]
        for selector in (selector for group in groups for selector in group):
            if selector != ALL and not any(code.startswith(selector) for code in codes):
                raise UsageError(
                    f"There is no rule {selector}.{_hint(selector, codes)} `tpuport rules` lists"
                    " them all."
                )


class PathPatterns:
    """Patterns as in a .gitignore, for paths relative to a folder."""

    def __init__(self, root: Path, patterns: Iterable[str]) -> None:
        from pathspec import GitIgnoreSpec

        self.root = root
        self._spec = GitIgnoreSpec.from_lines(patterns)

    def match_file(self, path: Path, *, folder: bool = False) -> bool:
        """Return whether a path, or a folder that contains it, matches."""
        try:
            relative = path.absolute().relative_to(self.root)
        except ValueError:
            # Outside of the folder only patterns for names can match.
            relative = Path(path.name)
        return self._spec.match_file(relative.as_posix() + ("/" if folder else ""))


def _longest(code: str, selectors: Iterable[str]) -> int:
    """Return the precision of the best match of a code: 0 for none, larger for longer selectors."""
    return max(
        (1 if s == ALL else 1 + len(s) for s in selectors if s == ALL or code.startswith(s)),
        default=0,
    )


def find_config(start: Path) -> Path | None:
    """Find the nearest pyproject.toml with a `[tool.tpuport]` in a folder or above it."""
    for folder in (start, *start.parents):
        path = folder / CONFIG_FILE
        if path.is_file() and "tpuport" in _read_toml(path).get("tool", {}):
            return path
    return None


def load_settings(config: Path | None, *, start: Path) -> Settings:
    """Load the settings of a configuration file.

    Args:
        config: The file; without one, `start` is the root and everything has its default.
        start: The current folder.

    Raises:
        UsageError: the file cannot be read, has an unknown key or a value of the wrong form.
    """
    if config is None:
        return Settings(root=start, cache_dir=start / DEFAULT_CACHE)
    if not config.is_file():
        raise UsageError(f"There is no configuration file {config}.")
    table = _read_toml(config).get("tool", {}).get("tpuport", {})
    if not isinstance(table, dict):
        raise _wrong(config, "tool.tpuport", _TABLE, table)
    for key, value in table.items():
        _check_key(config, key, value)
    root = config.absolute().parent
    severity = table.get("severity", Severity.SLOW)
    if severity not in list(Severity):
        names = ", ".join(Severity)
        raise UsageError(
            f"{config}: `severity` has to be one of {names}, got {severity!r}."
            f"{_hint(str(severity), list(Severity))}"
        )
    return Settings(
        root=root,
        config=config,
        select=_codes(table.get("select", (ALL,))),
        ignore=_codes(table.get("ignore", ())),
        severity=Severity(severity),
        strict=table.get("strict", False),
        exclude=tuple(table["exclude"]) if "exclude" in table else None,
        extend_exclude=tuple(table.get("extend-exclude", ())),
        per_file_ignores={
            pattern: _codes(codes) for pattern, codes in table.get("per-file-ignores", {}).items()
        },
        baseline=root / table["baseline"] if "baseline" in table else None,
        cache_dir=root / table.get("cache-dir", DEFAULT_CACHE),
    )


def override(
    settings: Settings, *, select: str | None, ignore: str | None, **others: Any
) -> Settings:
    """Override settings with options of the command line.

    Args:
        settings: The settings of the configuration file.
        select: Comma-separated codes. They replace both lists of the file.
        ignore: Comma-separated codes, added to the codes ignored already.
        others: Fields by name; None leaves the file's value.
    """
    changes = {name: value for name, value in others.items() if value is not None}
    if select is not None:
        changes |= {"select": _codes(select.split(",")), "ignore": ()}
    if ignore is not None:
        base = () if select is not None else settings.ignore
        changes["ignore"] = base + _codes(ignore.split(","))
    return replace(settings, **changes)


def _codes(codes: Sequence[str]) -> tuple[str, ...]:
    return tuple(code.strip().upper() for code in codes if code.strip())


def _check_key(config: Path, key: str, value: object) -> None:
    form = KEYS.get(key)
    if form is None:
        raise UsageError(
            f"{config}: [tool.tpuport] has no option `{key}`.{_hint(key, list(KEYS))} There are "
            f"{', '.join(KEYS)}."
        )
    fits = {
        _STRINGS: _is_strings(value),
        _STRING: isinstance(value, str),
        _BOOL: isinstance(value, bool),
        _TABLE: isinstance(value, dict) and all(map(_is_strings, value.values())),
    }
    if not fits[form]:
        raise _wrong(config, key, form + (" of lists of strings" if form == _TABLE else ""), value)


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _wrong(config: Path, key: str, form: str, value: object) -> UsageError:
    return UsageError(f"{config}: `{key}` has to be {form}, got {value!r}.")


def _hint(given: str, known: Sequence[str]) -> str:
    near = nearest(given, known)
    return f" Did you mean {near}?" if near else ""


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
