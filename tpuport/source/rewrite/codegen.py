"""Compilation of rewritten source to code objects: of a file or of one loaded function."""

import __future__

import ast
import functools
import inspect
import linecache
import re
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType

from tpuport.source.syntax.module import FUNCTIONS, Function
from tpuport.source.syntax.text import SourceText

# Each feature has a bit of its own, so their sum is their union. CO_NESTED is left out: as the flag
# of `nested_scopes` it changes nothing, and CPython sets it for every nested function.
_FUTURE_FLAGS: int = sum(
    {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}
    - {inspect.CO_NESTED}
)
_FACTORY = "tpuport_factory"
# Set by where a function is defined and by `types.coroutine`, not by its own source, so they are
# copied from the loaded function.
_FLAGS_OF_PLACE = inspect.CO_NESTED | inspect.CO_ITERABLE_COROUTINE
_NO_COLUMN = -1
_PLACED = (
    ast.stmt,
    ast.expr,
    ast.excepthandler,
    ast.arg,
    ast.keyword,
    ast.alias,
    ast.pattern,
)


class MismatchError(Exception):
    """The source at hand is not what a code object was compiled from."""


def compile_like(text: SourceText, code: CodeType) -> CodeType:
    """Compile the definition of a function to a replacement for `code`.

    Args:
        text: The definition, possibly indented in an `if`, with the lines of the user's file as
            origins.
        code: The code object of the loaded function.

    Returns:
        A code object with the same name, free variables, file and flags. Its lines are those of the
        user's file, and so are its columns wherever the text of a line is unchanged.

    Raises:
        MismatchError: the text does not define that function, or needs other free variables.
    """
    definition = find_definition(text, code)
    _move_to_origin(definition, text)
    free = list(code.co_freevars)
    path = [definition.name]
    owner = _class_around(code.co_qualname)
    body: ast.stmt = definition
    if owner is not None:
        # Only inside a class does CPython mangle private names and give `super()` its `__class__`.
        body = _wrapper(f"class {owner}: pass", body)
        free = [name for name in free if name != "__class__"]
        path.insert(0, owner)
    if free:
        path.insert(0, _FACTORY)
        body = _wrapper(f"def {_FACTORY}({', '.join(free)}): pass", body)
    module = ast.Module([*_imports(code.co_filename), body], [])
    compiled = compile(
        module, code.co_filename, "exec", code.co_flags & _FUTURE_FLAGS, dont_inherit=True
    )
    for name in path:
        compiled = _constant(compiled, name)
    if compiled.co_freevars != code.co_freevars:
        raise MismatchError("the rewritten function would need other variables from around it")
    flags = (compiled.co_flags & ~_FLAGS_OF_PLACE) | (code.co_flags & _FLAGS_OF_PLACE)
    compiled = compiled.replace(co_flags=flags)
    return _renamed(compiled, compiled.co_qualname, code.co_qualname)


def compile_module(text: SourceText, file: str) -> CodeType:
    """Compile a rewritten file.

    Args:
        text: The new text, with the lines of the user's file as origins.
        file: The user's file.

    Returns:
        The module's code object, with the user's file name and line numbers.

    Raises:
        SyntaxError: the text is not Python.
        ValueError: positions in the text cannot be mapped to lines of the user's file.
    """
    tree = ast.parse(text.text, file)
    _move_to_origin(tree, text)
    return compile(tree, file, "exec", dont_inherit=True)


def find_definition(text: SourceText, code: CodeType) -> Function:
    """Return the `def` in a text. It must be the only statement, apart from an `if` around it.

    Raises:
        MismatchError: it is not, or it defines another function than the one `code` belongs to.
    """
    try:
        body = ast.parse(text.text).body
    except SyntaxError as error:
        raise MismatchError(f"its source does not parse ({error.msg})") from error
    if len(body) == 1 and isinstance(body[0], ast.If):
        body = body[0].body
    if len(body) == 1 and isinstance(body[0], FUNCTIONS) and body[0].name == code.co_name:
        return body[0]
    raise MismatchError(f"no definition of {code.co_name} starts on line {code.co_firstlineno}")


