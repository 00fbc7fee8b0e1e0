"""Small sizes for a script, found in how it reads its settings; nothing is run."""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.repository.choices import (
    compared_values,
    listed_names,
    needs_no_data,
    table_of,
    words_of_help,
)
from tpuport.repository.hydra_files import (
    HydraConfig,
    find_config,
    in_order,
    launched_words,
    names_config,
    read_value,
)
from tpuport.repository.scripts import Launch, StartScript

# How a script takes its settings: `--key value`; `--key=value` for a global; `key=value`.
ARGPARSE, GLOBALS, HYDRA, UNKNOWN = "argparse", "globals", "hydra", "unknown"

# How many devices there are to be; a graph has `num_nodes` as well.
_DEVICES = r"devices|(num_|n_)?gpus|world_size|nproc_per_node|.*trainer\..*num_nodes"
# A name, and the largest value with which a few steps of the script show what they are to show.
_LIMITS = (
    (r"(\w+_)?batch(_size)?(_per_\w+)?|bs", 4),
    (r"(eval|val|test|valid)\w*_(iters|steps|batches)|(n|num)_eval\w*", 1),
    (r"grad(ient)?_acc\w*|accum(ulation)?_(iter|step)s?|accumulate_grad\w*", 2),
    (r"n_layers?|num_(hidden_)?layers|(num_|n_)?blocks|depth", 2),
    (r"block_size|(max_)?(seq|sequence|context)_?(len|length)", 64),
    (r"(num_|n_|max_)?epochs?", 2),
    (_DEVICES, 1),
    # By the whole name: elsewhere it is a number of samples.
    (r"(.*[._])?(runner|rollout|env|envs)\.(n|num)_(train|test|envs|episodes)(_vis)?", 1),
)
_HEADS = re.compile(r"n_heads?|num_(attention_)?heads|nheads?")
_WIDTH = re.compile(r"n_embd|hidden_size|d_model|embed_dim|dim_model")
# Widths of layers, one after the other.
_WIDTHS = re.compile(
    r"((down|up|hidden|mlp|net|unet|layer|encoder|decoder|model|block_out)_)?"
    r"(dims|channels|widths|features)|hidden_sizes"
)
_SMALL_HEADS, _SMALL_WIDTH = 2, 64
_MOST_SHOWN = 12
_DATA = re.compile(r"data|dataset|root|path|dir|folder|corpus")
_ORDER = (
    *("nano", "micro", "tiny", "mini", "small", "s", "base", "b", "medium", "m"),
    *("large", "l", "huge", "h", "giant", "g", "xl", "xxl"),
)
# What a document has where a person is to put a value.
_BLANKS = ("/", "<", "$", "{", "[", "...", "path", "your", "my_", "xxx")
# A list or a dict of hydra begins with what is a blank elsewhere.
_WORD_BLANKS = tuple(one for one in _BLANKS if one not in "[{")
_PLACE = re.compile(r"path|root|dir|folder|file")
# Settings without which a script computes on the CPU, where nothing is ported.
_ACCELERATOR = re.compile(r"(use_|enable_|with_)?(cuda|gpu|accel|accelerator)")
_DEVICE = re.compile(r"device(_type|_name)?")
_NAMES_MODEL = re.compile(r"(\w+_)?(model|arch)(_name|_type)?")


