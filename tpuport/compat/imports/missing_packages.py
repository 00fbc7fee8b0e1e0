"""Stand-ins for packages that are not installed: enough to import code that names them, no more."""

import ast
import functools
import inspect
import linecache
import warnings
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

from tpuport.foundation.cuda_only import is_cuda_only
from tpuport.foundation.errors import PortError
from tpuport.foundation.user_frames import is_inside, user_frame
from tpuport.tracing.core.errors import port_error

# Names that code puts into `except`, where Python wants a class derived from BaseException.
_EXCEPTIONS = ("Error", "Exception", "Warning", "Interrupt", "Timeout", "Exceeded")

# Read at import to choose between spellings of a kernel (`version.parse(triton.__version__)`).
_VERSIONS = {"triton": "3.5.0"}


def refuse(path: str, what: str) -> PortError:
    """Return the error for real work asked of a stand-in, at the user's line."""
    package = path.partition(".")[0]
    install = "" if is_cuda_only(path) else f"pip install {package}, or "
    return port_error(
        f"{path} {what}, but {package} is not installed: its stand-in only satisfies imports",
        remedy=f"{install}keep the program from reaching this line (an option of the repository"
        f" that does without {package})",
    )


class StandIn:
    """An attribute of an absent package.

    It serves where definitions name it: as a base class, a decorator, a default value, in
    annotations, in `isinstance` (False) and `issubclass` (False). Calls are postponed where they
    define something: the result is a stand-in again. All else raises, naming the user's line.
    """

    def __init__(self, path: str, *, called: bool = False) -> None:
        self.__dict__["_path"] = path
        self.__dict__["_called"] = called

    def __repr__(self) -> str:
        return f"<stand-in for {self._path}, which is not installed>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{self!r} has no {name}")
        found = make(f"{self._path}.{name}", called=self._called)
        self.__dict__[name] = found
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a decorated definition or a stand-in for the result; raise where work is done."""
        if _in_definition():
            if len(args) == 1 and not kwargs and isinstance(args[0], _DECORATED):
                return self._decorate(args[0])
            if not self._called:
                return StandIn(f"{self._path}()", called=True)
        raise refuse(self._path, "was called")

    def _decorate(self, target: Any) -> Any:
        if not isinstance(target, FunctionType):
            return target
        if is_cuda_only(self._path):
            return StandIn(f"{self._path}({target.__qualname__})", called=True)
        warnings.warn(
            f"{target.__module__}.{target.__qualname__} is left undecorated:"
            f" {self._path.partition('.')[0]} is not installed, so {self._path} decorates nothing",
            stacklevel=3,
        )
        return target

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        del bases
        return (_base(self._path),)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __getitem__(self, item: Any) -> "StandIn":
        if self._called and not _in_definition():
            raise refuse(self._path, "was indexed")
        return self

    def __or__(self, other: Any) -> "StandIn":
        if not _is_type(other):
            raise refuse(self._path, "was used in a computation")
        return self

    __ror__ = __or__

    def __copy__(self) -> "StandIn":
        return self

    def __deepcopy__(self, memo: Any) -> "StandIn":
        return self

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        if self is other or isinstance(other, StandIn) or _is_type(other):
            return self is other
        raise refuse(self._path, "was compared")


# The kinds of object that a decorator is applied to.
_DECORATED = (FunctionType, type, StandIn, staticmethod, classmethod, property)


def _is_type(value: Any) -> bool:
    plain = isinstance(value, (type, StandIn, str, ModuleType)) or value is None
    return plain or type(value).__module__ in ("typing", "types", "collections.abc")


def _refusing(name: str) -> Any:
    def method(self: StandIn, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise refuse(self._path, f"was used ({name})")

    method.__name__ = name
    return method


for _name in (
    *("__bool__", "__len__", "__iter__", "__next__", "__contains__", "__enter__", "__aenter__"),
    *("__int__", "__float__", "__index__", "__lt__", "__le__", "__gt__", "__ge__", "__await__"),
    *("__setitem__", "__delitem__", "__neg__", "__abs__", "__invert__", "__array__", "__fspath__"),
    *(f"__{r}{op}__" for r in ("", "r") for op in ("add", "sub", "mul", "truediv", "floordiv")),
    *(f"__{r}{op}__" for r in ("", "r") for op in ("mod", "pow", "matmul", "and", "xor")),
):
    setattr(StandIn, _name, _refusing(_name))


class StandInModule(StandIn, ModuleType):
    """A module of an absent package; `from package import name` may make one of any name."""

    def __init__(self, name: str) -> None:
        ModuleType.__init__(self, name)
        StandIn.__init__(self, name)

    __hash__ = StandIn.__hash__

    def __getattr__(self, name: str) -> Any:
        if name == "__all__" and _is_star_import():
            raise refuse(self._path, "was imported by `from ... import *`, which needs its names")
        if name == "__version__" and self._path in _VERSIONS:
            return _VERSIONS[self._path]
        return StandIn.__getattr__(self, name)

    def __bool__(self) -> bool:
        return True


def _is_star_import() -> bool:
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    return caller is not None and caller.f_code.co_name == "_handle_fromlist"


def make(path: str, *, called: bool = False) -> Any:
    """Return a stand-in for `path`: an exception class where the name is one's, else an object."""
    last = path.rpartition(".")[2]
    if last.endswith(_EXCEPTIONS) and last[:1].isupper() and not called:
        return type(last, (_AbsentError,), {"__module__": path.rpartition(".")[0], "_path": path})
    return StandIn(path, called=called)


