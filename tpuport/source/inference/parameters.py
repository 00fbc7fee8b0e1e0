"""Abstract values of a function's parameters, inferred from its own text."""

import ast
import re
from collections.abc import Iterable

from tpuport.source.inference.torch_facts import (
    HOST_ANNOTATIONS,
    OTHER_METHODS,
    TENSOR_GIVEN,
    TENSOR_METHODS,
)
from tpuport.source.inference.values import (
    ARRAY,
    HOST,
    MODULE,
    NONE,
    TRACED,
    UNKNOWN,
    Form,
    Kind,
    Value,
    join,
    sequence,
)
from tpuport.source.syntax.module import Function

# Pseudo attribute of a name whose class is tested.
TESTED = "isinstance()"
# Functions that torch.nn.functional has under the name `F`, and torchvision's of that name has not.
_TAKES_TENSOR = re.compile(
    r"^((log_)?softmax|relu|gelu|silu|linear|layer_norm|interpolate|one_hot"
    r"|scaled_dot_product_attention|(max|avg)_pool[12]d|conv[12]d)$"
)
_TAKES_TWO = re.compile(r"^(\w+_loss|kl_div|(binary_)?cross_entropy(_with_logits)?)$")
_SEQUENCES = frozenset({"list", "List", "Sequence", "Iterable", "tuple", "Tuple", "ModuleList"})
_MAPPINGS = frozenset({"dict", "Dict", "Mapping", "MutableMapping", "OrderedDict"})
_CLASS_NAME = re.compile(r"^[A-Z]\w*[a-z]\w*$")
# Names of aliases and of classes that may well be tensors or hold them.
_MAYBE_TENSOR = re.compile(
    r"(Tensor|Array|ArrayLike|Any|Object|Type|Output|Batch|Input|Inputs|Data|Observation|Cache)s?$"
)
_HOST_ENDINGS = ("Config", "Configuration", "Tokenizer", "TokenizerFast", "Args", "Arguments")


def attributes_used(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Return the attributes that nodes of code use of each name.

    Those of its items are stored under `name[]`, of what a loop over it gives only `item`. A name
    whose class is tested has `TESTED`, too, and one that is given to `F.softmax` and the like has
    `TENSOR_GIVEN`.
    """
    found: dict[str, set[str]] = {}
    loops: list[tuple[str, ast.expr]] = []
    for node in nodes:
        match node:
            case (
                ast.For(target=target, iter=ast.Name(id=name))
                | ast.For(
                    target=ast.Tuple(elts=[_, target]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[ast.Name(id=name), *_]),
                )
            ):
                loops.append((name, target))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found.setdefault(name, set()).add(attribute)
            case ast.Attribute(value=ast.Subscript(value=ast.Name(id=name)), attr=attribute):
                found.setdefault(f"{name}[]", set()).add(attribute)
            case ast.Call(func=function, args=[ast.Name(id=name), *others]):
                _note_given(function, name, others, found)
            case _:
                pass
    for name, target in loops:
        bound = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        if any("item" in found.get(one, ()) for one in bound):
            found.setdefault(f"{name}[]", set()).add("item")
    return found


def _note_given(
    function: ast.expr, name: str, others: list[ast.expr], found: dict[str, set[str]]
) -> None:
    """Store what a call says about a name that is its first argument, and about its second."""
    match function:
        case ast.Name(id="isinstance"):
            found.setdefault(name, set()).add(TESTED)
        case ast.Attribute(value=ast.Name(id="F"), attr=attribute):
            two = _TAKES_TWO.match(attribute) is not None
            if two or _TAKES_TENSOR.match(attribute):
                found.setdefault(name, set()).add(TENSOR_GIVEN)
            if two and others and isinstance(others[0], ast.Name):
                found.setdefault(others[0].id, set()).add(TENSOR_GIVEN)
        case _:
            pass


def is_used_like_a_tensor(used: Iterable[str]) -> bool:
    """Return whether these attributes include one of tensors and none of other common types."""
    return not TENSOR_METHODS.isdisjoint(used) and OTHER_METHODS.isdisjoint(used)


def annotated(annotation: ast.expr | None) -> Value | None:
    """Return the abstract value that an annotation promises.

    Returns None if there is no annotation or it says nothing about tensors.
    """
    match annotation:
        case None:
            return None
        case ast.Constant(value=None):
            return NONE
        case ast.Constant(value=str(text)):
            try:
                return annotated(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return None
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _named(name)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _union([left, right])
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _generic(name, inner)
        case _:
            return None


def _named(name: str) -> Value | None:
    if name.endswith("Tensor"):
        return TRACED
    if name in HOST_ANNOTATIONS or name.endswith(_HOST_ENDINGS):
        return HOST
    if name in ("Module", "ModuleList", "ModuleDict", "Sequential"):
        return MODULE
    return ARRAY if name in ("ndarray", "NDArray") else None


def names_another_class(annotation: ast.expr | None) -> bool:
    """Return whether an annotation names a class that is known to be no tensor."""
    match annotation:
        case ast.Constant(value=str(text)):
            try:
                return names_another_class(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return False
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _CLASS_NAME.search(name) is not None and _MAYBE_TENSOR.search(name) is None
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return all(_is_none(part) or names_another_class(part) for part in (left, right))
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return names_another_class(inner)
        case _:
            return False


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def returns_host(function: Function) -> bool:
    """Return whether a function's annotation promises a host value: a number, text, an array.

    Such a function needs the concrete value of what it computes, so it belongs to the host unless a
    step calls it.
    """
    value = annotated(function.returns)
    return value is not None and value.kind is Kind.HOST and value is not NONE


def _union(members: list[ast.expr]) -> Value | None:
    known = [annotated(member) for member in members]
    if any(value is None for value in known):
        # One alternative says nothing: `Tensor | SomeClass` may be traced or not.
        return UNKNOWN if any(value is TRACED for value in known) else None
    return join(value for value in known if value is not None)


def _generic(name: str, inner: ast.expr) -> Value | None:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name in ("Optional", "Annotated", "Final"):
        return annotated(parts[0])
    if name == "Union":
        return _union(parts)
    if name == "Literal":
        return HOST
    if name in ("tuple", "Tuple") and not any(_is_ellipsis(part) for part in parts):
        known = [annotated(part) or UNKNOWN for part in parts]
        return sequence(known)
    if name in _SEQUENCES:
        item = annotated(parts[0]) or UNKNOWN
        return Value(HOST.kind if item is HOST else Kind.UNKNOWN, Form.SEQUENCE, item=item)
    if name in _MAPPINGS and len(parts) == 2:
        item = annotated(parts[1])
        return None if item is None else Value(Kind.UNKNOWN, Form.MAPPING, item=item)
    # jaxtyping: Float[torch.Tensor, "b n"]
    last = parts[-1]
    shaped = len(parts) > 1 and isinstance(last, ast.Constant) and isinstance(last.value, str)
    return TRACED if shaped and annotated(parts[0]) is TRACED else None


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def defaults(function: Function | ast.Lambda) -> dict[str, ast.expr]:
    """Return the default of each parameter that has one."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    last = positional[len(positional) - len(arguments.defaults) :]
    found = {a.arg: value for a, value in zip(last, arguments.defaults, strict=True)}
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found.update({a.arg: value for a, value in keyword_only if value is not None})
    return found


def default_value(default: ast.expr | None) -> Value | None:
    """Return the abstract value that a default suggests for its parameter, or None."""
    match default:
        case ast.Constant(value=None) | None:
            return None
        case ast.Constant() | ast.UnaryOp(operand=ast.Constant()):
            return HOST
        case _:
            return None
