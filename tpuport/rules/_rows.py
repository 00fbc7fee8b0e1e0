"""Loops that Python runs over the rows of a traced tensor."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpuport.rules._origins import bound_values, is_one_tensor
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.statements import walk_scope

Loop = ast.For | ast.comprehension


@dataclass(frozen=True)
class Rows:
    """The tensor whose rows a loop takes one by one.

    Attributes:
        tensor: The tensor.
        of_batch: Whether it indexes the first dimension. Such a loop is often written on purpose,
            since a batch may be short.
    """

    tensor: ast.expr
    of_batch: bool = False


def rows_of(node: Loop, body: Sequence[ast.AST], context: Context) -> Rows | None:
    """Return the traced tensor whose rows a loop takes one by one, if there is one."""
    tensor = next(_iterated(node.iter, context), None)
    return _indexed(node, body, context) if tensor is None else Rows(tensor)


def _iterated(iterated: ast.expr, context: Context) -> Iterator[ast.expr]:
    """Yield the tensors whose rows a loop runs over."""
    match iterated:
        case ast.Call(func=ast.Name(id="enumerate" | "reversed"), args=[part, *_]):
            yield from _iterated(part, context)
        case ast.Call(func=ast.Name(id="zip"), args=parts):
            # Next to a list, a value annotated as a tensor is often a list of tensors, too.
            found = [tensor for part in parts for tensor in _iterated(part, context)]
            if len(found) == len(parts):
                yield from found
        case ast.Call(func=ast.Attribute(attr="unbind", value=value)):
            if context.name(iterated.func) == "torch.unbind" and iterated.args:
                value = iterated.args[0]
            if is_one_tensor(value, context):
                yield value
        case _ if is_one_tensor(iterated, context):
            yield iterated
        case _:
            pass


def _indexed(node: Loop, body: Sequence[ast.AST], context: Context) -> Rows | None:
    """Return the tensor that a loop over its length indexes by the loop's counter."""
    match node:
        case (
            ast.For(target=ast.Name(id=index), iter=iterated)
            | ast.comprehension(target=ast.Name(id=index), iter=iterated)
        ):
            pass
        case _:
            return None
    match iterated:
        case ast.Call(func=ast.Name(id="range"), args=[stop] | [_, stop]):
            pass
        case _:
            return None
    for inner in walk_scope(body):
        if isinstance(inner, ast.Subscript) and _takes_element(inner.slice, index):
            if is_one_tensor(inner.value, context) and _is_length(stop, context):
                is_first = _takes_element(_parts(inner.slice)[0], index)
                return Rows(inner.value, of_batch=is_first)
    return None


def _parts(index: ast.expr) -> list[ast.expr]:
    return index.elts if isinstance(index, ast.Tuple) else [index]


def _takes_element(index: ast.expr, name: str) -> bool:
    """Return whether an index takes one element by a name; a slice takes a tile instead."""
    return any(
        isinstance(inner, ast.Name) and inner.id == name
        for part in _parts(index)
        if not isinstance(part, ast.Slice)
        for inner in ast.walk(part)
    )


def _is_length(node: ast.expr, context: Context) -> bool:
    """Return whether an expression is the length of a traced tensor along some dimension."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[tensor]):
            return is_one_tensor(tensor, context)
        case ast.Call(func=ast.Attribute(attr="size", value=tensor), args=[dim]):
            return context.is_traced(tensor) and not _is_last(dim)
        case ast.Subscript(value=ast.Attribute(attr="shape", value=tensor), slice=dim):
            return context.is_traced(tensor) and not _is_last(dim)
        case ast.Name():
            values = bound_values(node, context)
            if values is not None:
                return all(_is_length(value, context) for value in values)
            return _unpacked(node, context)
        case _:
            return False


def _is_last(dim: ast.expr) -> bool:
    """Return whether a dimension is the last one: often coordinates, so never many."""
    match dim:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
        case _:
            return False


def _unpacked(name: ast.Name, context: Context) -> bool:
    """Return whether a name is bound once, by unpacking the shape of a traced tensor."""
    function = context.module.function(name)
    found = [
        inner.value
        for inner in walk_scope([] if function is None else function.body)
        if isinstance(inner, ast.Assign)
        and isinstance(inner.targets[0], ast.Tuple)
        and any(isinstance(e, ast.Name) and e.id == name.id for e in inner.targets[0].elts)
    ]
    match found:
        case [ast.Attribute(attr="shape", value=tensor)]:
            return context.is_traced(tensor)
        case [ast.Call(func=ast.Attribute(attr="size", value=tensor), args=[])]:
            return context.is_traced(tensor)
        case _:
            return False
