"""TPU417: a tensor made in the step without a device."""

import ast
from collections.abc import Iterator

from tpuport.rules._appending import with_argument
from tpuport.rules._placing import RANDOM, cpu_tensor, creation, only_value
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.inference.inference import Inference
from tpuport.source.inference.parameters import annotated, attributes_used, is_used_like_a_tensor
from tpuport.source.inference.values import TRACED
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
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


class TensorInForward(Rule):
    """A tensor that a step makes on the CPU.

    ## What it does
    Finds `torch.arange`, `zeros`, `tensor` and their like without a device in a step, where the
    result has several elements and meets a traced tensor in an operation. The fix adds the device
    of that tensor. A tensor that meets none within the function is a note.

    ## Why is this bad?
    Without a device the tensor is a CPU tensor. torchax refuses to mix one with a traced tensor,
    unless it has a single element, and raises `AssertionError`.

    ## Fix safety
    The fix is exact: where the two tensors were not on one device before, eager PyTorch raised.
    There is none where no parameter is surely a tensor.

    ## References
    https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.device
    """

    CODE = "TPU417"
    MESSAGE = "`{call}` is a CPU tensor{meets}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                places = torch.arange(x.shape[-1], dtype=torch.float32)[None]
                weights = torch.tensor(
                    [1.0, 2.0, 3.0, 4.0],
                )
                return torch.where(x > 0, x * weights, places * 2)
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                places = torch.arange(x.shape[-1], dtype=torch.float32, device=x.device)[None]
                weights = torch.tensor(
                    [1.0, 2.0, 3.0, 4.0], device=x.device,
                )
                return torch.where(x > 0, x * weights, places * 2)
            """,
            jit_error="AssertionError",
        ),
        Example(
            before="""
            import torch


            class Model(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.norm = torch.nn.Identity()

                def forward(self, x):
                    return self.norm(x.float()) + torch.arange(4)


            forward = Model()
            """,
            after="""
            import torch


            class Model(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.norm = torch.nn.Identity()

                def forward(self, x):
                    return self.norm(x.float()) + torch.arange(4, device=x.device)


            forward = Model()
            """,
            jit_error="AssertionError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor | None):
                return torch.cat([x * 2, torch.zeros(1, 4)])
            """,
            jit_error="AssertionError",
            left="no parameter",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, n: int = 3):
            scale = torch.tensor(2.0)
            one = torch.ones(1)
            table = torch.arange(n).to(x.device)
            zeros = torch.zeros(4, device=x.device)
            rows = torch.arange(4).type_as(x)
            sizes = torch.tensor([2, 3]).tolist()
            return x * scale + one + table.sum() + zeros * len(sizes) + x.new_zeros(4) + rows
        """,
        """
        import torch


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.arange(4) * torch.ones(4)

            def forward(self, x: torch.Tensor):
                with torch.device(x.device):
                    places = torch.arange(4)
                return x + places
        """,
        """
        import torch


        def table(count):
            step = 3.0 / count
            step = torch.exp(torch.arange(count).float() * -step)
            step = torch.arange(4).float().unsqueeze(1) * step.unsqueeze(0)
            return torch.cat([step, torch.zeros(4, 1)], dim=1)


        def forward(x: torch.Tensor):
            return x * table(3).to(x.device)
        """,
    )

    def visit_FunctionDef(self, node: Function, context: Context) -> None:
        # A nested function is searched with the outermost one.
        if context.module.function(node) is not None or not runs_in_step(node.body[0], context):
            return
        for call, meeting in _cpu_creations(node, context).items():
            if meeting is None:
                text = ": name a device if a traced tensor meets it"
                context.report(self, call, severity=Severity.NOTE, call=call, meets=text)
            else:
                text = f", which meets a traced one on line {context.module.origin(meeting)}"
                context.report(self, call, call=call, meets=text)

    visit_AsyncFunctionDef = visit_FunctionDef

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        function = context.module.function(node)
        outermost = context.module.outermost_function(node)
        assert isinstance(outermost, Function)
        if _cpu_creations(outermost, context).get(node) is None:
            raise NotFixable("no traced tensor is known to meet it")
        name = None if function is not outermost else _sure_tensor(outermost, context)
        if name is None:
            raise NotFixable("no parameter that is surely a tensor has a device to take")
        return with_argument(node, f"device={name}.device", context)


def _cpu_creations(function: Function, context: Context) -> dict[ast.Call, ast.expr | None]:
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


def _sure_tensor(function: Function, context: Context) -> str | None:
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
        like_one = like_one and argument.arg != "self"  # it may have a layer `norm`
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
