"""Where a value comes from: the expressions that a name is bound to, and what they make."""

import ast
from collections.abc import Callable, Iterator

from tpuport.source.engine import Context
from tpuport.source.kinds import tensor_parameters
from tpuport.source.module import own_bindings
from tpuport.source.statements import is_ops_call, walk_scope

Predicate = Callable[[ast.expr], bool]

_NUMBER_METHODS = frozenset({"item", "tolist"})
_NUMBER_BUILTINS = frozenset({"float", "int", "bool", "complex"})
# Methods of one tensor that give several, or something else than a tensor.
_SEVERAL = frozenset(
    {
        *("aminmax", "broadcast_tensors", "chunk", "cummax", "cummin", "dsplit", "eig", "eigh"),
        *("frexp", "hsplit", "item", "kthvalue", "lstm", "lu", "max", "median", "meshgrid", "min"),
        *("mode", "nonzero", "numpy", "qr", "size", "slogdet", "sort", "split", "std_mean", "svd"),
        *(
            "tensor_split",
            "tolist",
            "topk",
            "unbind",
            "unique",
            "unique_consecutive",
            "unsafe_chunk",
        ),
        *("var_mean", "vsplit", "where"),
    }
)


def bound_values(name: ast.Name, context: Context) -> list[ast.expr] | None:
    """The expressions that a local name is bound to; None if it is bound in another way, too."""
    function = context.module.function(name)
    if function is None:
        return None
    found: list[ast.expr] = []
    count = 0
    for node in walk_scope([*function.args.args, *function.args.kwonlyargs, *function.body]):
        count += own_bindings(node).count(name.id)
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=target), value=value)
            ) if target == name.id:
                found.append(value)
            case _:
                pass
    return found if found and count == len(found) else None


def comes_from(node: ast.expr, context: Context, is_source: Predicate) -> bool:
    """Whether a value is made by a source, through methods, operators, elements and names."""
    return _comes_from(node, context, is_source, frozenset())


def _comes_from(
    node: ast.expr, context: Context, is_source: Predicate, seen: frozenset[str]
) -> bool:
    if is_source(node):
        return True
    match node:
        case ast.Name(id=name) if name not in seen:
            values = bound_values(node, context) or []
            inner = seen | {name}
            return bool(values) and all(
                _comes_from(value, context, is_source, inner) for value in values
            )
        case _:
            return any(_comes_from(part, context, is_source, seen) for part in _spine(node))


def _spine(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of an expression whose kind of value it has."""
    match node:
        case ast.Call(func=ast.Attribute(value=value)):
            yield value
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
            yield value
        case ast.BinOp(left=left, right=right):
            yield from (left, right)
        case ast.UnaryOp(operand=operand):
            yield operand
        case _:
            pass


def is_numpy(node: ast.expr, context: Context) -> bool:
    """Whether a value is an array or number of numpy."""

    def is_source(node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(attr="numpy")):
                return True
            case ast.Call(func=function):
                return (context.name(function) or "").startswith("numpy.")
            case _:
                return False

    return comes_from(node, context, is_source)


def is_number(node: ast.expr, context: Context) -> bool:
    """Whether a value is a Python number that was read from a tensor."""

    def is_source(node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in _NUMBER_METHODS or is_ops_call(node)
            case ast.Call(func=ast.Name(id=name)):
                return name in _NUMBER_BUILTINS
            case _:
                return False

    return comes_from(node, context, is_source)


def is_one_tensor(node: ast.expr, context: Context) -> bool:
    """Whether a value is surely a single traced tensor, not several in a list or tuple."""
    return context.is_traced(node) and _is_one(node, context, frozenset())


def _is_one(node: ast.expr, context: Context, seen: frozenset[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name not in seen and _is_one_name(node, context, seen | {name})
        case ast.Call(func=ast.Attribute(attr=attribute, value=value)):
            if attribute in _SEVERAL:
                return False
            name = context.name(node.func) or ""
            return name.startswith("torch.") or _is_one(value, context, seen)
        case ast.Attribute(attr="T" | "mT" | "data" | "H", value=value):
            return _is_one(value, context, seen)
        case ast.Subscript(value=value):
            return _is_one(value, context, seen)
        case ast.BinOp(left=left, right=right):
            return _is_one(left, context, seen) or _is_one(right, context, seen)
        case ast.UnaryOp(operand=operand):
            return _is_one(operand, context, seen)
        case _:
            return False


def _is_one_name(node: ast.Name, context: Context, seen: frozenset[str]) -> bool:
    values = bound_values(node, context)
    if values is not None:
        return all(_is_one(value, context, seen) for value in values)
    function = context.module.function(node)
    if function is None or node.id not in tensor_parameters(function):
        return False
    stores = [
        inner
        for inner in walk_scope(function.body)
        if isinstance(inner, ast.Assign | ast.AugAssign | ast.For | ast.With)
        and node.id in _stored(inner)
    ]
    return all(
        isinstance(inner, ast.AugAssign)
        or (isinstance(inner, ast.Assign) and _is_one(inner.value, context, seen))
        for inner in stores
    )


def _stored(node: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    match node:
        case ast.Assign(targets=targets):
            pass
        case ast.AugAssign(target=target) | ast.For(target=target):
            targets = [target]
        case ast.With(items=items):
            targets = [item.optional_vars for item in items if item.optional_vars is not None]
        case _:
            pass
    return {
        inner.id
        for target in targets
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