@dataclass
class Option:
    """One setting of a script.

    Attributes:
        name: Its name as the script has it, without dashes in front.
        flag: What the command line has in front of its value.
        default: Its default, if it is written down as a literal.
        choices: What it may be, if that is written down.
        closed: Whether the script refuses what is none of its choices.
        compared: Those with which the script compares it.
        aliases: Its other names on the command line, without dashes in front.
        required: Whether the script cannot do without it.
        switch: The value that it gets by being named alone; None if it takes a value.
    """

    name: str
    flag: str
    default: Any = None
    choices: tuple[Any, ...] = ()
    closed: bool = False
    compared: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    required: bool = False
    switch: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return its names as `_name_of` finds them on a command line."""
        return (self.key, _name_of(self.name), *self.aliases)

    @property
    def is_data(self) -> bool:
        """Return whether its name says that it is data, or where data is."""
        return bool(_DATA.search(self.key))

    @property
    def shown_choices(self) -> str:
        """Return what it may be, in words; nothing if that is not known."""
        rest = len(self.choices) - _MOST_SHOWN
        names = ", ".join(map(str, self.choices[:_MOST_SHOWN]))
        return f"one of {names}{f' and {rest} more' if rest > 0 else ''}" if names else ""

    @property
    def key(self) -> str:
        """Return the last part of the name, in one spelling: `batchSize` as `batch_size`."""
        name = self.name.rpartition(".")[2].replace("-", "_")
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


@dataclass
class ScriptSettings:
    """How a script takes its settings, and which ones it has.

    Attributes:
        style: How it takes them.
        options: Its settings by name.
        names: Names of models.
        launched: The words with which the repository starts it, where hydra takes them.
        place: The line of these words.
        variables: The environment variables that its configuration cannot do without.
    """

    style: str = UNKNOWN
    options: dict[str, Option] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    launched: tuple[str, ...] = ()
    place: str = ""
    variables: tuple[str, ...] = ()

    def named(self, words: Sequence[str]) -> set[str]:
        """Return the names of settings that words of a command line are of."""
        if self.style == HYDRA:  # where `a.size` and `b.size` are two
            return {word.lstrip("+~").partition("=")[0] for word in words}
        return {_name_of(word) for word in words}

    def in_order(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return a command line in the order in which the script takes it."""
        return tuple(in_order(words) if self.style == HYDRA else words)

    def is_in(self, option: Option, named: set[str]) -> bool:
        """Return whether a setting is among names."""
        return not named.isdisjoint([option.name] if self.style == HYDRA else option.names)

    def find(self, name: str) -> Option | None:
        """Return a setting by its name, whether it has dashes or underscores."""
        wanted = name.replace("-", "_")
        return next((o for o in self.options.values() if o.name.replace("-", "_") == wanted), None)

    def words(self, name: str, value: Any) -> list[str]:
        """Return what sets a setting on the command line.

        Raises:
            UsageError: the script has no such setting, or the setting is a switch and the value
                none of true and false.
        """
        known = self.find(name)
        if known is None and self.style == ARGPARSE:
            names = ", ".join(sorted(self.options))
            raise UsageError(f"--set {name}: the script has {names or 'no settings'}.")
        if self.style == ARGPARSE:
            assert known is not None
            return _argparse_words(known, value)
        return [f"{name}={value}" if self.style == HYDRA else f"--{name}={value}"]


def _argparse_words(option: Option, value: Any) -> list[str]:
    if option.switch is None:
        return [option.flag, str(value)] if option.flag else [str(value)]
    wanted = str(value).lower()
    if wanted not in ("true", "false"):
        raise UsageError(f"--set {option.name}: it is a switch, true or false; got {value}.")
    return [option.flag] if (wanted == "true") == option.switch else []


@dataclass(frozen=True)
class Blank:
    """A setting that only a person can fill in: the comparison has a value that is made up.

    Attributes:
        variable: What stands for it in `ChosenArguments.launched`.
        setting: Its name.
        value: What the comparison has.
        choices: What it may be, in words; empty if that is not known.
    """

    variable: str
    setting: str
    value: str
    choices: str = ""

    @property
    def hint(self) -> str:
        """Return what to fill in, in words."""
        choices = f" ({self.choices})" if self.choices else ""
        return f"{self.setting}{choices}; tpuport port compared with {self.value}"