def check_source(text: SourceText, code: CodeType) -> None:
    """Check that a code object was compiled from a text.

    Raises:
        MismatchError: it was not: the file has changed since, or something rewrote the code.
    """
    expected = compile_like(text, code)
    if not (_is_same(expected, code) or _is_rewritten_by_pytest(code)):
        raise MismatchError(
            "the code that runs is not what its source says: the file has changed since it was"
            " imported, or something else rewrote the function"
        )


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of all functions, classes and comprehensions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_codes(constant)


@functools.lru_cache(maxsize=256)
def _imports(file: str) -> tuple[ast.stmt, ...]:
    """Return import statements for the names that a file imports at module level.

    CPython compiles `torch.cat(...)` to other instructions where it sees that `torch` is an import,
    so the bytecode is only comparable when it sees those imports here too.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    names = sorted(_imported_names(tree.body))
    return tuple(ast.parse("".join(f"import {name}\n" for name in names)).body)


def _imported_names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((a.asname or a.name).split(".")[0] for a in node.names if a.name != "*")
        elif not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            nested = [
                child
                for child in ast.walk(node)
                if isinstance(child, ast.stmt) and child is not node
            ]
            names |= _imported_names(nested)
    return names


def _wrapper(source: str, body: ast.stmt) -> ast.stmt:
    (wrapper,) = ast.parse(source).body
    assert isinstance(wrapper, ast.FunctionDef | ast.ClassDef)
    wrapper.body = [body]
    return wrapper


def _class_around(qualified_name: str) -> str | None:
    """Return the name of the innermost class around a function, however deep in its methods."""
    parts = qualified_name.split(".")
    classes = [name for name, after in pairwise(parts) if "<locals>" not in (name, after)]
    return classes[-1] if classes and classes[-1].isidentifier() else None


def _constant(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _renamed(code: CodeType, old: str, new: str) -> CodeType:
    """Replace the prefix `old` of the qualified name in a code object and all code nested in it."""
    constants = tuple(
        _renamed(constant, old, new) if isinstance(constant, CodeType) else constant
        for constant in code.co_consts
    )
    name = re.sub(f"^{re.escape(old)}(?=$|\\.)", lambda _: new, code.co_qualname)
    return code.replace(co_consts=constants, co_qualname=name)


def _move_to_origin(tree: ast.AST, text: SourceText) -> None:
    """Give every node its line in the user's file, and its column where that text is unchanged."""
    last = len(text.lines)
    for node in ast.walk(tree):
        if isinstance(node, _PLACED):
            start, end = min(node.lineno, last), min(node.end_lineno or node.lineno, last)
            node.lineno, node.end_lineno = text.origin(start), text.origin(end)
            left, right = text.shift(start), text.shift(end)
            if left is None or right is None or node.end_lineno < node.lineno:
                node.end_lineno = max(node.lineno, node.end_lineno)
                node.col_offset = node.end_col_offset = _NO_COLUMN
            else:
                node.col_offset += left
                node.end_col_offset = (node.end_col_offset or 0) + right


def _is_same(a: CodeType, b: CodeType) -> bool:
    return (
        a.co_code == b.co_code
        and a.co_names == b.co_names
        and a.co_varnames == b.co_varnames
        and a.co_cellvars == b.co_cellvars
        and a.co_flags == b.co_flags
        and a.co_argcount == b.co_argcount
        and a.co_exceptiontable == b.co_exceptiontable
        and list(a.co_lines()) == list(b.co_lines())
        and len(a.co_consts) == len(b.co_consts)
        and all(_same_constant(x, y) for x, y in zip(a.co_consts, b.co_consts, strict=True))
    )


def _same_constant(a: object, b: object) -> bool:
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return _is_same(a, b)
    if type(a) is type(b) is frozenset:
        return a == b
    # Equal is not enough: 0.0 equals -0.0 and 1 equals True, while nan differs from itself.
    return type(a) is type(b) and repr(a) == repr(b)


def _is_rewritten_by_pytest(code: CodeType) -> bool:
    return any(name.startswith("@py") for name in (*code.co_names, *code.co_varnames))
