"""TPU415: random numbers that Python draws while the program is traced."""

import ast

from tpuport.rules._placing import RANDOM, creation, device_of, only_value
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context

# These draw nothing: they set up a generator or read its state.
_QUIET = frozenset(
    {
        "seed",
        "getstate",
        "setstate",
        "get_state",
        "set_state",
        "Random",
        "SystemRandom",
        "default_rng",
        "RandomState",
        "Generator",
        "SeedSequence",
    }
)
_DRAWN_ON_DEVICE = frozenset(
    {"torch.randn_like", "torch.rand_like", "torch.randint_like", "torch.bernoulli"}
)


class HostRandomness(Rule):
    """Random numbers that Python, NumPy or the CPU draws in a step.

    ## What it does
    Finds `random.*` and `numpy.random.*`, `torch.rand`, `randn` and `randint` without a device,
    and samples of `torch.distributions` with Python numbers as parameters, in the code of a step.
    Random operations on the device (`randn_like(x)`, `torch.rand(..., device=x.device)`) are a
    note.

    ## Why is this bad?
    The number is drawn while the program is traced and becomes a constant: every call sees the same
    noise, the same timesteps, the same dropped layers. Operations on the device draw new numbers
    only where the key is an argument of the program: `torchax.interop.jax_jit` and
    `tpuport.convert` do that, a bare `jax.jit` does not. `tpuport.convert` also draws single
    numbers of `random` and `numpy.random` so (`random.random()`, `np.random.uniform(a, b)`),
    and items by `random.choice`; a call of its port draws all else on the host before each call.

    ## Fix safety
    There is no automatic fix: other numbers change the result. Draw on the device of an input
    (`device=x.device`), or pass the numbers in as an argument.

    ## References
    https://docs.jax.dev/en/latest/random-numbers.html
    """

    CODE = "TPU415"
    MESSAGE = "`{call}` is drawn {where}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import random

            import torch


            def forward(x: torch.Tensor):
                return x * random.random()
            """,
            jit_error=None,
            harm="freezes",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            from torch.distributions import Beta


            def forward(x: torch.Tensor):
                noise = torch.randn(x.shape).to(x.device)
                t = Beta(1.5, 1.0).sample((x.shape[0],)).to(x.device)
                return x * t[:, None] + noise
            """,
            jit_error=None,
            harm="freezes",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Noise(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.times = torch.distributions.Beta(1.5, 1.0)

                def forward(self, x: torch.Tensor):
                    return x * self.times.sample((x.shape[0], 1)).to(x.device)


            forward = Noise()
            """,
            jit_error=None,
            harm="freezes",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import random

        import numpy as np
        import torch


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                random.seed(0)
                np.random.seed(0)
                self.table = torch.randn(4)
                self.noise = random.random() * np.random.rand()

            def forward(self, x: torch.Tensor):
                x = x[torch.randperm(len(x))] + torch.rand(4, device=x.device)
                return x + self.noise + torch.randn_like(x)
        """,
        """
        import torch
        from torch.distributions import Normal


        def forward(x: torch.Tensor, generator: torch.Generator):
            dist = Normal(x, torch.ones_like(x), validate_args=False)
            numbers = [x.sample for x in ()]
            return dist.rsample() + torch.zeros(4, device=x.device) * len(numbers)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        where = _drawn_at(node, context)
        if where is None and not _draws_on_device(node, context):
            return
        if not runs_in_step(node, context) or _is_start(node, context):
            return
        if where is not None:
            text = "once, while the program is traced, and then stays"
            context.report(self, node, call=node, where=text)
        else:
            text = "from the device's key, which must be an argument of the program"
            context.report(self, node, severity=Severity.NOTE, call=node, where=text)


def _is_start(node: ast.Call, context: Context) -> bool:
    """Return whether a number is the initial value of a parameter, or a seed."""
    for parent in context.module.ancestors(node):
        match parent:
            case ast.Call(func=ast.Name(id="Parameter") | ast.Attribute(attr="Parameter")):
                return True
            case ast.Assign(targets=[ast.Name(id=name)]) if "seed" in name:
                return True
            case ast.stmt():
                return False
            case _:
                pass
    return False


def _drawn_at(node: ast.Call, context: Context) -> str | None:
    """Return what draws a number outside the program; None if nothing does."""
    name = context.name(node.func) or ""
    root, _, last = name.rpartition(".")
    if root == "random" or root == "numpy.random":
        return None if last in _QUIET else root
    made = creation(node, context)
    # torchax takes over `randperm` even where no device is named.
    if made is not None and made[1] in RANDOM and made[1] != "randperm":
        return "the CPU" if _is_on_cpu(node) and not _has_default_device(context) else None
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("sample", "rsample"):
        return "the CPU" if _is_host_distribution(node.func.value, context) else None
    return None


def _is_on_cpu(node: ast.Call) -> bool:
    if any(keyword.arg in (None, "generator", "out") for keyword in node.keywords):
        return False
    device = device_of(node)
    return device is None or (isinstance(device, ast.Constant) and device.value == "cpu")


def _has_default_device(context: Context) -> bool:
    return "set_default_device" in context.module.text.text


def _is_host_distribution(node: ast.expr, context: Context) -> bool:
    """Return whether the parameters of a distribution are Python numbers."""
    made = _made_as(node, context)
    if made is None or not (context.name(made.func) or "").startswith("torch.distributions."):
        return False
    values = [*made.args, *(keyword.value for keyword in made.keywords)]
    return bool(values) and all(_is_host_number(value, context) for value in values)


def _made_as(node: ast.expr, context: Context) -> ast.Call | None:
    """Return the call that makes an object, directly or bound once to a name or attribute."""
    if isinstance(node, ast.Call):
        return node
    wanted = ast.unparse(node)
    made = [
        each.value
        for each in _around(node, context)
        if isinstance(each, ast.Assign) and any(ast.unparse(t) == wanted for t in each.targets)
    ]
    return made[0] if len(made) == 1 and isinstance(made[0], ast.Call) else None


def _around(node: ast.expr, context: Context) -> list[ast.AST]:
    """Return all nodes of a local name's function, or of an attribute's class."""
    scope: ast.AST | None = context.module.function(node)
    if isinstance(node, ast.Attribute) and scope is not None:
        scope = context.module.parents.get(context.module.outermost_function(node))
    return [] if scope is None else list(ast.walk(scope))


def _is_host_number(node: ast.expr, context: Context) -> bool:
    """Return whether an expression is a Python number, or an attribute such as `config.alpha`."""
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return _is_host_number(operand, context)
        case ast.Name():
            value = only_value(node, context)
            return value is not None and _is_host_number(value, context)
        case ast.Attribute():
            text = ast.unparse(node).lower()
            return any(word in text for word in ("alpha", "beta", "config", "cfg"))
        case _:
            return False


def _draws_on_device(node: ast.Call, context: Context) -> bool:
    """Return whether a call draws random numbers with the key of the device."""
    name = context.name(node.func) or ""
    if name in _DRAWN_ON_DEVICE:
        return True
    if name in ("torch.nn.functional.dropout",):
        return any(k.arg == "training" for k in node.keywords) or len(node.args) > 2
    made = creation(node, context)
    return made is not None and made[1] in RANDOM
