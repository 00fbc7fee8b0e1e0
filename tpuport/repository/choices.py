"""What a setting may be, where the script shows it: help texts, comparisons, tables of names."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

_WORD = r"[A-Za-z0-9][\w.+-]*"
# `cifar10 | lsun | fake`, as a help text has it.
_PIPED = re.compile(rf"{_WORD}(?:\s*\|\s*{_WORD})+")
# `one of: cifar10, fake`, `{cifar10, fake}`, `(RNN_TANH, LSTM, GRU)`, `options: a, b or c`.
_LIST = rf"['\"]?{_WORD}['\"]?(?:(?:\s*,\s*(?:or\s+|and\s+)?|\s+or\s+)['\"]?{_WORD}['\"]?)+"
_LISTED = (
    re.compile(
        rf"(?:one of|choices|options|choose from|either)\s*(?:are|is)?\s*[:=]?\s*[\[({{]?({_LIST})"
    ),
    re.compile(rf"[\[({{]\s*({_LIST})\s*[\])}}]"),
)
_NO_CHOICE = ("or", "and", "e.g.", "i.e.", "eg", "ie", "etc", "etc.")
_NO_DATA = {
    *("fake", "synthetic", "synth", "dummy", "random", "mock", "toy", "artificial"),
    *("generated", "simulated"),
}


def needs_no_data(choice: str) -> bool:
    """Return whether the name of a data set says that the script makes it up."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", choice)
    return any(word.lower() in _NO_DATA for word in words)


def words_of_help(text: str) -> tuple[str, ...]:
    """Return the alternatives that a help text names; none if it names no list of words."""
    found = _PIPED.search(text)
    if found is not None:
        return tuple(dict.fromkeys(re.findall(_WORD, found[0])))
    for pattern in _LISTED:
        found = pattern.search(text)
        if found is not None:
            words = re.findall(_WORD, found[1])
            return tuple(dict.fromkeys(word for word in words if word not in _NO_CHOICE))
    return ()


def compared_values(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of attributes and entries with the strings that a module compares them with.

    `args.dataset == "fake"`, `str(args.dataset).lower() in ("a", "b")`, `cfg["dataset"] != "a"`,
    `match args.dataset: case "a"`.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for op, other in zip(ops, others, strict=True):
                    if isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
                        yield from _pairs(left, other)
                        if isinstance(op, ast.Eq | ast.NotEq):
                            yield from _pairs(other, left)
            case ast.Match(subject=subject, cases=cases):
                for value in (one for case in cases for one in ast.walk(case.pattern)):
                    if isinstance(value, ast.MatchValue):
                        yield from _pairs(subject, value.value)


def _pairs(setting: ast.expr, values: ast.expr) -> Iterator[tuple[str, str]]:
    name = _name(setting)
    if name is None:
        return
    listed = values.elts if isinstance(values, ast.List | ast.Tuple | ast.Set) else [values]
    for one in listed:
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value:
            yield name, one.value


def _name(node: ast.expr) -> str | None:
    """Return the setting that an expression is of: `a.name`, `a["name"]`, `str(a.name).lower()`."""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            return _name(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "upper" | "strip"), args=[]):
            return _name(inner)
        case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return None


def listed_names(tree: ast.Module) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the tables of a module by their names: the keys of a dict, the items of a list."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)):
                elements = keys
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.List(elts=elements) | ast.Tuple(elts=elements),
            ):
                pass
            case _:
                continue
        values = tuple(one.value for one in elements if isinstance(one, ast.Constant))
        if values and len(values) == len(elements):
            yield name, values


def table_of(node: ast.expr | None, tables: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the table that an expression is of: `TABLE`, `list(TABLE)`, `TABLE.keys()`."""
    match node:
        case ast.Name(id=name):
            return tables.get(name, ())
        case ast.Call(func=ast.Name(id="list" | "tuple" | "sorted"), args=[inner]):
            return table_of(inner, tables)
        case ast.Call(func=ast.Attribute(value=inner, attr="keys"), args=[]):
            return table_of(inner, tables)
        case ast.Attribute(attr=name):
            return tables.get(name, ())
    return ()
