"""TPU416: `torch.no_grad` around a value that a gradient flows through."""

import ast
import re
from collections.abc import Iterator

from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.inference.inference import Inference
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import FUNCTIONS, Function
from tpuport.source.syntax.statements import walk_scope
from tpuport.source.syntax.text import Edit, Passage

STOPPERS = frozenset({"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"})
# Functions of these names compute no loss, so no gradient is needed there.
_SAMPLING = re.compile(
    r"(^|_)(sample|sampling|generate|generation|predict|infer|inference|eval|evaluate|action|act"
    r"|validate|validation|test|log|plot|visuali[sz]e|ema|momentum|update|decode|profile|rollout"
    r"|backward|detect)"
)
# Names that training code gives to a model that it does not train.
_FROZEN = re.compile(r"(^|_)(teacher|old|ref|reference|target|frozen|ema|momentum)(_|$)")
# Names that models give to integer and boolean tensors, which carry no gradient.
_WHOLE = re.compile(
    r"mask|idx|ids$|^ids|index|indices|position|bucket|coord|order|count|num_|len|token|label|hit"
    r"|match|grid|shape|size|valid|hash|(^|_)ind($|_)"
)
# Methods and functions whose result carries no gradient.
_NO_GRADIENT = frozenset(
    {
        "detach",
        "argmax",
        "argmin",
        "argsort",
        "long",
        "int",
        "bool",
        "nonzero",
        "multinomial",
        "ones_like",
        "zeros_like",
        "randn_like",
        "rand_like",
        "arange",
        "new_zeros",
        "new_ones",
        "zeros",
        "ones",
        "empty_like",
        "full_like",
        "bincount",
        "item",
        "tolist",
        "size",
        "sign",
        "isnan",
        "isinf",
        "isfinite",
        "randint",
        "randperm",
        "searchsorted",
        "bucketize",
        "floor",
        "round",
        "ceil",
        "topk_indices",
        "numel",
        "randn",
        "rand",
    }
)
_LOOKS = frozenset({"detach", "item", "shape", "device", "dtype", "tolist", "size", "dim", "data"})
# Each of these returns one tensor.
_ONE_TENSOR = frozenset(
    {
        "softmax",
        "sigmoid",
        "tanh",
        "exp",
        "log",
        "sqrt",
        "sin",
        "cos",
        "mean",
        "sum",
        "abs",
        "clone",
        "float",
        "relu",
        "gelu",
        "matmul",
        "clamp",
        "normalize",
        "log_softmax",
        "square",
    }
)
_SWITCHES = frozenset({"enable_grad", "set_grad_enabled", "inference_mode"})


