"""TPU421: attention with a mask, which may leave a row nothing to attend to."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


class MaskedAttention(Rule):
    """`scaled_dot_product_attention` with a mask.

    ## What it does
    Finds calls of `scaled_dot_product_attention` with a mask. A boolean mask may well be a padding
    mask with empty rows; any other is a note. The fix calls `tpuport.ops.attention`, which gives
    zeros for such rows as PyTorch does.

    ## Why is this bad?
    A query that may attend to nothing gives zeros in PyTorch and NaN under torchax
    0.0.14.dev20261026. The NaN spreads: a value of NaN times a weight of zero is NaN again in the
    next layer, until all of the output is.

    ## Fix safety
    Exact.

    ## References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """

    CODE = "TPU421"
    MESSAGE = "a row that `{mask}` masks out gives NaN under torchax, and zeros in PyTorch"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch
            import torch.nn.functional as F


            def forward(x: torch.Tensor, lengths: torch.Tensor):
                valid = torch.arange(x.shape[-2], device=x.device) < lengths[:, None]
                pairs = valid[:, :, None] & valid[:, None]
                return F.scaled_dot_product_attention(x, x, x, attn_mask=pairs)
            """,
            after="""
            import torch
            import torch.nn.functional as F
            import tpuport.ops


            def forward(x: torch.Tensor, lengths: torch.Tensor):
                valid = torch.arange(x.shape[-2], device=x.device) < lengths[:, None]
                pairs = valid[:, :, None] & valid[:, None]
                return tpuport.ops.attention(x, x, x, attn_mask=pairs)
            """,
            inputs="(torch.randn(2, 5, 4), torch.tensor([3, 4]))",
            jit_error=None,
            harm="differs",
        ),
        Example(
            before="""
            import torch
            from torch.nn.functional import scaled_dot_product_attention


            def forward(x: torch.Tensor, mask: torch.Tensor):
                return scaled_dot_product_attention(x, x, x, mask.log())
            """,
            after="""
            import torch
            from torch.nn.functional import scaled_dot_product_attention
            import tpuport.ops


            def forward(x: torch.Tensor, mask: torch.Tensor):
                return tpuport.ops.attention(x, x, x, mask.log())
            """,
            inputs="(torch.randn(2, 3, 4), torch.eye(3) * torch.tensor([[1.0], [0.0], [2.0]]))",
            jit_error=None,
            harm="differs",
        ),
    )
    CLEAN = (
        """
        import torch
        import torch.nn.functional as F


        def forward(x: torch.Tensor):
            y = F.scaled_dot_product_attention(x, x, x, None, is_causal=True)
            return y + F.scaled_dot_product_attention(x, x, x, attn_mask=None, dropout_p=0.0)
        """,
        """
        from kernels import scaled_dot_product_attention


        def forward(x, mask):
            return scaled_dot_product_attention(x, x, x, attn_mask=mask)
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if context.name(node.func) != ATTENTION or not node.args:
            return
        mask = _mask(node)
        if mask is None or isinstance(mask, ast.Constant) or not context.is_traced(node.args[0]):
            return
        severity = self.SEVERITY if context.is_boolean(mask) else Severity.NOTE
        context.report(self, node, severity=severity, mask=mask)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        name = Passage.of(f"{OPS}.attention", context.module.origin(node))
        return Fix((Edit(*context.module.span(node.func), name),), (OPS,))


def _mask(node: ast.Call) -> ast.expr | None:
    if len(node.args) > 3:
        return node.args[3]
    return next((k.value for k in node.keywords if k.arg == "attn_mask"), None)