class _AbsentError(Exception):
    """An exception class of an absent package: nothing raises it, so `except` never matches."""

    _path = ""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise refuse(self._path, "was called")


@functools.cache
def _base(path: str) -> type:
    """Return the base class that replaces a stand-in in the bases of a user's class."""

    def new(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise refuse(path, f"is the base of {cls.__qualname__}, of which an object was made")

    def derived(cls: type, **kwargs: Any) -> None:
        del cls, kwargs  # the arguments that the real base's `__init_subclass__` would take

    name = path.rpartition(".")[2].strip("()") or path
    return type(name, (), {"__new__": new, "__init_subclass__": classmethod(derived)})


# -- what the user's code is doing ----------------------------------------------------------------


_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


def _in_definition() -> bool:
    """Return whether the user's code defines something now.

    True in a class body, a decorator, a default value, and at the top of a module that is imported
    (not of the script that is run), also in a comprehension there. What a decorator or a default
    value calls is part of the definition.
    """
    frame, is_body = user_frame(), True
    while frame is not None:
        code = frame.f_code
        if not is_inside(code.co_filename) and code.co_name != "<lambda>":
            if frame.f_lineno in definition_lines(code) or (is_body and _is_body(frame)):
                return True
            is_body = is_body and code.co_name in _COMPREHENSIONS
        frame = frame.f_back
    return False


def _is_body(frame: FrameType) -> bool:
    """Return whether a frame runs a class body or the top of a module that is imported."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return False
    return "__qualname__" in frame.f_locals or frame.f_globals.get("__name__") != "__main__"


@functools.lru_cache(maxsize=4096)
def definition_lines(code: CodeType) -> frozenset[int]:
    """Return the lines of each definition, from its first decorator to the end of its signature."""
    lines: set[int] = set()
    for node in ast.walk(syntax_tree(code.co_filename)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min(node.lineno, *(d.lineno for d in node.decorator_list), node.lineno)
            lines.update(range(first, max(node.lineno + 1, node.body[0].lineno)))
    return frozenset(lines)


@functools.lru_cache(maxsize=256)
def syntax_tree(file: str) -> ast.Module:
    """Return the syntax tree of a file, an empty one if there is no source to read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])
