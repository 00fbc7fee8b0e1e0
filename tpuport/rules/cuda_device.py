"""TPU511: a CUDA device written into the code."""

import ast
import re

from tpuport.rules._devices import (
    AVAILABLE,
    is_guarded,
    is_half_guarded,
    outermost_choice,
    refuse_guarded,
    severity_anywhere,
)
from tpuport.rules._guarding import chosen
from tpuport.rules._origins import last_name
from tpuport.rules._rule import Example, Rule
from tpuport.source.inference.roles import Role
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS, Function
from tpuport.source.syntax.names import all_arguments
from tpuport.source.syntax.text import Edit

_NAME = re.compile(r"^cuda(:\d+)?$")
_DEVICE = re.compile(r"(^|_)device(_map|_type)?$|^map_location$", re.IGNORECASE)
# Calls that take the name of a device by position, with that position.
_POSITIONS = {
    **dict.fromkeys(("torch.device", "torch.Generator", "torch.set_default_device"), 0),
    **{"torch.distributed.device_mesh.init_device_mesh": 0, "torch.load": 1},
}
# Calls that only ask about a device, or that other rules report.
_OTHERS = re.compile(
    r"autocast|amp\.|GradScaler|custom_fwd|add_argument|library|profil|skip|mark\."
)


class CudaDevice(Rule):
    """A CUDA device written into the code.

    ## What it does
    Finds `"cuda"` and `"cuda:0"` where they name a device to put things on: in `.to`, `device=`,
    `map_location=`, a variable or a parameter's default. The fix asks PyTorch whether there is
    CUDA and takes the CPU if not, or the device that a traced tensor is on.

    ## Why is this bad?
    A TPU machine has no CUDA: constructors, weight loading and eager PyTorch raise. Inside its
    environment torchax puts *new* tensors on its own device whatever the name says, but moving a
    traced tensor raises there, too.

    ## Fix safety
    The fix is exact: with CUDA the same name is used. Without it the original raises, or reads
    weights on the CPU where that is the default.

    ## References
    https://pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code
    """

    CODE = "TPU511"
    MESSAGE = "{device} names a device that a TPU machine does not have"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x.to("cuda") + 1
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                return x.to("cuda" if torch.cuda.is_available() else x.device) + 1
            """,
            reference="def forward(x): return x + 1",
            jit_error="TracerArrayConversionError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, name: str | None = None):
                device = torch.device(name or 'cuda:0')
                return x * torch.ones((), device=device) + x.new_ones(())
            """,
            after="""
            import torch


            def forward(x: torch.Tensor, name: str | None = None):
                device = torch.device(name or ('cuda:0' if torch.cuda.is_available() else "cpu"))
                return x * torch.ones((), device=device) + x.new_ones(())
            """,
            reference="def forward(x): return x * 1.0 + 1",
            jit_error=None,
            harm="needs_cuda",
        ),
        Example(
            before="""
            from torch import nn


            class Shift(nn.Linear):
                def __init__(self, device: str = "cuda"):
                    super().__init__(4, 4)
                    self.to(device)


            shift = Shift().bias.new_zeros(())


            def forward(x):
                return x + shift
            """,
            after="""
            from torch import nn
            import torch


            class Shift(nn.Linear):
                def __init__(self, device: str = "cuda" if torch.cuda.is_available() else "cpu"):
                    super().__init__(4, 4)
                    self.to(device)


            shift = Shift().bias.new_zeros(())


            def forward(x):
                return x + shift
            """,
            reference="def forward(x): return x + 0.0",
            jit_error="AssertionError",
        ),
    )
    CLEAN = (
        """
        import torch

        NAMES = {"cuda": "NVIDIA", "xpu": "Intel"}


        def make(args, parser):
            parser.add_argument("--device", default="cuda", help="cuda or cpu")
            kind = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
            return torch.zeros(3, device="cuda" if args.gpu else kind), NAMES["cuda"]


        def place(model):
            '''Move the model with `model.to("cuda")`.'''
            if not torch.cuda.is_available():
                return model, torch.get_autocast_dtype("cuda")
            return model.to("cuda:0"), torch.autocast("cuda", enabled=False)


        def forward(x: torch.Tensor, device_type: str = "cpu"):
            if x.device.type.startswith("cuda") or "cuda" in str(x.device):
                x = x.to("cuda")
            assert x.device != torch.device("cuda"), "sent to device='cuda'"
            return x.float().to(x.device) + torch.ones_like(x)
        """,
    )

    def visit_Constant(self, node: ast.Constant | ast.JoinedStr, context: Context) -> None:
        use = _device_use(node, context) if _is_device_name(node) else None
        if use is None:
            return
        if not is_guarded(node, context.module):
            context.report(self, node, device=node, severity=severity_anywhere(node, context, use))
        elif is_half_guarded(node, context.module):
            context.report(self, node, device=node, severity=Severity.DEVICE)

    visit_JoinedStr = visit_Constant

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        argument = _default_passed_on(node, context)
        if argument is not None and not is_guarded(node, context.module):
            name = context.module.source(argument)
            context.report(self, argument, device=f'`{name}`, "cuda" if left out,')

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if not isinstance(node, ast.Constant | ast.JoinedStr):
            raise NotFixable("the parameter's default is rewritten instead")
        refuse_guarded(node, context.module)
        return Fix((_choice(node, context),), ("torch",))


def _is_device_name(node: ast.Constant | ast.JoinedStr) -> bool:
    """Return whether a string reads `cuda`, `cuda:0` or f"cuda:{...}"."""
    match node:
        case ast.Constant(value=str(text)):
            return _NAME.match(text) is not None
        case ast.JoinedStr(values=[ast.Constant(value="cuda:"), ast.FormattedValue()]):
            return True
        case _:
            return False


