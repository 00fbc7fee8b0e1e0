"""The places outside of its arguments that Python code reads, found by following names.

From the code of a module's methods, the names in it lead to globals, closures, classes and other
functions. Nothing runs. What is followed too far costs a comparison at each call; code that is
reached only by a name that is computed may be missed.
"""

import builtins
import contextvars
import dis
import functools
import inspect
import itertools
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Packages whose code is not followed: scripts do not change what a library's code reads.
_FOLLOWED_NOT = sys.stdlib_module_names - {"__main__"} | set(
    "torch torchax jax jaxlib numpy tpuport einops".split()
)
VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_USERS = (
    *(*VALUES, list, dict, tuple, set, types.FunctionType, property, staticmethod, classmethod),
)
_SETUP = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "extra_repr"})
# Code that uses these may read any attribute.
_ANY = frozenset({"getattr", "vars", "__dict__", "attrgetter", "__getattr__", "__getattribute__"})
# Code that uses these may call any method.
_COMPUTED = frozenset({"getattr", "attrgetter", "methodcaller", "__getattribute__"})
_TYPES = frozenset({"type", "isinstance"})
# Code that uses these may read a global by a string.
_BY_STRING = _ANY | set("hasattr globals locals f_globals __globals__ eval exec modules".split())
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")
_MOST_FUNCTIONS = 5000
MISSING = object()


