"""Effects of code besides computing values. Tracing both sides of a branch performs them all."""

import ast
from collections import Counter
from collections.abc import Iterable, Sequence

from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context, quote
from tpuport.source.syntax.module import own_bindings
from tpuport.source.syntax.statements import is_ops_call, walk_scope

# Methods that change their object: of lists, dicts, sets, deques, files, tensors and modules.
_CONTAINER_MUTATORS = frozenset(
    {
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "reverse",
        "setdefault",
        "update",
        "__setitem__",
        "__setattr__",
    }
)
MUTATORS = _CONTAINER_MUTATORS | {
    "write",
    "writelines",
    "add_module",
    "load_state_dict",
    "register_buffer",
    "register_module",
    "register_parameter",
    "requires_grad_",
    "backward",
}
EFFECT_BUILTINS = frozenset({"setattr", "delattr", "next", "print", "input"})
_SUSPENDING = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
_NEW_BUILTINS = frozenset({"bytearray", "dict", "list", "set"})
_NEW_TORCH = frozenset(
    {
        "arange",
        "cat",
        "clone",
        "concat",
        "empty",
        "empty_like",
        "eye",
        "full",
        "full_like",
        "linspace",
        "ones",
        "ones_like",
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "stack",
        "tensor",
        "where",
        "zeros",
        "zeros_like",
    }
)
_NEW_METHODS = frozenset({"clone", "new_empty", "new_full", "new_ones", "new_zeros"})


def changed_names(code: Sequence[ast.AST]) -> list[str]:
    """Return the names whose objects code changes: `a` of `a[0] = 1`, `a.b.add_(1)` and `a.c = 1`.

    While a program is traced, a branch turns such changes of its operands into results. A name that
    the code binds to another object is none of them.
    """
    found: dict[str, None] = {}
    bound: set[str] = set()
    for node in walk_scope(code):
        found.update(dict.fromkeys(_operands(node)))
        changed = _changed_object(node)
        root = None if changed is None else _root(changed)
        if root is not None:
            found[root] = None
        if not (isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)):
            bound.update(own_bindings(node))
    return [name for name in found if name not in bound]


def refuse_changed_operands(
    code: Sequence[ast.AST], context: Context, *, carried: Iterable[str]
) -> None:
    """Raise if a branch in a loop's body may change an object that the loop does not carry.

    Raises:
        NotFixable: the branch is a call of `tpuport.ops`, and has such an object as an operand.
    """
    harmless = fresh_names(code) | set(carried)
    for node in walk_scope(code):
        for name in set(_operands(node)) - harmless:
            line = context.module.origin(node)
            raise NotFixable(f"the branch at line {line} may change {name} in some rounds only")


def _operands(node: ast.AST) -> list[str]:
    """Return the operands of a call of `tpuport.ops`, which its functions may change."""
    match node:
        case ast.Call(args=[*_, ast.Tuple(elts=operands)]) if is_ops_call(node):
            return [part.id for part in operands if isinstance(part, ast.Name)]
        case _:
            return []


def _changed_object(node: ast.AST) -> ast.expr | None:
    match node:
        case (
            ast.Attribute(ctx=ast.Store(), value=value)
            | ast.Subscript(ctx=ast.Store(), value=value)
        ):
            return value
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if (
            name in _CONTAINER_MUTATORS or (is_in_place(name) and name != "requires_grad_")
        ):
            return value
        case _:
            return None


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def refuse_effects(
    code: Sequence[ast.AST],
    context: Context,
    *,
    entering: Iterable[str] = (),
    merged: Iterable[str] = (),
    watched: Iterable[str] = (),
) -> None:
    """Raise unless code only computes values and binds names.

    Args:
        code: Statements or expressions that would move into a nested function.
        context: The file and what is inferred about it.
        entering: Names whose earlier value the code may use.
        merged: Names whose objects it may change: those changes become results.
        watched: Names whose methods it may call for their effects, as what they change is seen when
            it runs.

    Raises:
        NotFixable: the code writes to an object that other code may see, or suspends the function.
    """
    fresh, operands = fresh_names(code) - set(entering), set(merged)
    objects = set(watched)
    for node in walk_scope(code):
        is_known = _is_merged(node, operands) or _is_method_call(node, objects)
        effect = None if is_known else _effect(node, fresh)
        if effect is not None:
            line = context.module.origin(node)
            raise NotFixable(
                f"line {line} {effect}, which would happen on both sides of the branch"
            )