@dataclass(frozen=True)
class ChosenArguments:
    """The arguments of a script, and where they are from.

    Attributes:
        full: Arguments with the sizes of the script.
        small: The same with small sizes.
        single: Those of `full` for one device, which is what this machine has.
        changed: The settings that `small` changes: `name: from what to what`.
        invented: The settings that got a value, as `name: value, where it is from`.
        lacking: Required settings for which nothing was found, with what they may be.
        launched: Those of `full` with blanks where values are made up.
        blanks: What a person has to fill in.
        variables: Environment variables that are not set, with the values that are made up.
        started: Whether they are those of a line of the repository.
    """

    full: tuple[str, ...]
    small: tuple[str, ...]
    changed: tuple[str, ...] = ()
    invented: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    launched: tuple[str, ...] = ()
    blanks: tuple[Blank, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    started: bool = False
    single: tuple[str, ...] = ()


def choose_arguments(
    settings: ScriptSettings,
    entry: StartScript,
    given: Sequence[str],
    changes: Mapping[str, str],
) -> ChosenArguments:
    """Complete the arguments of a script: with what it requires, and with small sizes.

    What was given comes first, then what a document or shell script of the repository gives for a
    required setting, then a choice that needs no data, then a path that does not exist for data,
    whose files are made up.

    Args:
        settings: The settings of the script.
        entry: The script.
        given: Arguments that a person gave.
        changes: Settings that a person gave by name.

    Raises:
        UsageError: the script has no setting of a name.
    """
    words = [*given]
    for name, value in changes.items():
        words += settings.words(name, value)
    named = settings.named([*words, *changes])
    started, filled = _started(settings, given, named)
    known = named | settings.named([*started, *(one.option.name for one in filled)])
    free = sum(not word.startswith("-") for word in given)
    shown = _launch_values(entry, [one for one in settings.options.values() if one.required])
    lacking: list[str] = []
    for option in settings.options.values():
        if settings.is_in(option, known):
            continue
        if not option.required or (not option.flag and free):
            filled += _on_accelerator(option)
            continue
        found = _value(option, shown)
        filled += found
        if not found:
            choices = option.shown_choices
            lacking.append(f"{option.name} ({choices})" if choices else option.name)
    full, launched = [*words, *started], [*words, *started]
    for one in filled:
        full += settings.words(one.option.name, one.value)
        launched += settings.words(one.option.name, one.blank.variable if one.blank else one.value)
    small, changed, single = [*full], [], [*full]
    for option, value in _smaller(_with_values(settings, started)):
        if not settings.is_in(option, named):
            words = settings.words(option.name, value)
            small += words
            single += words if _is_named(option, _DEVICES) else []
            changed.append(f"{option.name}: {option.default} to {value}")
    invented = [f"{one.option.name}: {one.value}, {one.source}" for one in filled]
    absent = [name for name in settings.variables if name not in os.environ]
    variables = tuple((name, f"made-up-{name.lower()}") for name in absent)
    invented += [f"${name}: {value}, a path that is not there" for name, value in variables]
    if started:
        invented.insert(0, f"{' '.join(started)}, as in {settings.place}")
    blanks = [one.blank for one in filled if one.blank is not None]
    return ChosenArguments(
        *(settings.in_order(full), settings.in_order(small)),
        *(tuple(changed), tuple(invented), tuple(lacking)),
        *(settings.in_order(launched), tuple(blanks), variables, bool(started)),
        settings.in_order(single),
    )


@dataclass(frozen=True)
class _Filled:
    """A value for a setting, where it is from, and whether that is the repository."""

    option: Option
    value: str
    source: str
    is_known: bool = False

    @property
    def blank(self) -> Blank | None:
        """Return what a person has to fill in for it."""
        if self.is_known:
            return None
        name = re.sub(r"[^A-Z0-9]", "_", self.option.name.upper())
        return Blank(f"FILL_IN_{name}", self.option.name, self.value, self.option.shown_choices)


def _started(
    settings: ScriptSettings, given: Sequence[str], named: set[str]
) -> tuple[list[str], list[_Filled]]:
    """Return the words with which the repository starts a script of hydra, and made-up paths.

    Whoever gives words says all but which configuration; whoever names one says that, too.
    """
    words: list[str] = []
    filled: list[_Filled] = []
    if names_config(given):
        return words, filled
    for word in settings.launched:
        name, _, value = word.partition("=")
        if names_config([word]):
            words.append(word)
        elif given or name.lstrip("+") in named or not value:
            continue
        elif "$" not in value and not value.lower().startswith(_WORD_BLANKS):
            words.append(word)
        elif (option := settings.options.get(name)) is not None and option.is_data:
            made = f"made-up-{option.key}"
            filled.append(_Filled(option, made, "a path that is not there"))
    return words, filled


def _with_values(settings: ScriptSettings, words: Sequence[str]) -> ScriptSettings:
    """Return settings whose defaults are what words of hydra say."""
    values = {name: value for name, _, value in (word.partition("=") for word in words)}
    options = {
        name: replace(one, default=read_value(values[name])) if name in values else one
        for name, one in settings.options.items()
    }
    return replace(settings, options=options)


def _value(option: Option, shown: Mapping[str, tuple[str, str]]) -> list[_Filled]:
    """Return a value for a required setting, if there is one.

    Others are for a person to find: which data to train on, or a number that no file gives.
    """
    names = option.names if option.flag else ("",)
    value, place = next((shown[name] for name in names if name in shown), ("", ""))
    is_one = not option.closed or not option.choices or value in map(str, option.choices)
    if value and is_one and not value.lower().startswith(_BLANKS):
        return [_Filled(option, value, f"as in {place}", is_known=True)]
    if option.is_data and option.choices:
        without = [str(one) for one in option.choices if needs_no_data(str(one))]
        return [_Filled(option, one, "the choice that needs no data") for one in without[:1]]
    if option.is_data:
        made = _Filled(option, f"made-up-{option.key}", "a path that is not there")
        return [] if option.closed else [made]
    choices = [str(one) for one in (option.choices if option.closed else option.compared)]
    trains = [one for one in choices if one.lower().startswith("train")]
    if trains:
        return [_Filled(option, trains[0], "the choice that trains")]
    return [_Filled(option, one, f"the first of {len(choices)} choices") for one in choices[:1]]


def _on_accelerator(option: Option) -> list[_Filled]:
    """Return the value with which a script computes on CUDA if its default does not."""
    value = None
    if _ACCELERATOR.fullmatch(option.key) and (
        option.switch or (option.switch is None and option.default is False)
    ):
        value = "True"
    elif _DEVICE.fullmatch(option.key) and str(option.default).lower() == "cpu":
        names = [name for name in ("cuda", "gpu") if not option.closed or name in option.choices]
        value = names[0] if names else None
    source = "as only what is on CUDA is ported"
    return [] if value is None else [_Filled(option, value, source, is_known=True)]


def _name_of(word: str) -> str:
    return word.lstrip("-").partition("=")[0].rpartition(".")[2].replace("-", "_").lower()


def _launch_values(entry: StartScript, required: Sequence[Option]) -> dict[str, tuple[str, str]]:
    """Return values of settings that lines which start the script give, and these lines.

    Values of several lines need not go together, so that the line with most of the required ones
    comes first.
    """
    lines = [_values_of(launch) for launch in entry.launches]
    lines.sort(key=lambda line: -sum(any(n in line for n in one.names) for one in required))
    return {name: value for line in reversed(lines) for name, value in line.items()}


def _values_of(launch: Launch) -> dict[str, tuple[str, str]]:
    """Return the values that one line gives; that of a word in front of all has no name."""
    found: dict[str, tuple[str, str]] = {}
    words = launch.arguments
    for word, following in zip(words, (*words[1:], "--"), strict=False):
        flag, sign, value = word.partition("=")
        value = value if sign else following
        if (word.startswith("-") or sign) and not value.startswith("-"):
            found[_name_of(flag)] = value, launch.place
    if words and not words[0].startswith("-") and "=" not in words[0]:
        found[""] = words[0], launch.place
    return found


def _smaller(settings: ScriptSettings) -> Iterator[tuple[Option, Any]]:
    """Yield the settings that may be smaller for a few steps, with that value."""
    options = list(settings.options.values())
    heads = [o for o in options if _HEADS.fullmatch(o.key) and _is_count(o.default)]
    widths = [o for o in options if _WIDTH.fullmatch(o.key) and _is_count(o.default)]
    for option in options:
        # Of 0 and 1 none is a size: it is a switch.
        if option.choices and _is_count(option.default) and 0 < min(option.choices):
            if min(option.choices) < option.default:
                yield option, min(option.choices)
        elif _is_count(option.default):
            limit = _limit(option)
            if limit is not None and option.default > limit:
                yield option, limit
        elif settings.style == HYDRA and _WIDTHS.fullmatch(option.key):
            yield from ((option, narrow) for narrow in _narrower(option.default))
        elif isinstance(option.default, str) and _NAMES_MODEL.fullmatch(option.key):
            name = _smallest_name(option.default, settings.names)
            if name != option.default:
                yield option, name
    if heads and len(widths) == 1 and widths[0].default > _SMALL_WIDTH:
        yield widths[0], _SMALL_WIDTH
        yield from ((one, _SMALL_HEADS) for one in heads if one.default > _SMALL_HEADS)


def _narrower(widths: Any) -> Iterator[str]:
    """Yield a list of widths with the same ratios that begins at a small width, if it is one."""
    if not isinstance(widths, list) or any(one % _SMALL_WIDTH for one in widths):
        return
    least = min(widths)
    if least > _SMALL_WIDTH:
        yield str([one * _SMALL_WIDTH // least for one in widths]).replace(" ", "")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _limit(option: Option) -> int | None:
    return next((most for name, most in _LIMITS if _is_named(option, name)), None)


def _is_named(option: Option, pattern: str) -> bool:
    """Return whether a pattern is of the last part of a setting's name, or of all of it."""
    return any(re.fullmatch(pattern, one) for one in (option.key, option.name))


def _smallest_name(name: str, names: frozenset[str]) -> str:
    """Return the name that differs in a word for a size only, and in a patch size, and is smaller.

    `DiT-XL/2` becomes `DiT-S/8`, `mae_vit_large_patch16` becomes `mae_vit_base_patch16`.
    """
    form, own = _form(name), _rank(name)
    if own is None:
        return name
    alike = [(rank, n) for n in names if _form(n) == form and (rank := _rank(n)) is not None]
    return min([*alike, (own, name)])[1]


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Za-z]+|\d+|[^A-Za-z\d]+", name)


def _form(name: str) -> tuple[str, ...]:
    """Return a name without what says its size."""
    words = _words(name)
    return tuple(
        "size" if w.lower() in _ORDER else "number" if w.isdigit() and i == len(words) - 1 else w
        for i, w in enumerate(words)
    )


def _rank(name: str) -> tuple[int, int] | None:
    """Return how large a name says that a model is: larger patches make it smaller."""
    words = _words(name)
    sizes = [_ORDER.index(word.lower()) for word in words if word.lower() in _ORDER]
    return (sizes[-1], -int(words[-1]) if words[-1].isdigit() else 0) if sizes else None


def read_settings(
    script: Path,
    modules: Sequence[Path],
    entry: StartScript,
    given: Sequence[str] = (),
    changes: Sequence[str] = (),
) -> ScriptSettings:
    """Return the settings of a script.

    Args:
        script: The script.
        modules: The modules of the repository that it imports, where options may be, too.
        entry: What is known of the script.
        given: The command line of a person, for hydra.
        changes: What is set besides, for hydra.
    """
    trees = [tree for path in (script, *modules) if (tree := _parse(path)) is not None]
    names = frozenset(name for tree in trees for name in _model_names(tree))
    if any("hydra" in reason for reason in entry.reasons):
        return _hydra_settings(
            find_config(script, entry, given, changes), launched_words(script, entry), trees, names
        )
    options: dict[str, Option] = {}
    tables = {name: table for tree in trees for name, table in listed_names(tree)}
    for tree in trees:
        for option in _argparse_options(tree, tables):
            options.setdefault(option.name, option)
    options = _with_compared(options, trees)
    if options:
        return ScriptSettings(ARGPARSE, options, names)
    if trees and _executes_overrides(trees[0]):
        return ScriptSettings(GLOBALS, dict(_globals(trees[0])), names)
    return ScriptSettings(UNKNOWN, {}, names)


def _hydra_settings(
    config: HydraConfig | None,
    launched: tuple[list[str], str],
    trees: Sequence[ast.Module],
    names: frozenset[str],
) -> ScriptSettings:
    leaves = config.leaves() if config is not None else {}
    # What hydra writes for a value that a person has to give.
    options = {
        name: Option(name, name, default=value, required=value == "???")
        for name, value in leaves.items()
    }
    for group in config.groups if config is not None else ():
        if group.is_open:
            options[group.name] = Option(
                group.name, group.name, choices=group.choices, closed=True, required=True
            )
    words, place = launched
    variables = tuple(config.variables()) if config is not None else ()
    found = _with_compared(options, trees)
    return ScriptSettings(HYDRA, found, names, tuple(words), place, variables)


def _with_compared(options: Mapping[str, Option], trees: Sequence[ast.Module]) -> dict[str, Option]:
    """Return settings with what the script compares them with, if they take any value."""
    compared: dict[str, list[str]] = {}
    for name, value in (pair for tree in trees for pair in compared_values(tree)):
        compared.setdefault(name, []).append(value)
    found = {}
    for name, option in options.items():
        attribute = option.name.rpartition(".")[2].replace("-", "_")
        more = () if option.closed or not option.required else compared.get(attribute, ())
        choices = tuple(dict.fromkeys((*option.choices, *more)))
        found[name] = replace(option, choices=choices, compared=tuple(dict.fromkeys(more)))
    return found


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _model_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (str(k.value) for k in node.keys if isinstance(k, ast.Constant) and _text(k))
        elif isinstance(node, ast.FunctionDef | ast.Assign) and node in tree.body:
            targets = [node.name] if isinstance(node, ast.FunctionDef) else node.targets
            yield from (t if isinstance(t, str) else getattr(t, "id", "") for t in targets)


def _text(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def _argparse_options(tree: ast.Module, tables: Mapping[str, tuple[Any, ...]]) -> Iterator[Option]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=args, keywords=keywords):
                flags = [a.value for a in args if isinstance(a, ast.Constant) and _text(a)]
                if flags:
                    yield _option(flags, {k.arg: k.value for k in keywords}, tables)


def _option(
    flags: Sequence[Any],
    given: Mapping[str | None, ast.expr],
    tables: Mapping[str, tuple[Any, ...]],
) -> Option:
    flag = max(flags, key=len)
    action = _literal(given.get("action"))
    choices = _literal(given.get("choices"))
    if not isinstance(choices, list | tuple):
        choices = table_of(given.get("choices"), tables)
    closed = "choices" in given
    kind, text = given.get("type"), _literal(given.get("help"))
    is_text = isinstance(text, str) and (kind is None or ast.unparse(kind) == "str")
    if not closed and is_text and not _PLACE.search(flag.lower()):
        choices = words_of_help(text)
    positional = not flag.startswith("-")
    optional = _literal(given.get("nargs")) in ("?", "*") or "default" in given
    return Option(
        name=flag.lstrip("-"),
        flag="" if positional else flag,
        default=_literal(given.get("default")),
        choices=tuple(choices),
        closed=closed,
        aliases=tuple(_name_of(other) for other in flags if other != flag),
        required=_literal(given.get("required")) is True or (positional and not optional),
        switch={"store_true": True, "store_false": False}.get(action) if action else None,
    )


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _executes_overrides(tree: ast.Module) -> bool:
    """Return whether a script executes a file that changes its globals, as nanoGPT's does."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exec"
        for statement in tree.body
        if isinstance(statement, ast.Expr)
        for node in ast.walk(statement)
    )


def _globals(tree: ast.Module) -> Iterator[tuple[str, Option]]:
    for statement in tree.body:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id="exec"))):
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, Option(name, f"--{name}=", default=_product(value))


def _product(node: ast.expr) -> Any:
    """Return a literal, or a product of two."""
    match node:
        case ast.BinOp(op=ast.Mult(), left=ast.Constant(value=a), right=ast.Constant(value=b)):
            return a * b if isinstance(a, int) and isinstance(b, int) else None
    return _literal(node)
