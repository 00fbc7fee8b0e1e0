"""Operations in which CPU tensors that a step makes meet traced ones."""

import ast
from collections.abc import Iterator

from tpuport.rules._placing import RANDOM, cpu_tensor, creation, only_value
from tpuport.source.inference.inference import Inference
from tpuport.source.inference.parameters import annotated, attributes_used, is_used_like_a_tensor
from tpuport.source.inference.values import TRACED
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Function, own_bindings
from tpuport.source.syntax.names import all_arguments

# Methods of a tensor that compute with their arguments; others may only read shape or dtype.
_MEETING = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "matmul",
        "mm",
        "bmm",
        "where",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "maximum",
        "minimum",
        "pow",
        "lerp",
        "masked_fill",
        "gather",
        "index_select",
        "scatter",
        "scatter_add",
        "index_add",
        "masked_fill_",
        "add_",
        "sub_",
        "mul_",
        "div_",
    }
)
_FUNCTIONS = _MEETING | {
    "cat",
    "concat",
    "stack",
    "hstack",
    "vstack",
    "einsum",
    "embedding",
    "linear",
    "logical_and",
    "logical_or",
    "isin",
    "outer",
    "bucketize",
    "addcmul",
    "clamp",
    "mse_loss",
    "cross_entropy",
    "layer_norm",
    "scaled_dot_product_attention",
    "cross",
    "dot",
    "cdist",
    "take_along_dim",
}
_LEAVING = frozenset({"cpu", "numpy", "tolist", "item"})


def cpu_creations(function: Function, context: Context) -> dict[ast.Call, ast.expr | None]:
    """Return the calls of a function that make a CPU tensor of several elements.

    Each comes with the first operation in which a traced tensor meets it, or None if none is known.
    """
    nodes = context.module.inside(function)
    found: dict[ast.Call, ast.expr | None] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and (made := creation(node, context)) is not None:
            if made[1] not in RANDOM and cpu_tensor(node, context) is node:
                if not _is_moved(node, context):
                    found[node] = None
    if not found:
        return found
    for node in nodes:
        operands = list(_operands(node, context))
        if len(operands) > 1 and any(
            _is_on_device(each, context) and _has_traced_root(each, context) for each in operands
        ):
            assert isinstance(node, ast.expr)
            for operand in operands:
                call = cpu_tensor(operand, context)
                if call in found and found[call] is None:
                    found[call] = node
    return found


def _is_moved(node: ast.Call, context: Context) -> bool:
    """Return whether the same expression moves a new tensor to a device: `.to(x.device)`."""
    for parent in context.module.ancestors(node):
        if isinstance(parent, ast.Attribute) and parent.attr in ("to", "type_as", "cuda"):
            return True
        if not isinstance(parent, ast.Attribute | ast.Call | ast.Subscript):
            return False
    return False


def _is_on_device(node: ast.expr, context: Context, depth: int = 3) -> bool:
    """Return whether an expression is a traced tensor that was not moved to the CPU."""
    if not context.is_traced(node) or isinstance(node, ast.List | ast.Tuple):
        return False
    if isinstance(context.kinds, Inference):
        value = context.kinds.value(node)
        if value is None or not value.is_tensor:
            return False  # a number that depends on data
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=ast.Attribute(attr=method)) if method in _LEAVING:
                return False
            case ast.Name(ctx=ast.Load()) if depth and context.is_traced(inner):
                value = only_value(inner, context)
                if value is not None and context.is_traced(value):
                    if not _is_on_device(value, context, depth - 1):
                        return False
            case _:
                pass
    return True


def _has_traced_root(node: ast.expr, context: Context) -> bool:
    """Return whether a value comes from a traced parameter or attribute, in one step or many.

    That is not so for a tensor that is traced only because it was made on a device, which may be
    the CPU.
    """
    function = context.module.function(node)
    if function is None:
        return False
    binders = context.flow(function).binders
    seen: set[str] = set()
    pending: list[ast.AST] = [node]
    while pending:
        for inner in ast.walk(pending.pop()):
            match inner:
                case ast.Attribute(value=ast.Name(id="self")) if context.is_traced(inner):
                    return True
                case ast.Name(id=name, ctx=ast.Load()) if name not in seen:
                    seen.add(name)
                    if not binders.get(name) and context.is_traced(inner):
                        return True
                    pending += [_statement(binder, context) for binder in binders.get(name, ())]
                case _:
                    pass
    return False


def _statement(node: ast.AST, context: Context) -> ast.AST:
    """Return the node that a name gets its value from: an assigned value, or a loop's iterable."""
    for parent in context.module.ancestors(node):
        match parent:
            case ast.Assign(value=value) | ast.AugAssign(value=value) | ast.For(iter=value):
                return value
            case ast.stmt():
                return ast.Pass()
            case _:
                pass
    return ast.Pass()


def _operands(node: ast.AST, context: Context) -> Iterator[ast.expr]:
    """Yield the tensors that an operation computes with, including those in lists."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from (left, right)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            if not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in ops):
                yield from (left, *comparators)
        case ast.Subscript(value=value, slice=index, ctx=ast.Load()):
            yield from (value, index)
        case ast.Call():
            yield from _arguments(node, context)
        case _:
            pass


def _arguments(node: ast.Call, context: Context) -> Iterator[ast.expr]:
    root, _, last = (context.name(node.func) or "").rpartition(".")
    if root not in ("torch", "torch.nn.functional", "torch.linalg"):
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in _MEETING):
            return
        yield node.func.value
    elif last not in _FUNCTIONS:
        return
    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
        if isinstance(argument, ast.List | ast.Tuple):
            yield from argument.elts
        else:
            yield argument


def sure_tensor(function: Function, context: Context) -> str | None:
    """Return a parameter that is always a tensor; None if there is none."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    optional = {a.arg for a in positional[len(positional) - len(arguments.defaults) :]}
    inside = context.module.inside(function)
    used = attributes_used(inside)
    for argument in all_arguments(arguments):
        if argument.arg in optional or any(_may_be_other(node, argument) for node in inside):
            continue
        kind = annotated(argument.annotation)
        text = "" if argument.annotation is None else ast.unparse(argument.annotation)
        if "None" in text or "Optional" in text:
            continue
        like_one = argument.annotation is None and function.name == "forward"
        if kind == TRACED or (like_one and is_used_like_a_tensor(used.get(argument.arg, ()))):
            return argument.arg
    return None


def _may_be_other(node: ast.AST, argument: ast.arg) -> bool:
    """Return whether a node rebinds a parameter, in any scope inside, or compares it with None."""
    name = argument.arg
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name).partition(".")[0] == name for alias in node.names)
    match node:
        case ast.Compare(left=ast.Name(id=compared), ops=[ast.Is() | ast.IsNot()]):
            return compared == name
        case _:
            return node is not argument and name in own_bindings(node)