def _choice(node: ast.expr, context: Context) -> Edit:
    """Return the edit that makes a device's name a choice between it and the CPU.

    A traced tensor that is moved stays on its own device instead, as it cannot leave its program.
    """
    match context.module.parents[node]:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name) as moved, attr="to"), args=[first]
        ):
            stays = first is node and context.is_traced(moved)
            return chosen(node, AVAILABLE, f"{name}.device" if stays else '"cpu"', context)
        case _:
            return chosen(node, AVAILABLE, '"cpu"', context)


def _device_use(node: ast.expr, context: Context) -> Severity | None:
    """Return the severity of a string that names a device in the step or in set-up, or None.

    Args:
        node: A string for which `_is_device_name` is true.
        context: The file and what is inferred about it.
    """
    inner, parent = outermost_choice(node, context.module)
    match parent:
        case ast.Call():
            return _argument_use(parent, inner, context)
        case ast.keyword(arg=str(name)) if _DEVICE.search(name):
            call = context.module.parents[parent]
            return _call_use(call, context) if isinstance(call, ast.Call) else None
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return _variable_use(target, node, context)
        case ast.Dict(keys=keys, values=values):
            key = keys[values.index(inner)] if inner in values else None
            is_device = isinstance(key, ast.Constant) and _DEVICE.search(str(key.value))
            return Severity.ERROR if is_device else None
        case ast.arguments():
            return _default_use(parent, inner)
        case _:
            return None


def _argument_use(call: ast.Call, argument: ast.expr, context: Context) -> Severity | None:
    if argument not in call.args:
        return None
    place = call.args.index(argument)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and place == 0:
        return _call_use(call, context)
    name = context.name(call.func)
    if name is not None:
        return _call_use(call, context) if _POSITIONS.get(name) == place else None
    return Severity.ERROR if _DEVICE.search(_parameter(call, place, context)) else None


def _parameter(call: ast.Call, place: int, context: Context) -> str:
    """Return the name of the parameter that takes an argument, if this file has the function."""
    match call.func:
        case ast.Name(id=name):
            skipped = 0
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            skipped = 1
        case _:
            return ""
    for node in context.module.nodes:
        if isinstance(node, FUNCTIONS) and node.name == name:
            arguments = [a.arg for a in all_arguments(node.args)][skipped:]
            return arguments[place] if place < len(arguments) else ""
    return ""


def _call_use(call: ast.Call, context: Context) -> Severity | None:
    """Return the severity of a call with a CUDA device, which torchax may ignore in the step."""
    written = ast.unparse(call.func)
    if _OTHERS.search(context.name(call.func) or written):
        return None
    parent = context.module.parents[call]
    if isinstance(parent, ast.Compare):
        return None
    in_class = isinstance(context.module.scope(call), ast.ClassDef)
    if isinstance(parent, ast.arguments) or (in_class and isinstance(parent, ast.AnnAssign)):
        return Severity.DEVICE  # a default that callers may change
    if not context.in_step(call) or not _redirected(call, context):
        return Severity.ERROR
    return Severity.SLOW


def _redirected(call: ast.Call, context: Context) -> bool:
    name = context.name(call.func)
    if name is not None:
        return name.startswith("torch.") and name.count(".") == 1 and not name.endswith("_like")
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "to"
        and not context.is_traced(call.func.value)
    )


def _variable_use(target: ast.expr, node: ast.expr, context: Context) -> Severity | None:
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    if not _DEVICE.search(name):
        return None
    if isinstance(context.module.scope(node), ast.ClassDef):
        return Severity.DEVICE  # a default that callers may change
    in_process = isinstance(node, ast.JoinedStr) or context.in_step(node)
    return Severity.SLOW if in_process else Severity.ERROR


def _default_use(arguments: ast.arguments, default: ast.expr) -> Severity | None:
    pairs = _with_defaults(arguments)
    taken = any(value is default and _DEVICE.search(argument.arg) for argument, value in pairs)
    return Severity.DEVICE if taken else None


def _default_passed_on(call: ast.Call, context: Context) -> ast.expr | None:
    """Return the argument that puts something on a constructor's default CUDA device.

    Args:
        call: A call of `.to(...)`, or one that takes `device=` or `device_map=`.
        context: The file and what is inferred about it.
    """
    argument = _device_argument(call)
    if argument is None or context.role(call) is not Role.SETUP:
        return None
    function = context.module.function(call)
    if function is None:
        return None
    name = _parameter_behind(argument, function)
    defaults = {p.arg for p, value in _with_defaults(function.args) if _is_cuda(value)}
    rebound = any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(function)
    )
    return argument if name in defaults and not rebound else None


def _device_argument(call: ast.Call) -> ast.expr | None:
    name = last_name(call.func)
    if name not in ("from_pretrained", "to", "from_config"):
        return None
    if name == "to" and isinstance(call.func, ast.Attribute) and call.args:
        return call.args[0]
    return next((k.value for k in call.keywords if k.arg in ("device", "device_map")), None)


def _parameter_behind(argument: ast.expr, function: Function) -> str | None:
    """Return the parameter that a name, or an attribute of `self`, was set from."""
    if isinstance(argument, ast.Name):
        return argument.id
    written = ast.unparse(argument)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[target], value=ast.Name(id=name)):
                if isinstance(argument, ast.Attribute) and ast.unparse(target) == written:
                    return name
            case _:
                pass
    return None


def _is_cuda(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and _NAME.match(str(value.value)) is not None


def _with_defaults(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    return [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
