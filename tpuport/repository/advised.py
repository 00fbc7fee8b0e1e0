"""What a person can do about a script that fails by itself: packages, their versions, data."""

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

from tpuport.repository.packages import how_to_install
from tpuport.repository.scripts import StartScript, shown_launches
from tpuport.repository.sizes import ChosenArguments, ScriptSettings
from tpuport.repository.texts import read_text

# As Python shows it, or inside of another error.
_ABSENT = re.compile(r"ModuleNotFoundError(?:: |\([\"'])No module named \\?'([\w.]+)\\?'")
_CHANGED = (
    re.compile(r"cannot import name '\w+' from (?:partially initialized module )?'(\w+)"),
    re.compile(r"module '(\w+)[\w.]*' has no attribute"),
    re.compile(r"No module named '(\w+)\."),
)
_LOST = re.compile(
    r"NotFound|No such file|not found|nothing found|does(?: not|n't) exist|not a directory", re.I
)
_NO_FILE = re.compile(r"FileNotFoundError: \[Errno 2\] No such file or directory: '([^']+)'")
_PLAIN = (
    (
        re.compile(r"^(Syntax|Indentation|Tab)Error:"),
        f"mend that line, which Python {sys.version_info.major}.{sys.version_info.minor} does not"
        " take",
    ),
    (
        re.compile(r"^EOFError\b"),
        "it asks a question on a terminal, and has none: let it take the answer as an argument",
    ),
    (
        re.compile(r"URLError|gaierror|Name or service not known|Connection(Refused|Reset)?Error"),
        "it fetches something, and did not reach it from here: put the file where it looks for it,"
        " or call again where the network is",
    ),
    (
        re.compile(r"^PermissionError:|Permission denied|[Rr]ead-only file system"),
        "let it write below the repository only, by its arguments or --set: elsewhere it may not",
    ),
)
_PINS = ("*requirements*.txt", "*environment*.y*ml", "docker/*requirements*.txt")
_PIN = re.compile(r"^[\s-]*([A-Za-z0-9][\w.-]*)\s*==?\s*(\d[\w.]*)", re.MULTILINE)
_WRITTEN = re.compile(r"out|log|save|result|checkpoint|ckpt|wandb")


def what_helps(
    error: str,
    root: Path,
    entry: StartScript,
    settings: ScriptSettings,
    chosen: ChosenArguments,
) -> str:
    """Return what to do about a script that fails without being ported.

    Args:
        error: The error, as its log shows it.
        root: The folder of the repository.
        entry: The script.
        settings: How it takes its settings.
        chosen: The arguments that it had.
    """
    absent = _ABSENT.search(error)
    package = absent[1].partition(".")[0] if absent else ""
    if package and importlib.util.find_spec(package) is None:
        return how_to_install([package], root, entry.maybe_missing)
    for pattern, advice in _PLAIN:
        if pattern.search(error):
            return advice
    if advice := _other_version(error, root):
        return advice
    lost = [f"{name} ({value})" for name, value in _not_there(root, settings, chosen)]
    if lost and _LOST.search(error):
        names = ", ".join(lost[:5])
        return f"give it its data, as this is not there: {names}; put it there, or say with --set"
    if advice := _absent_file(error, root, entry):
        return advice
    ask = "make it run with `python` first: give the arguments that it needs after --"
    shown = shown_launches(entry) if not chosen.started else []
    return f"{ask}; {shown[0]}" if shown else ask


def _absent_file(error: str, root: Path, entry: StartScript) -> str:
    """Return how a file comes about that the script does not find, by what else names it."""
    found = _NO_FILE.search(error)
    if found is None:
        return ""
    name = Path(found[1]).name
    quoted = re.compile(rf"[\"'/]{re.escape(name)}[\"']")
    named = [
        place
        for path in sorted(root.rglob("*.py"))
        if (place := path.relative_to(root).as_posix()) != entry.path
        and quoted.search(read_text(path))
    ]
    made = f"; {', '.join(named[:3])} may make it: run that first" if named else ""
    return f"it reads {found[1]}, which is not there: put it there{made}"


def _other_version(error: str, root: Path) -> str:
    """Return which version of a package the repository asks for, if that may be the reason."""
    for pattern in _CHANGED:
        found = pattern.search(error)
        if found is None:
            continue
        for name in metadata.packages_distributions().get(found[1], ()):
            have = metadata.version(name)
            for place, version in _pinned(root, name):
                if have != version:
                    return f"install {name}=={version}, as {place} says: {have} is here"
            return f"install another version of {name}: {have} is here"
    return ""


def _pinned(root: Path, name: str) -> Iterator[tuple[str, str]]:
    wanted = name.lower().replace("_", "-")
    for path in sorted(one for pattern in _PINS for one in root.glob(pattern)):
        for match in _PIN.finditer(read_text(path)):
            if match[1].lower().replace("_", "-") == wanted:
                yield path.relative_to(root).as_posix(), match[2]


def _not_there(
    root: Path, settings: ScriptSettings, chosen: ChosenArguments
) -> Iterator[tuple[str, str]]:
    """Yield the settings that name a file or folder of data which is not there."""
    made = {blank.setting: blank.value for blank in chosen.blanks}
    for option in settings.options.values():
        value = made.get(option.name) or _value(option.name, option.default, chosen.full)
        is_path = option.name in made or ("/" in value and "$" not in value)
        if option.is_data and is_path and not _WRITTEN.search(option.key):
            if not (root / value).exists():
                yield option.name, value


def _value(name: str, default: object, words: Sequence[str]) -> str:
    """Return what a command line gives a setting, or its default."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, sign, value = word.partition("=")
        if flag.lstrip("-+") == name:
            return value if sign else following
    return default if isinstance(default, str) else ""
