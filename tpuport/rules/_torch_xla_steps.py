"""Which code of a file runs in a training step on torch_xla's device, and on every process."""

import ast
from collections.abc import Iterator

from tpuport.rules._torch_xla_facts import name_in_torch_xla
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS, SCOPES, Function

_LAUNCHES = {"torch_xla.launch", "torch_xla.distributed.xla_multiprocessing.spawn"}
_COMPILES = {"torch_xla.compile", "torch_xla.experimental.compile"}
_LOADER = "torch_xla.distributed.parallel_loader.MpDeviceLoader"


def enclosing(node: ast.AST, context: Context) -> Iterator[ast.AST]:
    """Yield the parents of a node up to its function, which comes last."""
    parent = context.module.parents.get(node)
    while parent is not None:
        yield parent
        if isinstance(parent, SCOPES):
            return
        parent = context.module.parents.get(parent)


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls below a node, in nested functions too."""
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def ends_with(node: ast.expr, *names: str) -> bool:
    """Return whether the last part of a dotted name is one of these."""
    return isinstance(node, ast.Attribute) and node.attr in names


def is_every_step(node: ast.AST, context: Context) -> bool:
    """Return whether code runs in each step: no test of the step decides about it."""
    for parent in enclosing(node, context):
        if isinstance(parent, ast.If | ast.IfExp | ast.Lambda | ast.ExceptHandler | ast.While):
            return False
        if isinstance(parent, ast.For | ast.AsyncFor):
            return _reads_device_loader(parent.iter, context)
        if isinstance(parent, ast.With) and _opens_step(parent, context):
            return True
        if isinstance(parent, FUNCTIONS):
            return _is_compiled(parent, context)
    return False


def _opens_step(block: ast.With, context: Context) -> bool:
    items = (item.context_expr for item in block.items)
    return any(
        isinstance(one, ast.Call) and name_in_torch_xla(one.func, context) == "torch_xla.step"
        for one in items
    )


def _is_compiled(function: Function, context: Context) -> bool:
    """Return whether a function is what `torch_xla.compile` compiles."""
    for decorator in function.decorator_list:
        inner = decorator.func if isinstance(decorator, ast.Call) else decorator
        if name_in_torch_xla(inner, context) in _COMPILES:
            return True
    for call in context.module.by_class.get(ast.Call, ()):
        assert isinstance(call, ast.Call)
        if name_in_torch_xla(call.func, context) in _COMPILES and call.args:
            match call.args[0]:
                case ast.Name(id=name) | ast.Attribute(attr=name) if name == function.name:
                    return True
                case _:
                    pass
    return False


def _reads_device_loader(iterated: ast.expr, context: Context) -> bool:
    return any(_is_loader(one, context) for one in ast.walk(iterated))


def _is_loader(node: ast.AST, context: Context) -> bool:
    if isinstance(node, ast.Call):
        return name_in_torch_xla(node.func, context) == _LOADER or ends_with(
            node.func, "per_device_loader"
        )
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    text = ast.unparse(node)
    values = [
        value for assign, value in assignments(text, context) if same_scope(node, assign, context)
    ]
    return bool(values) and all(
        isinstance(value, ast.Call) and _is_loader(value, context) for value in values
    )


def assignments(target: str, context: Context) -> Iterator[tuple[ast.Assign, ast.expr]]:
    """Yield the assignments to a target, as it is written, with their values."""
    for node in context.module.by_class.get(ast.Assign, ()):
        assert isinstance(node, ast.Assign)
        if any(ast.unparse(one) == target for one in node.targets):
            yield node, node.value


def same_scope(one: ast.AST, other: ast.AST, context: Context) -> bool:
    """Return whether a plain name means the same at two nodes; attributes of `self` do anywhere."""
    if isinstance(one, ast.Attribute):
        return True
    function = context.module.function(other)
    return function is None or function is context.module.function(one)


def launched(function: Function | None, context: Context) -> bool:
    """Return whether every process runs a function: `torch_xla.launch` is given it."""
    if function is None:
        return False
    return any(
        isinstance(call, ast.Call)
        and name_in_torch_xla(call.func, context) in _LAUNCHES
        and bool(call.args)
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id == function.name
        for call in context.module.by_class.get(ast.Call, ())
    )
