"""TPU418: an optimizer over parameters that are frozen."""

import ast
from collections.abc import Iterator

from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context

_NO_OPTIMIZERS = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")


class OptimizerOverFrozen(Rule):
    """An optimizer built over all parameters of a model that has frozen ones.

    ## What it does
    Finds `torch.optim.X(model.parameters())` where the same function or class freezes parameters
    of that model, by `requires_grad = False` or `requires_grad_(False)`.

    ## Why is this bad?
    PyTorch's optimizer skips parameters without a gradient. `jax.grad` knows no `requires_grad`: it
    returns a gradient for all parameters that it is given, so the frozen ones are trained, or decay
    by weight decay.

    ## Fix safety
    There is no automatic fix: a shorter list of parameters changes the layout of the optimizer's
    state, so old checkpoints no longer fit. For a new run write
    `filter(lambda p: p.requires_grad, model.parameters())`, and differentiate by these alone.

    ## References
    https://docs.jax.dev/en/latest/_autosummary/jax.grad.html
    """

    CODE = "TPU418"
    MESSAGE = "the optimizer gets all of `{parameters}`, and line {line} freezes some of them"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
                for parameter in model[0].parameters():
                    parameter.requires_grad = False
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                return model, optimizer
            """,
            jit_error=None,
            harm="trains_frozen",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            from torch import optim


            def forward(x: torch.Tensor):
                model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
                model[1].requires_grad_(False)
                return model, optim.SGD(params=list(model.parameters()), lr=0.1)
            """,
            jit_error=None,
            harm="trains_frozen",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        def main(model, teacher):
            teacher.requires_grad_(False)
            for parameter in model.encoder.parameters():
                parameter.requires_grad = False
            trained = filter(lambda p: p.requires_grad, model.parameters())
            first = torch.optim.AdamW(trained, lr=1e-3)
            head = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
            wanted = [p for p in model.parameters() if p.requires_grad]
            return first, head, torch.optim.SGD(wanted, lr=0.1)
        """,
        """
        import torch


        def main(model):
            model.requires_grad_(True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


        def freeze(model):
            model.requires_grad_(False)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = context.name(node.func) or ""
        if not name.startswith("torch.optim.") or name.startswith(_NO_OPTIMIZERS):
            return
        given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "params")]
        if not given or (parameters := _all_parameters(given[0])) is None:
            return
        model = ast.unparse(parameters.func.value)  # pyright: ignore[reportAttributeAccessIssue]
        for owner, place in _frozen(node, context):
            if owner == model or owner.startswith((f"{model}.", f"{model}[")):
                line = str(context.module.origin(place))
                context.report(self, node, parameters=parameters, line=line)
                return


def _all_parameters(node: ast.expr) -> ast.Call | None:
    """Return the call of `parameters()` if an expression gives all parameters of a model."""
    match node:
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner]):
            return _all_parameters(inner)
        case ast.Call(func=ast.Attribute(attr="parameters"), args=[], keywords=[]):
            return node
        case _:
            return None


def _frozen(node: ast.Call, context: Context) -> Iterator[tuple[str, ast.AST]]:
    """Yield what the code around a call freezes, as source text, and the node that does it."""
    around = context.module.outermost_function(node)
    parent = context.module.parents.get(around)
    for inner in ast.walk(parent if isinstance(parent, ast.ClassDef) else around):
        match inner:
            case ast.Call(
                func=ast.Attribute(value=owner, attr="requires_grad_"),
                args=[ast.Constant(value=False)],
            ):
                yield _owner(owner, inner, context), inner
            case ast.Assign(
                targets=[ast.Attribute(value=owner, attr="requires_grad")],
                value=ast.Constant(value=False),
            ):
                yield _owner(owner, inner, context), inner
            case _:
                pass


def _owner(node: ast.expr, place: ast.AST, context: Context) -> str:
    """Return the model that a frozen thing belongs to; for a loop's parameter, the loop's model."""
    text = ast.unparse(node)
    for parent in context.module.ancestors(place):
        match parent:
            case ast.For(
                target=target, iter=ast.Call(func=ast.Attribute(value=model, attr=method))
            ):
                names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
                if text in names and method in ("parameters", "named_parameters"):
                    return ast.unparse(model)
            case _:
                pass
    return text
