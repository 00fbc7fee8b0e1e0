"""Results of calls of PyTorch, numpy, Python's builtins and unknown functions."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpuport.source.inference.kinds import structural_kind
from tpuport.source.inference.torch_facts import (
    CREATION_TORCH,
    HOST_BUILTINS,
    HOST_COPIES,
    HOST_METHODS,
    HOST_TORCH,
    HOST_TORCH_PACKAGES,
    MASK_FUNCTIONS,
    MASK_KEEPERS,
    NUMBER_METHODS,
    RANDOM_TORCH,
    SEQUENCE_FUNCTIONS,
    SURELY_TENSOR_METHODS,
)
from tpuport.source.inference.values import (
    ARRAY,
    HOST,
    HOST_TENSOR,
    MASK,
    MODULE,
    NONE,
    TRACED,
    TRACED_NUMBER,
    UNKNOWN,
    Form,
    Kind,
    Value,
    combine,
    contains_traced,
    item_of,
    join,
    sequence,
    sequence_of,
)
from tpuport.source.syntax.module import Function

_SAME_ITEMS = frozenset({"list", "tuple", "reversed", "sorted", "iter", "set"})
_MODULE_METHODS = frozenset(
    {"to", "eval", "train", "cuda", "cpu", "half", "float", "requires_grad_"}
)
_HOST_LIBRARIES = ("os.", "sys.", "re.", "json.", "time.", "logging.", "warnings.", "inspect.")


@dataclass(frozen=True)
class LibraryCall:
    """A call whose parts have been evaluated.

    Attributes:
        node: The call.
        receiver: The value before the dot of a method call.
        arguments: Its positional arguments.
        keywords: Its keyword arguments; None is the name of `**mapping`.
        step: Whether it is part of a step.
    """

    node: ast.Call
    receiver: Value
    arguments: Sequence[Value]
    keywords: Mapping[str | None, Value]
    step: bool

    @property
    def passed(self) -> list[Value]:
        """Return all arguments, positional ones first."""
        return [*self.arguments, *self.keywords.values()]

    @property
    def takes_traced(self) -> bool:
        """Return whether an argument is traced or is a sequence that holds something traced."""
        return any(contains_traced(value) for value in self.passed)

    def argument(self, index: int, name: str) -> Value | None:
        """Return the argument at a position or with a name; None if it was not passed."""
        if name in self.keywords:
            return self.keywords[name]
        return self.arguments[index] if index < len(self.arguments) else None

    def keyword(self, name: str) -> ast.expr | None:
        """Return the expression passed for a keyword; None if it was not passed."""
        return next((k.value for k in self.node.keywords if k.arg == name), None)


def is_static(function: Function) -> bool:
    """Return whether a method is a `staticmethod`."""
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)


def library_call(name: str, call: LibraryCall) -> Value:
    """Return the result of a function of an imported package."""
    root, _, last = name.rpartition(".")
    package = name.partition(".")[0]
    if package == "torch":
        return _torch_call(name, root, last, call)
    if package in ("numpy", "cupy", "scipy"):
        return ARRAY
    if package == "math":
        return TRACED_NUMBER if call.takes_traced else HOST
    if package in ("einops", "torchvision", "jaxtyping") or last in ("rearrange", "einsum"):
        return _operation(last, call)
    if name == "copy.deepcopy" or name == "copy.copy":
        return call.arguments[0] if call.arguments else UNKNOWN
    if name.startswith(_HOST_LIBRARIES):
        return HOST
    if last[:1].isupper():
        # A class. In constructors it most likely builds a layer; in a step it may be any container.
        return UNKNOWN if call.step else MODULE
    return UNKNOWN


def _torch_call(name: str, root: str, last: str, call: LibraryCall) -> Value:
    if name in ("torch.nn.Parameter", "torch.nn.parameter.Parameter"):
        return TRACED
    if name == "torch.nn.Buffer":
        is_mask = bool(call.arguments) and call.arguments[0].form is Form.MASK
        return MASK if is_mask else TRACED
    if last in HOST_TORCH or name.startswith(HOST_TORCH_PACKAGES):
        if name.endswith("checkpoint.checkpoint"):
            return TRACED if call.takes_traced else UNKNOWN
        return HOST
    if name.startswith("torch.nn.") and last[:1].isupper():
        return MODULE
    if name.startswith("torch.nn.init."):
        return NONE
    if name.startswith("torch.distributions."):
        return TRACED if call.takes_traced else UNKNOWN
    if root == "torch" and (last in CREATION_TORCH or last in RANDOM_TORCH):
        return _created(call)
    return _operation(last, call)


def _created(call: LibraryCall) -> Value:
    device = call.keyword("device")
    on_host = device is None or (isinstance(device, ast.Constant) and device.value == "cpu")
    # On the program's device a constant becomes an op of the program, with no value while tracing.
    if call.takes_traced or (call.step and not on_host):
        return MASK if _names_bool(call.keyword("dtype")) else TRACED
    return Value(Kind.HOST, Form.MASK if _names_bool(call.keyword("dtype")) else Form.TENSOR)


def _names_bool(node: ast.expr | None) -> bool:
    match node:
        case ast.Attribute(attr="bool") | ast.Name(id="bool"):
            return True
        case _:
            return False


def _operation(last: str, call: LibraryCall) -> Value:
    """Return the result of a function on tensors: traced if an argument is or may be in a step."""
    value = combine(call.passed)
    if value is UNKNOWN and call.step and not last[:1].isupper():
        value = TRACED
    if value is HOST:
        value = HOST_TENSOR
    if last == "where" and len(call.passed) == 1:
        return sequence_of(value)
    return _shaped(last, value, _mask_result(last, call))


def _mask_result(last: str, call: LibraryCall) -> bool:
    if last in MASK_FUNCTIONS or _names_bool(call.keyword("dtype")):
        return True
    if last not in MASK_KEEPERS or call.keyword("dtype") is not None:
        return False
    tensors = [item_of(v) if v.form is Form.SEQUENCE else v for v in call.passed]
    if last == "where":
        tensors = tensors[1:]
    masks = [value.form is Form.MASK for value in tensors if value.is_tensor]
    return bool(masks) and all(masks)


def _shaped(last: str, value: Value, mask: bool) -> Value:
    if mask:
        value = MASK if value.kind is Kind.TRACED else Value(value.kind, Form.MASK)
    if last in SEQUENCE_FUNCTIONS:
        return sequence_of(value)
    return value


def method_call(name: str, call: LibraryCall) -> Value:
    """Return the result of a method of a value that is no instance of a class of the file."""
    receiver = call.receiver
    if receiver.form is Form.MODULE:
        return module_method_call(name, call)
    if receiver.form is Form.SEQUENCE:
        return item_of(receiver) if name == "pop" else UNKNOWN
    if receiver.form is Form.MAPPING:
        return _of_mapping(name, receiver.item or UNKNOWN)
    if receiver.kind is Kind.TRACED:
        return _tensor_method(name, call)
    if receiver.kind is Kind.HOST:
        return _host_method(name, call)
    if name in HOST_METHODS:
        return structural(call.node)
    if call.step and name in SURELY_TENSOR_METHODS:
        return _shaped(name, TRACED, mask=False)
    if call.step and name in ("encode", "decode", "sample") and call.takes_traced:
        return TRACED
    return structural(call.node)


def _of_mapping(method: str, item: Value) -> Value:
    """Return the result of a method of a mapping whose values are `item`."""
    match method:
        case "get" | "pop" | "setdefault":
            return item
        case "values":
            return sequence_of(item)
        case "items":
            return sequence_of(sequence([HOST, item]))
        case _:
            return UNKNOWN


def _tensor_method(name: str, call: LibraryCall) -> Value:
    receiver = call.receiver
    if name in HOST_METHODS:
        return HOST
    if name in NUMBER_METHODS:
        # This call itself fails in a trace, so code that uses its number is not reported as well.
        return UNKNOWN
    if name in HOST_COPIES:
        return ARRAY
    if name in MASK_FUNCTIONS:
        return MASK
    if name == "to" and any(map(_names_bool, call.node.args)):
        return MASK
    keeps = receiver.form is Form.MASK and name in MASK_KEEPERS and not _changes_dtype(call)
    return _shaped(name, MASK if keeps else TRACED, mask=False)


def _names_dtype(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
            return attr != "device"
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.endswith("dtype")
        case _:
            return False


def _changes_dtype(call: LibraryCall) -> bool:
    """Return whether an argument names a dtype other than bool: `torch.float32`, `x.dtype`."""
    named = [k for k in call.node.keywords if k.arg == "dtype" and not _names_bool(k.value)]
    return bool(named) or any(_names_dtype(a) and not _names_bool(a) for a in call.node.args)


def _moves(call: LibraryCall) -> bool:
    """Return whether `.to(...)` or `.cuda()` moves a host tensor to the program's device."""
    if any(k.arg == "device" for k in call.node.keywords):
        return True
    return any(not _names_dtype(argument) for argument in call.node.args) or not call.passed


