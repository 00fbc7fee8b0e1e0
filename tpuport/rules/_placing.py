"""The device that a tensor is made on: the CPU, where it cannot meet traced ones, or another."""

import ast

from tpuport.rules._masks import parts
from tpuport.source.inference.kinds import Kind
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS

CREATORS = frozenset(
    {
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "zeros",
        "tensor",
        "as_tensor",
        "rand",
        "randn",
        "randint",
        "randperm",
    }
)
RANDOM = frozenset({"rand", "randn", "randint", "randperm"})


def creation(node: ast.expr, context: Context) -> tuple[ast.Call, str] | None:
    """Return the call and its name if an expression is `torch.zeros(...)` or its like."""
    if not isinstance(node, ast.Call):
        return None
    root, _, name = (context.name(node.func) or "").rpartition(".")
    return (node, name) if root == "torch" and name in CREATORS else None


def device_of(call: ast.Call) -> ast.expr | None:
    """Return the value of a call's `device` argument."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
    return values[0] if values else None


def is_placed(call: ast.Call) -> bool:
    """Return whether a creation may put its result elsewhere than on the CPU."""
    device = device_of(call)
    if any(keyword.arg is None for keyword in call.keywords):
        return True
    if device is None or (isinstance(device, ast.Constant) and device.value in (None, "cpu")):
        return False
    return ast.unparse(device) != "torch.device('cpu')"


def made_on_device(node: ast.expr, context: Context) -> bool:
    """Return whether an expression contains a tensor made on the device of another tensor."""
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Attribute(attr="device"), *_]):
                return True
            case ast.Call() if creation(inner, context):
                device = device_of(inner)
                if isinstance(device, ast.Attribute) and device.attr == "device":
                    return True
            case ast.Name(ctx=ast.Load()):
                value = only_value(inner, context)
                made = None if value is None else creation(value, context)
                if made is not None and is_placed(made[0]):
                    return True
            case _:
                pass
    return False


def only_value(node: ast.Name, context: Context) -> ast.expr | None:
    """Return the value of a local name that is bound once, by a plain assignment."""
    function = context.module.function(node)
    if not isinstance(function, FUNCTIONS):
        return None
    binders = context.flow(function).binders.get(node.id, [])
    if len(binders) != 1:
        return None
    match context.module.parents.get(binders[0]):
        case ast.Assign(targets=[ast.Name()], value=value):
            return value
        case _:
            return None


# These keep a tensor on the CPU and do not make it smaller.
_SAME_PLACE = frozenset(
    {
        "float",
        "long",
        "int",
        "half",
        "double",
        "bool",
        "bfloat16",
        "unsqueeze",
        "view",
        "reshape",
        "expand",
        "repeat",
        "flatten",
        "t",
        "transpose",
        "permute",
        "clone",
        "cos",
        "sin",
        "exp",
        "log",
        "sqrt",
        "abs",
        "pow",
        "contiguous",
        "flip",
        "tril",
        "triu",
    }
)
_DEPTH = 8


def cpu_tensor(node: ast.expr, context: Context, depth: int = _DEPTH) -> ast.Call | None:
    """Return the call that made a tensor which surely is on the CPU and has several elements."""
    if depth == 0:
        return None
    made = creation(node, context)
    if made is not None:
        call, name = made
        return call if _is_cpu_creation(call, name, context) else None
    match node:
        case ast.Name(ctx=ast.Load()):
            value = only_value(node, context)
            return None if value is None else cpu_tensor(value, context, depth - 1)
        case ast.Subscript(value=inner, slice=index) if _keeps_all(index):
            return cpu_tensor(inner, context, depth - 1)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _SAME_PLACE:
            if any(context.is_traced(argument) for argument in node.args):
                return None
            return cpu_tensor(inner, context, depth - 1)
        case ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[dtype], keywords=[]):
            is_dtype = (context.name(dtype) or "").startswith("torch.")
            return cpu_tensor(inner, context, depth - 1) if is_dtype else None
        case ast.BinOp(left=left, right=right):
            return _of_operands(left, right, context, depth)
        case _:
            return None


def _of_operands(left: ast.expr, right: ast.expr, context: Context, depth: int) -> ast.Call | None:
    """Return the call that made a CPU tensor of two operands, neither on another device."""
    for first, second in ((left, right), (right, left)):
        found = cpu_tensor(first, context, depth - 1)
        if found is not None:
            is_host = context.kind(second) is Kind.HOST or cpu_tensor(second, context, depth - 1)
            return found if is_host else None
    return None


def _is_cpu_creation(call: ast.Call, name: str, context: Context) -> bool:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if is_placed(call) or any(context.is_traced(argument) for argument in arguments):
        return False
    return _is_large(call, name) and not _on_default_device(call, context)


def _on_default_device(node: ast.AST, context: Context) -> bool:
    """Return whether a default device may be set where a tensor is made."""
    if "set_default_device" in context.module.text.text:
        return True
    return any(
        isinstance(parent, ast.With)
        and any(ast.unparse(item.context_expr).startswith("torch.device(") for item in parent.items)
        for parent in context.module.ancestors(node)
    )


def _keeps_all(index: ast.expr) -> bool:
    """Return whether an index only adds dimensions: `[None]`, `[:, None]`."""
    return all(
        (isinstance(part, ast.Constant) and part.value in (None, ...))
        or (isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None)
        for part in parts(index)
    )


def _is_large(call: ast.Call, name: str) -> bool:
    """Return whether a creation has several elements, assuming that unknown sizes are not 1."""
    if not call.args or any(isinstance(argument, ast.Starred) for argument in call.args):
        return False
    first = call.args[0]
    if name in ("tensor", "as_tensor"):
        return isinstance(first, ast.List | ast.Tuple) and _length(first) > 1
    if name in ("arange", "linspace", "logspace", "eye", "randperm"):
        return not all(_number(argument) is not None for argument in call.args) or (
            name == "eye" or len(call.args) > 1 or (_number(first) or 0) > 1
        )
    sizes = call.args[:1] if name == "full" else call.args
    if isinstance(first, ast.Tuple | ast.List):
        sizes = first.elts
    return any(_number(size) not in (0, 1) for size in sizes)


def _length(node: ast.List | ast.Tuple) -> int:
    return sum(_length(part) if isinstance(part, ast.List | ast.Tuple) else 1 for part in node.elts)


def _number(node: ast.expr) -> float | None:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case _:
            return None