class NoGradAsStopGradient(Rule):
    """A value computed under `torch.no_grad` and used where gradients are asked for.

    ## What it does
    Finds `with torch.no_grad():` (and `inference_mode`, `set_grad_enabled(False)`) in a step, whose
    body computes a traced value that is read after it. Functions that sample or evaluate, and those
    that are decorated with it, are left alone. The fix calls `.detach()` on the values.

    ## Why is this bad?
    The block switches PyTorch's autograd off. `jax.grad` knows nothing of that: the gradient flows
    through the target network, the teacher or the statistics, and training silently changes.
    `.detach()` becomes `jax.lax.stop_gradient`.

    ## Fix safety
    The fix is exact: under `no_grad` a tensor has no gradient to lose. There is none where the
    value may be more than one tensor, such as the result of a module.

    ## References
    https://docs.jax.dev/en/latest/_autosummary/jax.lax.stop_gradient.html
    """

    CODE = "TPU416"
    MESSAGE = "`{stopper}` does not stop the gradient of `{name}` under `jax.grad`"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                with torch.no_grad():
                    target = x * 2  # no gradient
                    weight = torch.softmax(x.float(), dim=-1)
                return x * target * weight
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                with torch.no_grad():
                    target = (x * 2).detach()  # no gradient
                    weight = torch.softmax(x.float(), dim=-1).detach()
                return x * target * weight
            """,
            jit_error=None,
            harm="gradient_flows",
        ),
        Example(
            before="""
            import torch


            class Distilled(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.teacher = torch.nn.Tanh()

                def forward(self, x: torch.Tensor):
                    with torch.no_grad():
                        wanted = self.teacher(x)
                    return (x - wanted).square()


            forward = Distilled()
            """,
            jit_error=None,
            harm="gradient_flows",
            left="may be more than one tensor",
        ),
    )
    CLEAN = (
        """
        import torch


        @torch.no_grad()
        def rotate(x: torch.Tensor):
            y = x * 2
            return y


        def sample(x: torch.Tensor):
            with torch.no_grad():
                y = x * 2
            return y + 1


        def forward(x: torch.Tensor):
            with torch.no_grad():
                target = (x * 2).detach()
                level = x.argmax() * 0.5
                mask = x > 0
                best = x.argmax(-1)
                scratch = x * 3
                plain = x * 4
                table = torch.arange(4)
                del scratch
            return x * target * mask + best[:, None] + level + plain.detach() + table.sum()
        """,
        """
        import torch


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                with torch.no_grad():
                    self.weight = torch.nn.Parameter(torch.ones(4))

            def forward(self, x: torch.Tensor):
                with torch.set_grad_enabled(self.training):
                    y = x * self.weight
                return y
        """,
    )

    def visit_With(self, node: ast.With, context: Context) -> None:
        stoppers = [i.context_expr for i in node.items if _is_stopper(i.context_expr, context)]
        function = context.module.function(node)
        if not stoppers or function is None or not runs_in_step(node, context):
            return
        if not _asks_for_gradients(function, context) or _is_evaluation(node, context):
            return
        for name, _ in _leaking(node, context):
            context.report(self, stoppers[0], stopper=stoppers[0], name=name)
            return

    def fix(self, node: ast.AST, context: Context) -> Fix:
        # The finding is at the expression, whose parent is the `withitem`.
        block = context.module.parents[context.module.parents[node]]
        assert isinstance(block, ast.With)
        return Fix(
            tuple(_detached(name, value, context) for name, value in _leaking(block, context))
        )


def _is_stopper(node: ast.expr, context: Context) -> bool:
    """Return whether an expression of a `with` switches gradients off."""
    match node:
        case ast.Call(func=func, args=[], keywords=[]):
            return context.name(func) in STOPPERS
        case ast.Call(func=func, args=[ast.Constant(value=False)]):
            return context.name(func) == "torch.set_grad_enabled"
        case _:
            return False


def _asks_for_gradients(function: Function, context: Context) -> bool:
    """Return whether a gradient may be needed in a function: no sampling, not switched off."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    if arguments and arguments[0].arg == "ctx":
        return False  # of an autograd.Function, which defines its own gradient
    around = [
        function,
        *(p for p in context.module.ancestors(function) if isinstance(p, FUNCTIONS)),
    ]
    for each in around:
        if _SAMPLING.search(each.name.lower()):
            return False
        for decorator in each.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if context.name(called) in STOPPERS:
                return False
    return True


def _is_evaluation(node: ast.stmt, context: Context) -> bool:
    """Return whether a statement is on a side of a branch that training does not take."""
    child: ast.AST = node
    for parent in context.module.ancestors(node):
        if isinstance(parent, ast.If):
            off = "not self.training" in ast.unparse(parent.test)
            on = ast.unparse(parent.test) == "self.training"
            if (off and child in parent.body) or (on and child in parent.orelse):
                return True
        child = parent
    return False


def _leaking(node: ast.With, context: Context) -> Iterator[tuple[str, ast.expr]]:
    """Yield the traced values that a body binds and later code reads, each after its name."""
    function = context.module.function(node)
    if function is None:
        return
    after = context.flow(function).after.get(node, frozenset())
    for statement in walk_scope(node.body):
        match statement:
            case ast.Assign(targets=[target], value=value):
                names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
            case _:
                continue
        for name in names:
            if _WHOLE.search(name.lower()):
                continue
            if name in after and _has_gradient(value, context):
                if not _is_only_looked_at(name, node, function, context):
                    yield name, value
                    break


def _has_gradient(node: ast.expr, context: Context) -> bool:
    """Return whether a value is a traced one that a gradient would flow through."""
    if context.is_boolean(node) or isinstance(node, ast.Compare | ast.BoolOp | ast.Constant):
        return False
    match node:
        case ast.Call(func=ast.Attribute(attr=method) | ast.Name(id=method)):
            if method in _NO_GRADIENT or _gives_detached(method, context):
                return False
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
                if not _has_gradient(node.func.value, context):
                    return False
        case ast.Subscript(value=value) | ast.Attribute(value=value):
            return _has_gradient(value, context)
        case ast.BinOp(left=left, right=right):
            return _has_gradient(left, context) or _has_gradient(right, context)
        case _:
            pass
    return context.is_traced(node) or _is_module_call(node, context)


def _gives_detached(name: str, context: Context) -> bool:
    """Return whether the functions of this name in the file detach all that they return."""
    module = context.module
    results = [
        value
        for function in module.functions
        if function.name == name
        for node in walk_scope(function.body)
        if isinstance(node, ast.Return) and node.value is not None
        for value in (node.value.elts if isinstance(node.value, ast.Tuple) else [node.value])
    ]
    return bool(results) and all(
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "detach"
        for value in results
    )


def _is_module_call(node: ast.expr, context: Context) -> bool:
    """Return whether an expression calls a module in `self` on a traced value, or a frozen one."""
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func).split(".")
    if any(_FROZEN.search(part) for part in called):
        return True
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    return called[0] == "self" and any(context.is_traced(value) for value in values)