def _host_method(name: str, call: LibraryCall) -> Value:
    receiver = call.receiver
    if receiver.is_tensor:
        if call.takes_traced:
            return TRACED
        if call.step and name in ("to", "cuda") and _moves(call):
            return MASK if receiver.form is Form.MASK else TRACED
        if name in HOST_METHODS or name in NUMBER_METHODS:
            return HOST
        if name in HOST_COPIES:
            return ARRAY
        mask = name in MASK_FUNCTIONS or (receiver.form is Form.MASK and name in MASK_KEEPERS)
        return _shaped(name, Value(Kind.HOST, Form.MASK if mask else Form.TENSOR), mask=False)
    if receiver.form is Form.ARRAY:
        return ARRAY
    if receiver.form is Form.NONE:
        return UNKNOWN
    return HOST if all(value.kind is Kind.HOST for value in call.passed) else UNKNOWN


def module_call(value: Value, call: LibraryCall) -> Value:
    """Return the result of calling a value: traced for a module in a step, as its weights are."""
    if not call.step:
        return MODULE if value.form is Form.MODULE else UNKNOWN
    if value.form is Form.MODULE:
        return TRACED
    return UNKNOWN


def module_method_call(name: str, call: LibraryCall) -> Value:
    """Return the result of a module's method that this file does not define."""
    if name == "forward":
        return TRACED if call.step else UNKNOWN
    if name in _MODULE_METHODS:
        return call.receiver
    if name in SURELY_TENSOR_METHODS and call.receiver.form is not Form.INSTANCE and call.step:
        return TRACED
    return UNKNOWN


def builtin_call(name: str, call: LibraryCall) -> Value:
    """Return the result of a Python builtin."""
    arguments = call.arguments
    if name in HOST_BUILTINS or name in ("range", "print", "str", "repr", "format", "dict"):
        return HOST
    if name in ("float", "int", "bool", "complex"):
        value = combine(call.passed)
        return UNKNOWN if value.kind is Kind.TRACED else value
    if name in ("abs", "round", "min", "max", "sum", "pow", "divmod"):
        return combine([item_of(v) if v.form is Form.SEQUENCE else v for v in call.passed])
    if name in _SAME_ITEMS and arguments:
        return arguments[0]
    if name == "enumerate" and arguments:
        return sequence_of(sequence([HOST, item_of(arguments[0])]))
    if name == "zip":
        return sequence_of(sequence([item_of(v) for v in arguments]))
    if name == "getattr" and len(arguments) > 2:
        return join([arguments[2], UNKNOWN])
    if name == "next" and arguments:
        return item_of(arguments[0])
    if name == "super":
        return MODULE
    return structural(call.node)


def structural(node: ast.expr) -> Value:
    """Return HOST if the form of an expression alone proves it, else UNKNOWN."""
    return HOST if structural_kind(node) is Kind.HOST else UNKNOWN
