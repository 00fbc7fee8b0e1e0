"""Indexing with boolean masks, and whether each part of an index is a mask, a view or a number."""

import ast
import re
from collections.abc import Iterator

from tpuport.rules._origins import SEVERAL, counter_of
from tpuport.source.inference.kinds import Kind
from tpuport.source.rewrite.finding import Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS
from tpuport.source.syntax.statements import is_ops_call

# Indexing the result of these picks one of several tensors, or of the values of a dict.
_NOT_A_TENSOR = SEVERAL | {"items", "keys", "split_with_sizes", "values"}
# Words in the names of functions and classes that prepare the input of flash attention's kernels.
# A class needs more than "flash", as small models are called Flash, too.
_PACKS = re.compile("flash|unpad|upad|varlen|xformers")
_PACKING_CLASS = re.compile("flash_?[0-9]?_?(attn|att|self|cross|mha)|unpad|varlen|xformers")
_TO_NUMBER = frozenset({"item", "tolist", "to_int", "to_float", "to_bool"})
_NUMBER_BUILTINS = frozenset({"int", "float", "bool", "round", "len"})


def parts(index: ast.expr) -> list[ast.expr]:
    """Return the parts of an index, separated by commas between the brackets."""
    return index.elts if isinstance(index, ast.Tuple) else [index]


def masks(node: ast.Subscript, context: Context) -> list[ast.expr]:
    """Return the traced boolean masks in an index; `x[[mask]]` counts as one."""
    found: list[ast.expr] = []
    for part in parts(node.slice):
        inner = part.elts[0] if isinstance(part, ast.List) and len(part.elts) == 1 else part
        if is_mask(inner, context):
            found.append(inner)
    return found


def is_mask(node: ast.expr, context: Context) -> bool:
    """Return whether an index is a traced boolean tensor.

    With `--strict` an expression written like a mask counts too, unless it is known to be none.
    """
    if isinstance(node, ast.Slice | ast.Constant | ast.Starred | ast.List | ast.Tuple):
        return False
    if context.is_boolean(node):
        return True
    unknown = context.kind(node) is Kind.UNKNOWN and context.is_traced(node)
    return unknown and _looks_like_a_mask(node)


def _looks_like_a_mask(node: ast.expr) -> bool:
    match node:
        case ast.Compare(ops=operators):
            return not any(
                isinstance(o, ast.Is | ast.IsNot | ast.In | ast.NotIn) for o in operators
            )
        case ast.UnaryOp(op=ast.Invert()):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return "mask" in name.lower()
        case _:
            return False


def takes_one_mask(node: ast.Subscript, context: Context) -> bool:
    """Return whether an index is one mask, and otherwise static slices and numbers."""
    found = masks(node, context)
    others = [part for part in parts(node.slice) if part not in found]
    return len(found) == 1 and all(is_static(part, context) for part in others)


def is_leading(node: ast.Subscript, context: Context) -> bool:
    """Return whether a mask's selected rows are the first axis of the result."""
    for part in parts(node.slice):
        if is_mask(part, context):
            return True
        if not (isinstance(part, ast.Constant) and type(part.value) is int):
            return False
    return False


def is_ours(node: ast.expr) -> bool:
    """Return whether a fix has already wrapped an expression in `tpuport.ops.masked`."""
    return is_ops_call(node) and ast.unparse(node).startswith("tpuport.ops.masked(")


def severity(node: ast.AST, context: Context) -> Severity:
    """Return the severity of a finding: code that packs tokens for a CUDA kernel is a note."""
    for parent in context.module.ancestors(node):
        if isinstance(parent, FUNCTIONS) and _PACKS.search(parent.name.lower()):
            return Severity.NOTE
        if isinstance(parent, ast.ClassDef) and _PACKING_CLASS.search(parent.name.lower()):
            return Severity.NOTE
    return Severity.ERROR


