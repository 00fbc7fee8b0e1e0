"""TPU114: a distribution that checks traced parameters."""

import ast

from tpuport.rules._appending import with_argument
from tpuport.rules._expressions import OPS
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

# Of `torch.distributions`: not distributions with parameters to check.
OTHERS = frozenset({"kl_divergence", "kl", "register_kl", "constraints", "transforms", "Transform"})
# They take distributions, and check no parameters of their own.
WRAPPERS = frozenset({"Independent", "TransformedDistribution", "MixtureSameFamily"})
# The position of `validate_args` among the arguments; 2 for all others.
_PARAMETERS = {
    **dict.fromkeys(("Chi2", "Dirichlet", "Exponential", "HalfCauchy", "HalfNormal", "Poisson"), 1),
    **dict.fromkeys(("Binomial", "ContinuousBernoulli", "GeneralizedPareto"), 3),
    **dict.fromkeys(("LowRankMultivariateNormal", "Multinomial", "NegativeBinomial"), 3),
    **dict.fromkeys(("RelaxedBernoulli", "RelaxedOneHotCategorical", "StudentT"), 3),
    **dict.fromkeys(("MultivariateNormal", "Wishart"), 4),
}


class DistributionCheck(Rule):
    """A distribution of `torch.distributions` that checks its traced parameters.

    ## What it does
    Finds `Normal(mean, std)` and its siblings on traced tensors without `validate_args=False`. The
    fix passes `validate_args=tpuport.ops.validate_args(...)`, which is the default in eager PyTorch
    and `False` while a program is traced.

    ## Why is this bad?
    The check asks whether all elements are valid, which no traced tensor can answer: plain torchax
    raises `OperatorNotFound` for `aten::_is_all_true`.

    ## Fix safety
    Exact in eager PyTorch. In a program invalid parameters give NaN instead of a `ValueError`.

    ## References
    https://docs.pytorch.org/docs/stable/distributions.html
    """

    CODE = "TPU114"
    MESSAGE = "`{call}` checks the values of its parameters, which have none while traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch
            from torch.distributions import Normal


            def forward(x: torch.Tensor):
                mean, std = x.mean(0), x.std(0) + 1
                policy = Normal(mean, scale=std)
                return policy.log_prob(x)
            """,
            after="""
            import torch
            from torch.distributions import Normal
            import tpuport.ops


            def forward(x: torch.Tensor):
                mean, std = x.mean(0), x.std(0) + 1
                policy = Normal(mean, scale=std, validate_args=tpuport.ops.validate_args(mean, std))
                return policy.log_prob(x)
            """,
            jit_error="OperatorNotFound",
        ),
        Example(
            before="""
            import torch
            from torch.distributions import Categorical


            def forward(x: torch.Tensor):
                return Categorical(logits=x * 2).entropy()
            """,
            jit_error="OperatorNotFound",
            left="no parameter is a plain name",
        ),
    )
    CLEAN = (
        """
        import torch
        from torch.distributions import Normal, kl_divergence


        def forward(x: torch.Tensor):
            policy = Normal(x, 1.0, validate_args=False)
            return kl_divergence(policy, policy) + Normal(x, 1.0, False).log_prob(x)
        """,
        """
        import torch
        from torch.distributions import Normal


        def sample_noise(count: int):
            return Normal(0.0, 1.0).sample((count,))
        """,
        """
        import torch
        from torch.distributions import Distribution, Independent, Normal

        Distribution.set_default_validate_args(False)


        def forward(x: torch.Tensor):
            return Independent(Normal(x, 1.0), 1).log_prob(x)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = context.name(node.func) or ""
        package, _, last = name.rpartition(".")
        if (
            not package.startswith("torch.distributions")
            or not last[:1].isupper()
            or last in OTHERS | WRAPPERS
            or "set_default_validate_args(" in context.module.text.text
        ):
            return
        if any(keyword.arg == "validate_args" for keyword in node.keywords):
            return
        if len(node.args) > _PARAMETERS.get(last, 2):
            return
        if any(map(context.is_traced, _given(node))):
            context.report(self, node, call=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        if any(isinstance(a, ast.Starred) for a in node.args) or None in [
            keyword.arg for keyword in node.keywords
        ]:
            raise NotFixable("the arguments that it unpacks may hold `validate_args`")
        names = [n.id for n in _given(node) if isinstance(n, ast.Name) and context.is_traced(n)]
        if not names:
            raise NotFixable("no parameter is a plain name, and no other expression may run twice")
        text = f"validate_args={OPS}.validate_args({', '.join(names)})"
        return with_argument(node, text, context, (OPS,))


def _given(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]
