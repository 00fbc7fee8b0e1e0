"""Migration of files: read, rewritten together, and returned as `tpuport rewrite` shows changes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuport.foundation.errors import MissingExtraError
from tpuport.lint.fixing import Change, Stays
from tpuport.lint.records import Problem
from tpuport.lint.sources import Source, UnreadableError, read_source
from tpuport.rules._apply import find
from tpuport.rules._discovery import find_rules
from tpuport.rules._torch_xla_facts import PACKAGE

# The rules about torch_xla, of which the first two find what is rewritten.
_FAMILY, _REWRITTEN = "TPU7", {"TPU701", "TPU702"}


@dataclass(frozen=True)
class Explained:
    """One change and what it was about."""

    place: str
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.code} changed: {self.text}"


def migrate_files(
    paths: Sequence[Path],
) -> tuple[list[Change], list[Explained], list[Problem]]:
    """Compute the migrated text of files, together, without writing anything."""
    sources: dict[str, Source] = {}
    problems: list[Problem] = []
    for path in paths:
        name = str(path)
        try:
            sources[name] = _read(path.read_bytes(), name)
        except (UnreadableError, OSError, SyntaxError) as error:
            problems.append(Problem(name, str(error)))
    changes, explained = migrate_sources(sources, {str(path): path for path in paths})
    return changes, explained, problems


def _read(data: bytes, name: str) -> Source:
    source = read_source(data, name)
    if source.notebook is not None:
        raise UnreadableError("notebooks are not migrated: export the notebook as a script")
    compile(source.text, name, "exec", dont_inherit=True)
    return source


def migrate_sources(
    sources: dict[str, Source], paths: dict[str, Path]
) -> tuple[list[Change], list[Explained]]:
    """Migrate the text of files together."""
    try:
        from tpuport.migrate.torch_xla import Migration, migrate
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        raise MissingExtraError("tpuport rewrite --from torch_xla", "libcst", "migrate") from error
    used = {name: one.text for name, one in sources.items() if PACKAGE in one.text}
    made = migrate(used)
    changes: list[Change] = []
    explained: list[Explained] = []
    for name, source in sources.items():
        result = made.get(name, Migration(source.text, (), ()))
        left = [Stays(f"{name}:{one.line}", one.code, one.text) for one in result.left]
        left += _wrong_already(source.text, name) if name in made else []
        after = result.after if result.after != source.text else source.raw
        applied = Counter(one.code for one in result.done)
        changes.append(
            Change(paths.get(name), name, source.raw, after, source.encoding, applied, tuple(left))
        )
        explained += [Explained(f"{name}:{one.line}", one.code, one.text) for one in result.done]
    return changes, explained


def _wrong_already(text: str, name: str) -> list[Stays]:
    """Return what the rules find that was wrong under torch_xla too, and still is."""
    rules = [
        rule
        for rule in find_rules()
        if rule.CODE.startswith(_FAMILY) and rule.CODE not in _REWRITTEN
    ]
    found = find(text, rules=rules)
    return [Stays(f"{name}:{one.line}", one.code, one.message) for one in found]
