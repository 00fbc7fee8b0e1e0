"""Where tensors are made: on the CPU, where traced values cannot meet them, or on the device."""

import ast

from tpuport.source.engine import Context
from tpuport.source.module import FUNCTIONS

CREATORS = frozenset(
    {
        *("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "zeros", "tensor"),
        *("as_tensor", "rand", "randn", "randint", "randperm"),
    }
)
RANDOM = frozenset({"rand", "randn", "randint", "randperm"})


def creation(node: ast.expr, context: Context) -> tuple[ast.Call, str] | None:
    """The call and its name if an expression is `torch.zeros(...)` or its like."""
    if not isinstance(node, ast.Call):
        return None
    root, _, name = (context.name(node.func) or "").rpartition(".")
    return (node, name) if root == "torch" and name in CREATORS else None


def device_of(call: ast.Call) -> ast.expr | None:
    """The value of a call's `device` argument."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == "device"]
    return values[0] if values else None


def is_placed(call: ast.Call) -> bool:
    """Whether a creation may put its result elsewhere than on the CPU."""
    device = device_of(call)
    if any(keyword.arg is None for keyword in call.keywords):
        return True
    if device is None or (isinstance(device, ast.Constant) and device.value in (None, "cpu")):
        return False
    return ast.unparse(device) != "torch.device('cpu')"


def made_on_device(node: ast.expr, context: Context) -> bool:
    """Whether an expression makes a tensor on the device of a tensor, at any depth."""
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
    """What a local name is bound to, if it is bound once and by a plain assignment."""
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