class CodeReads:
    """What the code of modules and functions can read from outside.

    Args:
        roots: modules and functions.
        methods: the methods that are called; others are followed only if code names them. By
            default all methods are.
        unread: the attributes of root modules that are known not to be read, by full name.

    Attributes:
        places: by an internal key, the namespaces and names of globals.
        functions: the functions, whose defaults and closures are read.
        cells: the cells of closures, by id.
        classes: the classes whose attributes are read, with the types of attributes to look at: of
            a library's classes only plain values.
        variables: the names of environment variables; None if the code may read any.
        given_attributes: the names of what code sets attributes of (`function.calls = 0`).
        types: the namespaces, by id, of code that may call Python's `type` or `isinstance`.
        replaceable: where scripts may put functions of their own, each owner with the names: what
            the code reads of torch, and the `forward` of a library's modules. An owner need not
            hold a name: it inherits the method, or torch has it in C.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        methods: Iterable[str] | None = None,
        unread: frozenset[str] = frozenset(),
    ) -> None:
        self.unread = unread
        self.places: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.functions: list[types.FunctionType] = []
        self.cells: dict[int, types.CellType] = {}
        self.classes: dict[type, tuple[type, ...]] = {}
        self.variables: set[str] | None = set()
        self.given_attributes: set[str] = set()
        self.types: dict[int, dict[str, Any]] = {}
        self._follows_all = methods is None
        self._names: set[str] = set(methods or ())
        self._reads_any = False
        # With the namespace of its globals: code of two files is equal if its text is.
        self._codes: set[tuple[types.CodeType, int]] = set()
        self._followed: dict[int, types.FunctionType] = {}
        self._todo: deque[types.FunctionType] = deque()
        # Methods that no code has named so far, by name.
        self._unnamed: dict[str, list[tuple[str, Any]]] = {}
        for root in roots:
            self._note_root(root)
        while self._todo and len(self._codes) < _MOST_FUNCTIONS:
            self._follow(self._todo.popleft())
        self._followed.clear()
        self._reads_any = self._reads_any or bool(self._todo)
        self.replaceable = self._replaceable()

    def _replaceable(self) -> list[tuple[Any, list[str]]]:
        owners = (torch, torch.nn.functional, torch.Tensor)
        found = [(owner, sorted(self._names.intersection(dir(owner)))) for owner in owners]
        of_libraries = [cls for cls, kinds in self.classes.items() if kinds is VALUES]
        modules = [cls for cls in of_libraries if issubclass(cls, torch.nn.Module)]
        return [*found, *((cls, ["forward"]) for cls in modules)]

    def leave_out(self, cells: Iterable[types.CellType]) -> None:
        """Leave out variables of closures, which are known in another way."""
        for cell in cells:
            self.cells.pop(id(cell), None)

    def reads(self, attribute: str) -> bool:
        """Return whether the code may read an attribute of this name."""
        return self._reads_any or attribute in self._names

    def attributes(self, cls: type) -> list[str]:
        """Return the names of the attributes of a class that the code may read."""
        kinds = self.classes[cls]
        return [
            name
            for name, value in vars(cls).items()
            if name[:2] != "__" and isinstance(value, kinds) and self.reads(name)
        ]

    def _note_root(self, root: Any) -> None:
        if not isinstance(root, torch.nn.Module):
            self._note_value(root)
            owner = getattr(root, "__self__", None)
            if isinstance(root, types.MethodType) and not isinstance(owner, torch.nn.Module | type):
                # Its attributes are read as those of an object in a closure are.
                self.cells[id(owner)] = types.CellType(owner)
                self._note_value(owner)
            return
        for fqn, one in root.named_modules():
            self._note_class(type(one), torch_too=True)
            prefix = fqn + "." if fqn else ""
            held = vars(one).items()
            for value in [*(v for n, v in held if prefix + n not in self.unread), *_hooks(one)]:
                self._note_value(value)

    def _note_class(self, cls: type, *, torch_too: bool = False) -> None:
        for base in cls.__mro__:
            if base in self.classes or base in (object, torch.nn.Module):
                continue
            if _top(base.__module__) in _FOLLOWED_NOT and not torch_too:
                continue
            if not hasattr(base, "__dict__") or base.__module__ == "builtins":
                continue
            library = _is_library(vars(sys.modules.get(base.__module__, builtins)))
            self.classes[base] = VALUES if library else _OF_USERS
            for name, value in vars(base).items():
                if name in _SETUP:
                    continue
                if self._follows_all or name in self._names or name[:2] == "__":
                    self._note_value(value)
                else:
                    self._unnamed.setdefault(name, []).append((base.__module__, value))

    def _note_value(self, value: Any) -> None:
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, property):
            for part in (value.fget, value.fset):
                self._note_value(part)
        elif isinstance(value, types.FunctionType):
            self._todo.append(value)
        elif isinstance(value, type):
            self._note_class(value)
        elif not isinstance(value, (*VALUES, torch.Tensor, types.ModuleType, torch.nn.Module)):
            if type(value).__module__ != "builtins":
                self._note_class(type(value))
            # An object may make up what it is asked for, or raise, as `pytest.mark` does.
            ask = _held if hasattr(type(value), "__getattr__") else getattr
            wrapped = ask(value, "__wrapped__", None) or ask(value, "func", None)
            if isinstance(wrapped, types.FunctionType):
                self._todo.append(wrapped)

    def _follow(self, function: types.FunctionType) -> None:
        if id(function) in self._followed:
            return
        self._followed[id(function)] = function
        if (function.__code__, id(function.__globals__)) not in self._codes:
            self._follow_code(function)
        if _top(function.__module__ or "") in _FOLLOWED_NOT:
            return
        # All that one decorator made have one code, and each has its own closure.
        library = _is_library(function.__globals__)
        if not library:
            self.functions.append(function)
        for cell in function.__closure__ or ():
            if not library or isinstance(content(cell), VALUES):
                self.cells[id(cell)] = cell
            self._note_value(content(cell))

    def _follow_code(self, function: types.FunctionType) -> None:
        names: set[str] = set()
        strings: set[str] = set()
        for code in _nested(function.__code__):
            self._codes.add((code, id(function.__globals__)))
            names.update(code.co_names)
            strings.update(c for c in code.co_consts if isinstance(c, str))
        library = _is_library(function.__globals__)
        of_modules = names | strings if names & _BY_STRING else set(names)
        # Neither an attribute (`self.step`) nor a key of a dict (`batch["image"]`) reads a global
        # of that name, which may be the variable of a script's loop.
        by_name = library or bool(names & _BY_STRING)
        of_globals = of_modules if by_name else _globals_of(function.__code__)
        names |= strings
        self._note_methods(names - self._names)
        self._names |= names
        if _top(function.__module__ or "") in _FOLLOWED_NOT:
            return
        self.given_attributes |= _given_attributes(function.__code__)
        if names & _TYPES:
            self.types[id(function.__globals__)] = function.__globals__
        self._reads_any = self._reads_any or bool(names & _ANY)
        if names & _ENVIRONMENT:
            self._note_variables({name for name in names if _VARIABLE.fullmatch(name)})
        self._note_names(function.__globals__, of_globals, of_modules)
        if not library and names & _COMPUTED:
            self._note_methods(list(self._unnamed), of=function.__module__)

    def _note_variables(self, names: set[str]) -> None:
        """Note the environment variables among the strings of code that reads some."""
        if self.variables is not None:
            self.variables = self.variables | names if names else None

    def _note_methods(self, names: Iterable[str], of: str | None = None) -> None:
        """Follow the methods of these names, or those among them that one module defines."""
        for name in names:
            held = self._unnamed.pop(name, ())
            left = [pair for pair in held if of not in (None, pair[0])]
            if left:
                self._unnamed[name] = left
            for pair in held:
                if pair not in left:
                    self._note_value(pair[1])

    def _note_names(
        self, namespace: dict[str, Any], names: Iterable[str], of_modules: set[str]
    ) -> None:
        """Note the globals of these names, and in modules among them those of `of_modules`."""
        for name in names:
            value = namespace.get(name, MISSING)
            if value is MISSING or (id(namespace), name) in self.places:
                continue
            if name == "__builtins__":
                continue  # what every module reads, and no script changes
            if isinstance(value, types.ModuleType):
                if _top(value.__name__) not in _FOLLOWED_NOT and value is not builtins:
                    self.places[id(namespace), name] = (namespace, name)
                    self._note_names(vars(value), of_modules, of_modules)
                continue
            watched = isinstance(value, (*VALUES, contextvars.ContextVar, types.FunctionType))
            if not _is_library(namespace) or watched:
                self.places[id(namespace), name] = (namespace, name)
            self._note_value(value)


def content(cell: types.CellType) -> Any:
    """Return what a cell holds, None if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _is_library(namespace: dict[str, Any]) -> bool:
    return "site-packages" in (namespace.get("__file__") or "")


def _held(value: Any, name: str, default: Any) -> Any:
    """Return an attribute that an object has, not one that its `__getattr__` makes up."""
    if inspect.getattr_static(value, name, default) is default:
        return default
    return getattr(value, name, default)


def _top(name: str) -> str:
    return name.split(".", 1)[0]


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that code reads or sets, the functions in it included."""
    return frozenset(
        str(step.argval)
        for one in _nested(code)
        for step in dis.get_instructions(one)
        if step.opname.endswith(("_GLOBAL", "_NAME"))
    )


@functools.lru_cache(maxsize=4096)
def _given_attributes(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals and closures that code sets an attribute of."""
    found: set[str] = set()
    for one in _nested(code):
        steps = list(dis.get_instructions(one))
        for step, after in itertools.pairwise(steps):
            if after.opname == "STORE_ATTR" and step.opname in _LOADS:
                found.add(str(step.argval))
    return frozenset(found)


_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"})


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    for held in (module._forward_hooks, module._forward_pre_hooks):
        yield from held.values()
