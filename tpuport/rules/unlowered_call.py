"""TPU120: an operation that torchax has no lowering for."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context

# Plain torchax 0.0.14.dev20261026 raises for these; the examples fail when that changes.
FUNCTIONS = frozenset(
    {
        "torch.hann_window",
        "torch.hamming_window",
        "torch.cov",
        "torch.vander",
        "torch.linalg.lstsq",
        "torch.index_reduce",
        "torch.nn.functional.affine_grid",
        "torch.nn.functional.ctc_loss",
        "torch.nn.functional.rrelu",
        "torch.nn.functional.embedding_bag",
        "torch.sparse_coo_tensor",
        "torch.sparse.FloatTensor",
        "torch.sparse_csr_tensor",
        "torch.nn.attention.flex_attention.flex_attention",
    }
)
# Layers that call these, wherever they are made.
LAYERS = frozenset({"torch.nn.CTCLoss", "torch.nn.EmbeddingBag", "torch.nn.RReLU"})
METHODS = frozenset(
    {
        "round_",
        "index_reduce",
        "index_reduce_",
        "put_",
        "to_sparse",
        "abs_",
        "atan_",
        "erf_",
        "clamp_max_",
        "cumsum_",
        "exp_",
        "floor_",
        "fmod_",
        "log_",
        "neg_",
        "reciprocal_",
        "rsqrt_",
        "sign_",
        "sin_",
        "t_",
        "trunc_",
        "addmm_",
        "asin_",
        "atan2_",
        "copysign_",
        "cos_",
        "cosh_",
        "cumprod_",
        "erfinv_",
        "exp2_",
        "expm1_",
        "hypot_",
        "log1p_",
        "log2_",
        "logical_and_",
        "sinh_",
        "tan_",
    }
)
# These fail only with this keyword.
KEYWORDS = {
    "torch.normal": "dtype",
    "torch.nn.functional.linear": "input",
    "torch.nn.functional.interpolate": "antialias",
}
# Their samples come from gamma variates, which have no lowering.
GAMMA_LIKE = frozenset({"Beta", "Dirichlet", "Gamma", "StudentT", "Chi2", "FisherSnedecor"})


class UnloweredCall(Rule):
    """A call of an operation that torchax has no lowering for.

    ## What it does
    Finds calls on traced tensors that torchax cannot turn into JAX: `hann_window`, `round_`,
    `exp_` and some other in-place methods, `affine_grid`, `ctc_loss` and `embedding_bag` with their
    layers, flex attention, samples of `Beta`, sparse tensors, and `torch.normal`, `F.linear` and
    `F.interpolate` with some keywords.

    ## Why is this bad?
    The trace stops with `OperatorNotFound` or a `TypeError`. `tpuport.convert` brings lowerings
    of its own for these; plain torchax does not. Of a sparse tensor it needs values that depend on
    no input of the program: sum rows by `index_add` instead of a product with another one.

    ## Fix safety
    There is no automatic fix in source: port with `tpuport.convert`, or compose it of other
    operations.

    ## References
    https://github.com/google/torchax
    """

    CODE = "TPU120"
    MESSAGE = "torchax has no lowering for `{call}`; `tpuport.convert` brings one for most"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x.clone().round_() + x.sort().values.cumsum_(-1)
            """,
            jit_error="OperatorNotFound",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            import torch.nn.functional as F


            def forward(x: torch.Tensor):
                return F.linear(input=x, weight=x)
            """,
            jit_error="TypeError",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            from torch.distributions import Beta


            def forward(x: torch.Tensor):
                share = Beta(x.exp(), x.exp(), validate_args=False)
                return share.sample()
            """,
            jit_error="OperatorNotFound",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                places = torch.stack([torch.arange(len(x)), torch.arange(len(x))])
                weights = torch.sparse_coo_tensor(places, x.flatten(1).sum(1))
                return weights @ x.flatten(1)
            """,
            jit_error="OperatorNotFound",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch
        import torch.nn.functional as F


        def forward(x: torch.Tensor):
            x = F.linear(x, x) + torch.normal(0.0, 1.0, size=(4,)).round()[0]
            return F.interpolate(x[None, None], scale_factor=2, mode="bilinear")
        """,
        """
        import torch
        from torch.distributions import Normal


        def forward(x: torch.Tensor, counts: dict):
            return Normal(x, 1.0, validate_args=False).sample()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        is_layer = context.name(node.func) in LAYERS
        if is_layer or (self._is_unlowered(node, context) and context.in_step(node)):
            context.report(self, node, call=node.func)

    def _is_unlowered(self, node: ast.Call, context: Context) -> bool:
        function = node.func
        name = context.name(function)
        if name in KEYWORDS:
            given = any(k.arg == KEYWORDS[name] and not _is_false(k.value) for k in node.keywords)
            return given and context.is_traced(node)
        if name is not None:
            return name in FUNCTIONS and context.is_traced(node)
        if not isinstance(function, ast.Attribute):
            return False
        if function.attr in METHODS:
            return context.is_traced(function.value)
        return function.attr in ("sample", "rsample") and self._is_gamma_like(
            function.value, context
        )

    def _is_gamma_like(self, node: ast.expr, context: Context) -> bool:
        """Return whether an expression is a distribution on traced values that samples gammas."""
        if isinstance(node, ast.Name):
            around = context.module.function(node)
            bound = [] if around is None else context.module.assigned(around, node.id)
            return len(bound) == 1 and self._is_gamma_like(bound[0], context)
        if not isinstance(node, ast.Call):
            return False
        name = context.name(node.func) or ""
        made = name.startswith("torch.distributions.") and name.rpartition(".")[2] in GAMMA_LIKE
        return made and any(map(context.is_traced, node.args))


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
