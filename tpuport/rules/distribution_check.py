"""TPU419: a distribution that checks its traced parameters."""

import ast

from tpuport.rules._placing import creation, is_placed, only_value
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.engine import Context
from tpuport.source.finding import Safety, Severity
from tpuport.source.kinds import Kind

# They take distributions, and check nothing of their own.
_WRAPPERS = frozenset({"Independent", "TransformedDistribution", "MixtureSameFamily"})
_PACKAGE = "torch.distributions."
# What models call the tensors that they parametrise a distribution with.
_TENSOR_NAMES = ("logit", "prob", "mean", "mu", "std", "sigma", "loc")


class DistributionCheck(Rule):
    """A distribution of `torch.distributions` that validates traced parameters.

    ## What it does
    Finds `torch.distributions.Normal(mean, std)` and its like with traced parameters in a step,
    where neither `validate_args=False` is given nor checks are switched off in the file.

    ## Why is this bad?
    The constructor looks at the values of its parameters, which is an operation that torchax has
    not (`aten::_is_all_true`): it raises `OperatorNotFound`.

    ## Fix safety
    There is no automatic fix: without the check, parameters that are wrong give NaN and no longer
    an exception. Pass `validate_args=False`.

    ## References
    https://docs.pytorch.org/docs/stable/distributions.html
    """

    CODE = "TPU419"
    MESSAGE = "`{call}` checks traced values, which torchax cannot: pass validate_args=False"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch
            from torch.distributions import Normal


            def forward(x: torch.Tensor):
                return Normal(x, torch.ones_like(x)).log_prob(x * 2)
            """,
            jit_error="OperatorNotFound",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                alpha = torch.as_tensor(1.5, device=x.device)
                beta = torch.as_tensor(1.0, device=x.device)
                return x * torch.distributions.Beta(alpha, beta).mean
            """,
            jit_error="OperatorNotFound",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            import torch.distributions as D


            def forward(x: torch.Tensor):
                return D.Categorical(logits=x).logits
            """,
            jit_error="OperatorNotFound",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch
        from torch.distributions import Independent, Normal, kl_divergence


        def forward(x: torch.Tensor, alpha: float = 1.5):
            normal = Normal(x, torch.ones_like(x), validate_args=False)
            both = Independent(normal, 1)
            return both.log_prob(x) + kl_divergence(normal, normal).sum()
        """,
        """
        import torch
        from torch.distributions import Distribution, Normal

        Distribution.set_default_validate_args(False)


        def forward(x: torch.Tensor):
            return Normal(x, 1.0).log_prob(x)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = context.name(node.func) or ""
        last = name.rpartition(".")[2]
        if not name.startswith(_PACKAGE) or not last[:1].isupper() or last in _WRAPPERS:
            return
        if last.endswith("Transform") or "set_default_validate_args(" in context.module.text.text:
            return
        if any(keyword.arg in ("validate_args", None) for keyword in node.keywords):
            return
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(_is_tensor(value, context) for value in values) and runs_in_step(node, context):
            context.report(self, node, call=node)


def _is_tensor(node: ast.expr, context: Context) -> bool:
    """Whether a parameter is a tensor on the device: known, made there, or called like one."""
    if context.is_traced(node):
        return True
    if not isinstance(node, ast.Name):
        return False
    value = only_value(node, context)
    made = None if value is None else creation(value, context)
    if made is not None:
        return is_placed(made[0])
    is_named = any(word in node.id.lower() for word in _TENSOR_NAMES)
    return is_named and context.kind(node) is Kind.UNKNOWN
