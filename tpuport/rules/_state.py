"""The attributes of `self` that the methods of a class write and read."""

import ast
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from tpuport.rules._effects import is_in_place
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS, Function

# A class with one of these is run as a module, whatever it inherits from.
_STEPS = frozenset({"forward", "training_step"})
_SET_UP = ("set_", "reset", "clear", "enable", "disable", "load", "save", "resize", "setup", "init")
_STATIC = frozenset({"staticmethod", "classmethod", "property"})
# This sets a flag of the tensor: its values stay.
_NOT_STATE = frozenset({"requires_grad_"})


@dataclass(frozen=True, eq=False)
class Write:
    """A place in a method that changes an attribute of `self`.

    Attributes:
        attribute: The attribute's name.
        node: The statement that changes it.
        value: The value that is bound to it or written into it; None where it is not in the source.
        method: The method.
        way: `bind`, `augment`, `buffer` (`self.register_buffer`), `element` (`self.x[i] = v`),
            `in_place` (`self.x.mul_(v)`) or `append`.
    """

    attribute: str
    node: ast.stmt
    value: ast.expr | None
    method: Function
    way: str


@dataclass(eq=False)
class ClassState:
    """The attributes of one class, as its methods use them.

    Attributes:
        methods: The methods by name.
        writes: All changes, in source order.
        reads: For each attribute the nodes that read it.
        calls: For each method the names of the class's methods that it calls.
        buffers: Names of registered buffers.
    """

    methods: dict[str, Function] = field(default_factory=dict[str, Function])
    writes: list[Write] = field(default_factory=list[Write])
    reads: dict[str, list[ast.Attribute]] = field(default_factory=dict[str, list[ast.Attribute]])
    calls: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    buffers: set[str] = field(default_factory=set[str])

    def reached_from(self, method: str) -> set[str]:
        """Return the methods that a method calls, directly or through others."""
        found: set[str] = set()
        pending = [method]
        while pending:
            for name in self.calls.get(pending.pop(), ()):
                if name not in found:
                    found.add(name)
                    pending.append(name)
        return found

    def written_by(self, method: str) -> list[Write]:
        """Return the writes of a method and of those that it calls."""
        names = {method, *self.reached_from(method)}
        return [write for write in self.writes if write.method.name in names]


# Several rules ask about the same class. An entry goes away with the tree of its file.
_known: "weakref.WeakKeyDictionary[ast.ClassDef, ClassState]" = weakref.WeakKeyDictionary()


def class_state(node: ast.ClassDef, context: Context) -> ClassState:
    """Return how the methods of a class use the attributes of `self`."""
    if node not in _known:
        _known[node] = _read_class(node, context)
    return _known[node]


def module_class(node: ast.AST, context: Context) -> ast.ClassDef | None:
    """Return the class around a method's code if it is run as a module, else None."""
    function = context.module.outermost_function(node)
    around = context.module.parents.get(function)
    if not isinstance(around, ast.ClassDef) or not isinstance(function, FUNCTIONS):
        return None
    if self_name(function) is None:
        return None
    return around if is_module(around) else None


def is_module(node: ast.ClassDef) -> bool:
    """Return whether a class has a step of its own or inherits from a class named like a module."""
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    named = any(b.endswith(("Module", "Model", "PreTrainedModel", "Layer", "Block")) for b in bases)
    return named or any(isinstance(m, FUNCTIONS) and m.name in _STEPS for m in node.body)


def self_name(function: Function) -> str | None:
    """Return the first parameter of a method; None for a static or class method or a property."""
    names = {ast.unparse(d).rpartition(".")[2] for d in function.decorator_list}
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments and not names & _STATIC else None


def is_set_up(method: Function, state: ClassState) -> bool:
    """Return whether a method runs before the step: by its name, or called by the constructor."""
    if method.name.lstrip("_").startswith(_SET_UP):
        return True
    return method.name in state.reached_from("__init__")