def is_static(part: ast.expr, context: Context) -> bool:
    """Return whether a part of an index is a slice, a number or None that is static."""
    match part:
        case ast.Constant(value=value):
            return value is None or value is Ellipsis or type(value) is int
        case ast.Slice(lower=lower, upper=upper, step=step):
            ends = [end for end in (lower, upper, step) if end is not None]
            return all(is_static(end, context) for end in ends)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return is_static(operand, context)
        case ast.Name():
            return is_counter(part, context)
        case _:
            return False


def is_counter(name: ast.Name, context: Context) -> bool:
    """Return whether a name only ever counts through a `range` or an `enumerate`."""
    found = list(bindings(name, context))
    return bool(found) and all(
        value is not None and counter_of(value) is target for target, value in found
    )


def bindings(name: ast.Name, context: Context) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Yield every place in the function that binds a name, with the value or loop it comes from.

    The value is None where it is not one expression. A parameter comes with its `ast.arg`.
    """
    function = context.module.outermost_function(name)
    if not isinstance(function, FUNCTIONS):
        return
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.arg == name.id:
            yield node, node
        elif isinstance(node, ast.Name) and node.id == name.id:
            if not isinstance(node.ctx, ast.Load):
                yield node, _bound_value(node, context)


def _bound_value(node: ast.Name, context: Context) -> ast.AST | None:
    parents = context.module.parents
    parent = parents[node]
    if isinstance(parent, ast.Tuple):
        parent = parents[parent]
        return parent if isinstance(parent, ast.For | ast.comprehension) else None
    match parent:
        case ast.Assign(value=value) | ast.NamedExpr(value=value):
            return value
        case ast.For() | ast.comprehension():
            return parent
        case _:
            return None


def is_tensor(node: ast.expr, context: Context, depth: int = 3) -> bool:
    """Return whether a traced value is one tensor, not a sequence of them or a number."""
    if not context.is_traced(node) or is_python_number(node, context) or not depth:
        return False
    match node:
        case ast.Name():
            found = [value for _, value in bindings(node, context)]
            return bool(found) and all(
                isinstance(value, ast.arg)
                or (isinstance(value, ast.expr) and is_tensor(value, context, depth - 1))
                for value in found
            )
        case ast.Subscript(value=value):
            return is_tensor(value, context, depth)
        case ast.Call(func=ast.Attribute(attr=name)):
            # With a second argument `max` returns indices, too.
            returns_indices = name in ("max", "min", "median") and node.args
            return name not in _NOT_A_TENSOR and not returns_indices
        case ast.BinOp(left=left, right=right):
            return is_tensor(left, context, depth) or is_tensor(right, context, depth)
        case ast.UnaryOp(operand=operand):
            return is_tensor(operand, context, depth)
        case _:
            return False


def is_view(node: ast.expr, context: Context) -> bool:
    """Return whether an expression is a view to torchax: a tensor indexed by slices or numbers."""
    match node:
        case ast.Subscript(value=value, slice=index):
            basic = all(is_static(part, context) for part in parts(index))
            return basic and is_tensor(value, context)
        case ast.Name():
            found = [value for _, value in bindings(node, context)]
            return bool(found) and all(
                isinstance(value, ast.Subscript) and is_view(value, context) for value in found
            )
        case _:
            return False


def is_python_number(node: ast.expr, context: Context, depth: int = 4) -> bool:
    """Return whether an expression was made a Python number, which another rule reports."""
    if not depth:
        return False
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _NUMBER_BUILTINS
        case ast.Call(func=ast.Attribute(attr=name)) if name in _TO_NUMBER:
            return True
        case ast.BinOp(left=left, right=right):
            return any(is_python_number(side, context, depth - 1) for side in (left, right))
        case ast.Subscript(value=value):
            return is_python_number(value, context, depth - 1)
        case ast.Name():
            found = [value for _, value in bindings(node, context)]
            return any(
                isinstance(value, ast.expr) and is_python_number(value, context, depth - 1)
                for value in found
            )
        case _:
            return False