def _is_only_looked_at(name: str, node: ast.With, function: Function, context: Context) -> bool:
    """Return whether every read after a body detaches, or reads only the shape or the like."""
    inside = set(ast.walk(node))
    reads = [
        read
        for read in ast.walk(function)
        if isinstance(read, ast.Name)
        and read.id == name
        and isinstance(read.ctx, ast.Load)
        and read not in inside
        and read.lineno > node.lineno
    ]
    parents = [context.module.parents[read] for read in reads]
    return all(isinstance(p, ast.Attribute) and p.attr in _LOOKS for p in parents)


def _detached(name: str, value: ast.expr, context: Context) -> Edit:
    """Return the edit that detaches a value from the gradient.

    Raises:
        NotFixable: the value may be something else than one tensor, or gradients may be on.
    """
    if _is_number(value, context):
        raise NotFixable(f"the value of {name} may be a number, which has no gradient")
    if not _is_one_tensor(value, context):
        raise NotFixable(f"the value of {name} may be more than one tensor")
    if any(_switches_on(node, context) for node in ast.walk(_block_around(value, context))):
        raise NotFixable("gradients may be switched on inside the block")
    start, end = context.module.span(value)
    opened, closed = ("(", ")") if isinstance(value, ast.BinOp) else ("", "")
    first = Passage.of(opened, context.module.origin(value))
    return Edit(start, end, first + context.module.copy_node(value) + f"{closed}.detach()")


def _block_around(node: ast.expr, context: Context) -> ast.AST:
    """Return the outermost `with` around an expression within its function."""
    found: ast.AST = node
    for parent in context.module.ancestors(node):
        if isinstance(parent, FUNCTIONS):
            break
        if isinstance(parent, ast.With):
            found = parent
    return found


def _switches_on(node: ast.AST, context: Context) -> bool:
    """Return whether a node is a call that may switch gradients on again."""
    if not isinstance(node, ast.Call) or _is_stopper(node, context):
        return False
    return ast.unparse(node.func).rpartition(".")[2] in _SWITCHES


def _is_number(node: ast.expr, context: Context) -> bool:
    """Return whether a traced value may be a number: it is not known to be a tensor."""
    if not isinstance(node, ast.BinOp) or not isinstance(context.kinds, Inference):
        return False
    value = context.kinds.value(node)
    return value is not None and not value.is_tensor


def _is_one_tensor(node: ast.expr, context: Context) -> bool:
    """Return whether a traced value surely is one new tensor."""
    match node:
        case ast.BinOp():
            return context.is_traced(node)
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in _ONE_TENSOR:
            name = context.name(node.func) or ""
            if {"out", "inplace", None} & {keyword.arg for keyword in node.keywords}:
                return False  # the result may be the argument itself
            if method == "relu" and len(node.args) > 1:
                return False
            if method == "float":  # returns a float32 tensor itself, not a copy
                return _is_one_tensor(owner, context)
            return name.startswith("torch.") or context.is_traced(owner)
        case _:
            return False
