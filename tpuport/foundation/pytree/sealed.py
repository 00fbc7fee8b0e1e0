"""Values sealed for one trace, which notice that code looks at them."""

import sys
from typing import Any

from tpuport.foundation.pytree.children import Children
from tpuport.foundation.pytree.tree import TreeSpec, hashable

# True, False and None are told apart by identity, which cannot be noticed.
KINDS = frozenset({str, bytes, int, float})


class WasRead(BaseException):
    """Raised where code looks at a sealed value; no `except Exception` of the user's catches it."""


class Sealed:
    """A stand-in for a value, which code may pass on and put away; all else raises `WasRead`.

    It is no subclass of `str`: C code would read its characters without a call. Where one outlives
    the trace, in a log for example, it is the value itself for most that is asked of it.
    """

    # Of the subclass that each has: the trace, and the value.
    trial: "SealedTrace"
    value: Any

    def __getattribute__(self, name: str) -> Any:
        if _looks(self, name):
            return getattr(type(self).value, name)
        return object.__getattribute__(self, name)

    def __hash__(self) -> int:
        return hash(type(self).value) if _looks(self, "__hash__") else object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return type(self).value == other if _looks(self, "__eq__") else self is other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note that a function of torch got it."""
        del types, args, kwargs
        note(cls, getattr(func, "__name__", "torch"))
        return NotImplemented


class SealedTrace:
    """A trace with sealed values.

    Args:
        passed: What the names of files begin with whose code may look at one.
    """

    def __init__(self, passed: tuple[str, ...]) -> None:
        self.passed = passed
        self.is_running = True
        self.reads: list[str] = []

    def seal(self, value: Any) -> Sealed:
        """Return a stand-in for a value that notes in `reads` what code does with it."""
        # Of a package whose objects are no containers of attributes.
        known = {"trial": self, "value": value, "__module__": "builtins"}
        return type("Sealed", (Sealed,), known)()


def note(kind: type[Sealed], operation: str) -> None:
    """Note that code looks at a sealed value.

    Raises:
        WasRead: the trace is running.
    """
    if kind.trial.is_running:
        kind.trial.reads.append(operation)
        raise WasRead(operation)


def _looks(one: Sealed, operation: str) -> bool:
    """Return whether the code two frames above is to see the value, which it may not in a trace."""
    kind, frame = type(one), sys._getframe(2)
    while frame.f_code.co_name == "__instancecheck__" and frame.f_back is not None:
        frame = frame.f_back  # a class that has its own asks for who called `isinstance`
    if frame.f_code.co_filename.startswith(kind.trial.passed):
        return False
    note(kind, operation)
    return True


def _noting(operation: str) -> Any:
    def read(self: Sealed, *args: Any) -> Any:
        note(type(self), operation)
        return getattr(type(self).value, operation)(*args)

    return read


def _operations() -> set[str]:
    """Return the special methods by which code looks at a string or number."""
    found = {name for kind in (*KINDS, complex) for name in dir(kind) if name.startswith("__")}
    mirrored = {f"__r{name[2:]}" for name in found}
    made_otherwise = {name for name in vars(object) if "init" in name or "class" in name}
    kept = {*vars(Sealed), *made_otherwise, "__new__", "__doc__", "__setattr__", "__delattr__"}
    return (found | mirrored | {"__fspath__", "__matmul__", "__rmatmul__"}) - kept


for _name in _operations():
    setattr(Sealed, _name, _noting(_name))


# -- the values in a structure ---------------------------------------------------------------------


def apart(spec: TreeSpec) -> tuple[Any, list[Any]]:
    """Return a structure's key without its strings and numbers, and these in order."""
    found: list[Any] = []
    return _key(spec.node, found), found


def _key(node: Any, found: list[Any]) -> Any:
    tag, what = node[:2]
    if tag == "static":
        if type(what) in KINDS:
            found.append(what)
            return type(what)
        return ("static", type(what), hashable(what, []))
    if tag == "array":
        return (tag, what, hashable(node[2], []))
    if tag != "node":
        return node
    content: Children = node[2]
    parts = tuple(_key(part, found) for part in content.all)
    keys = tuple(hashable(key, []) for key in content.equal_keys)
    keys += (content.known_by_identity,)
    return (content.kind, what, keys, tuple(content.held), hashable(content.option, []), parts)


def replaced(spec: TreeSpec, values: list[Any]) -> TreeSpec:
    """Return a structure with other values for its strings and numbers, in the order of `apart`."""
    rest = iter(values)

    def build(node: Any) -> Any:
        if node[0] == "static":
            return ("static", next(rest)) if type(node[1]) in KINDS else node
        return (node[0], node[1], node[2].map(build)) if node[0] == "node" else node

    places = [index for index, value in enumerate(values) if isinstance(value, Sealed)]
    key = ("sealed", *places, spec.key)
    return TreeSpec(build(spec.node), key, spec.keep, spec.containers)