def _is_merged(node: ast.AST, operands: set[str]) -> bool:
    """Return whether all that a node does is to change operands."""
    match node:
        case ast.Expr(value=ast.Call() as call):
            node = call
        case ast.AugAssign(target=ast.Attribute() | ast.Subscript() as target):
            node = target
        case _:
            pass
    changed = _changed_object(node)
    return changed is not None and _root(changed) in operands


def _is_method_call(node: ast.AST, objects: set[str]) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=value))):
            return _root(value) in objects
        case _:
            return False


def _effect(node: ast.AST, fresh: set[str]) -> str | None:
    quoted = quote(ast.unparse(node)) if isinstance(node, ast.expr | ast.stmt) else ""
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del(), value=value):
            return None if _is_fresh(value, fresh) else f"writes to {quoted}"
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=value):
            return None if _is_fresh(value, fresh) else f"writes to {quoted}"
        case ast.AugAssign(target=target, value=value):
            return _augmented_effect(target, value)
        case ast.Delete():
            return f"deletes a name or an element ({quoted})"
        case ast.Global() | ast.Nonlocal():
            return f"declares {quoted}"
        case ast.Expr(value=value) if not (isinstance(value, ast.Constant) or is_ops_call(value)):
            return None if _changes_only_fresh(value, fresh) else f"runs {quoted} for its effect"
        case ast.Call():
            return _call_effect(node, fresh, quoted)
        case ast.comprehension(is_async=1):
            return "awaits"
        case _:
            return "awaits or yields" if isinstance(node, _SUSPENDING) else None


def _augmented_effect(target: ast.expr, value: ast.expr) -> str | None:
    # The tracer carries a tensor's `+=` out of the branch. A list's would happen on both sides.
    if not isinstance(target, ast.Name):
        return f"writes to {quote(ast.unparse(target))}"
    if isinstance(value, ast.List | ast.ListComp | ast.Tuple | ast.Dict | ast.Set):
        return f"extends {target.id} in place"
    return None


def _call_effect(call: ast.Call, fresh: set[str], quoted: str) -> str | None:
    if any(keyword.arg == "out" for keyword in call.keywords):
        return f"writes to the out= of {quoted}"
    match call.func:
        case ast.Name(id=name) if name in EFFECT_BUILTINS:
            return f"calls {quoted} for its effect"
        case ast.Attribute(value=value, attr=name) if name in MUTATORS or is_in_place(name):
            return None if _is_fresh(value, fresh) else f"changes an object in place ({quoted})"
        case _:
            return None


def _is_fresh(node: ast.expr, fresh: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in fresh


def _changes_only_fresh(call: ast.expr, fresh: set[str]) -> bool:
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and _is_fresh(call.func.value, fresh)
        and (call.func.attr in MUTATORS or is_in_place(call.func.attr))
    )


def fresh_names(code: Iterable[ast.AST]) -> set[str]:
    """Return the names that code binds only to new objects, which no other code can see yet."""
    new: Counter[str] = Counter()
    bound: Counter[str] = Counter()
    for node in walk_scope(code):
        bound.update(own_bindings(node))
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_new(value):
                new[name] += 1
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _is_new(
                value
            ):
                new[name] += 1
            case ast.AugAssign(target=ast.Name(id=name)):
                new[name] += 1  # in place or a new object: either way nobody else sees it
            case _:
                pass
    return {name for name in new if new[name] == bound[name]}


def _is_new(value: ast.expr) -> bool:
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return True
        case ast.BinOp():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _NEW_BUILTINS
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
            return name in _NEW_TORCH
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _NEW_METHODS
        case _:
            return False


def is_in_place(method: str, *, but: frozenset[str] = frozenset()) -> bool:
    """Return whether a method of tensors changes its tensor, by its name.

    Args:
        method: The name.
        but: Methods named like that whose change does not matter to the caller.
    """
    return method.endswith("_") and not method.endswith("__") and method not in but
