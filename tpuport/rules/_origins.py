"""The expressions that a name is bound to, and whether a value is a single tensor."""

import ast
import weakref

from tpuport.source.inference.parameters import annotated, attributes_used, is_used_like_a_tensor
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Function, own_bindings
from tpuport.source.syntax.names import all_arguments
from tpuport.source.syntax.statements import walk_scope

# Methods of one tensor that return several tensors, or a list.
SEVERAL = frozenset(
    {
        "broadcast_tensors",
        "chunk",
        "dsplit",
        "hsplit",
        "kthvalue",
        "meshgrid",
        "mode",
        "qr",
        "slogdet",
        "sort",
        "split",
        "svd",
        "tensor_split",
        "tolist",
        "topk",
        "unbind",
        "unique",
        "vsplit",
    }
)
# The result of these is no tensor or, in some or all of their forms, several.
_NOT_SURELY_ONE = SEVERAL | {
    "aminmax",
    "cummax",
    "cummin",
    "eig",
    "eigh",
    "frexp",
    "item",
    "lstm",
    "lu",
    "max",
    "median",
    "min",
    "nonzero",
    "numpy",
    "size",
    "std_mean",
    "unique_consecutive",
    "unsafe_chunk",
    "var_mean",
    "where",
}


def last_name(function: ast.expr) -> str | None:
    """Return the name that something is called by, whatever it is reached through."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else None


def counter_of(loop: ast.AST) -> ast.Name | None:
    """Return the name that a loop or comprehension over `range` or `enumerate` counts with."""
    if not isinstance(loop, ast.For | ast.comprehension) or not isinstance(loop.iter, ast.Call):
        return None
    match loop.iter.func, loop.target:
        case ast.Name(id="range"), ast.Name() as counter:
            return counter
        case ast.Name(id="enumerate"), ast.Tuple(elts=[ast.Name() as counter, *_]):
            return counter
        case _:
            return None


def bound_values(name: ast.Name, context: Context) -> list[ast.expr] | None:
    """Return the expressions that a local name is bound to; None if another construct binds it."""
    function = context.module.function(name)
    if function is None:
        return None
    if function not in _known:
        _known[function] = _bindings(function)
    values, count = _known[function].get(name.id, ([], 0))
    return values if values and count == len(values) else None


_Bindings = dict[str, tuple[list[ast.expr], int]]
# Several rules ask about the same function. An entry goes away with the tree of its file.
_known: "weakref.WeakKeyDictionary[Function, _Bindings]" = weakref.WeakKeyDictionary()


def _bindings(function: Function) -> _Bindings:
    """Return for each name of a function's scope the values assigned and the number of bindings."""
    values: dict[str, list[ast.expr]] = {}
    counts: dict[str, int] = {}
    for node in walk_scope([*function.args.args, *function.args.kwonlyargs, *function.body]):
        for bound in own_bindings(node):
            counts[bound] = counts.get(bound, 0) + 1
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=target), value=value)
            ):
                values.setdefault(target, []).append(value)
            case _:
                pass
    return {name: (values.get(name, []), count) for name, count in counts.items()}


def is_one_tensor(node: ast.expr, context: Context) -> bool:
    """Return whether a value is surely a single traced tensor, not several in a list or tuple."""
    return context.is_traced(node) and _is_one(node, context, frozenset())


def _is_one(node: ast.expr, context: Context, seen: frozenset[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name not in seen and _is_one_name(node, context, seen | {name})
        case ast.Call(func=ast.Attribute(attr=attribute, value=value)):
            if attribute in _NOT_SURELY_ONE:
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
        case ast.Compare(left=left, comparators=comparators):
            return any(_is_one(part, context, seen) for part in [left, *comparators])
        case _:
            return False


def _is_one_name(node: ast.Name, context: Context, seen: frozenset[str]) -> bool:
    values = bound_values(node, context)
    if values is not None:
        return all(_is_one(value, context, seen) for value in values)
    function = context.module.function(node)
    if function is None or not _is_tensor_parameter(node.id, function, context):
        return False
    if any(_asks_for_a_sequence(inner, node.id) for inner in context.module.inside(function)):
        return False
    stores = [
        inner
        for inner in context.module.inside(function)
        if isinstance(inner, ast.Assign | ast.AugAssign | ast.For | ast.With)
        and node.id in _stored(inner)
    ]
    return all(
        isinstance(inner, ast.AugAssign)
        or (isinstance(inner, ast.Assign) and _is_one(inner.value, context, seen))
        for inner in stores
    )


def _is_tensor_parameter(name: str, function: Function, context: Context) -> bool:
    for argument in all_arguments(function.args):
        if argument.arg == name:
            value = annotated(argument.annotation)
            used = attributes_used(context.module.inside(function)).get(name, ())
            return is_used_like_a_tensor(used) if value is None else value.is_tensor
    return False


def _asks_for_a_sequence(node: ast.AST, name: str) -> bool:
    """Return whether code tests if a name is a list or tuple: then it may be one."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=asked), classes]):
            named = {n.id for n in ast.walk(classes) if isinstance(n, ast.Name)}
            return asked == name and bool(named & {"list", "tuple", "Sequence", "List", "Tuple"})
        case _:
            return False


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