def runs_in_step(node: ast.AST, context: Context) -> bool:
    """Return whether code is part of a step, and not of a method that sets a module up."""
    if not context.in_step(node):
        return False
    function = context.module.outermost_function(node)
    around = context.module.parents.get(function)
    if not isinstance(function, FUNCTIONS):
        return False
    if not isinstance(around, ast.ClassDef):
        return not function.name.lstrip("_").startswith(_SET_UP)
    return not is_set_up(function, class_state(around, context))


def attribute_of(node: ast.AST, owner: str) -> str | None:
    """Return `x` for `self.x`, where `owner` is the name of `self`."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            return attribute
        case _:
            return None


def _read_class(node: ast.ClassDef, context: Context) -> ClassState:
    state = ClassState()
    for method in node.body:
        if isinstance(method, FUNCTIONS):
            state.methods[method.name] = method
    for method in state.methods.values():
        arguments = [*method.args.posonlyargs, *method.args.args]
        if arguments:
            _read_method(method, arguments[0].arg, state, context)
    return state


_WRITING = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)


def _read_method(method: Function, owner: str, state: ClassState, context: Context) -> None:
    calls = state.calls.setdefault(method.name, set())
    for node in context.module.inside(method):
        if isinstance(node, ast.Attribute):
            name = attribute_of(node, owner)
            if name is not None and isinstance(node.ctx, ast.Load):
                state.reads.setdefault(name, []).append(node)
        elif isinstance(node, ast.Call):
            name = attribute_of(node.func, owner)
            if name in state.methods:
                calls.add(name)
        elif isinstance(node, _WRITING):
            for name, value, way in _writes(node, owner):
                state.writes.append(Write(name, node, value, method, way))
                if way == "buffer":
                    state.buffers.add(name)


def _writes(node: ast.stmt, owner: str) -> Iterator[tuple[str, ast.expr | None, str]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _target_writes(target, value, owner)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _target_writes(target, value, owner)
        case ast.AugAssign(target=target, value=value):
            for name, _, way in _target_writes(target, value, owner):
                yield name, value, "augment" if way == "bind" else way
        case ast.Expr(value=ast.Call() as call):
            yield from _call_writes(call, owner)
        case _:
            pass


def _target_writes(
    target: ast.expr, value: ast.expr | None, owner: str
) -> Iterator[tuple[str, ast.expr | None, str]]:
    match target:
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            values: list[ast.expr | None] = [value] * len(targets)
            if isinstance(value, ast.Tuple) and len(value.elts) == len(targets):
                values = [*value.elts]
            for part, inner in zip(targets, values, strict=True):
                yield from _target_writes(part, inner, owner)
        case ast.Starred(value=inner):
            yield from _target_writes(inner, value, owner)
        case ast.Subscript(value=inner):
            name = attribute_of(inner, owner)
            if name is not None:
                yield name, value, "element"
        case _:
            name = attribute_of(target, owner)
            if name is not None:
                yield name, value, "buffer" if _is_buffer(value) else "bind"


def _is_buffer(value: ast.expr | None) -> bool:
    """Return whether a value is made by `torch.nn.Buffer(...)`."""
    match value:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name == "Buffer"
        case _:
            return False


def _call_writes(call: ast.Call, owner: str) -> Iterator[tuple[str, ast.expr | None, str]]:
    match call:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr="register_buffer"),
            args=[ast.Constant(value=str(buffer)), *rest],
        ) if name == owner:
            values = [*rest[:1], *(k.value for k in call.keywords if k.arg == "tensor")]
            yield buffer, values[0] if values else None, "buffer"
        case ast.Call(func=ast.Attribute(value=inner, attr="append" | "extend"), args=[value]):
            name = attribute_of(inner, owner)
            if name is not None:
                yield name, value, "append"
        case ast.Call(func=ast.Attribute(value=inner, attr=method)):
            root, is_write = inner, is_in_place(method, but=_NOT_STATE)
            while isinstance(root, ast.Call) and isinstance(root.func, ast.Attribute):
                is_write = is_write or is_in_place(root.func.attr, but=_NOT_STATE)
                root = root.func.value
            name = attribute_of(root, owner)
            if name is not None and is_write:
                yield name, call.args[0] if call.args else None, "in_place"
        case _:
            pass
