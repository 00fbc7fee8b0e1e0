"""TPU516: tensors in float16."""

import ast
import re

from tpuport.rules._devices import is_guarded, severity, within
from tpuport.rules._origins import last_name
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_HALF = ("torch.float16", "torch.half")
# Words in a test after which code knows its precision.
_ASKS_PRECISION = re.compile(r"cuda|gpu|available|half|fp16|float16|dtype|precision", re.IGNORECASE)
_ONLY_ASK = re.compile(r"autocast|finfo|isinstance|promote_types|can_cast|\bview$")


class HalfPrecision(Rule):
    """Tensors in float16.

    ## What it does
    Finds `.half()`, `.to(torch.float16)`, arguments such as `dtype=torch.float16` and, in host
    code, variables such as `self.vae_dtype = torch.float16`, where no test chooses the precision.
    The fix, which has to be asked for, uses bfloat16.

    ## Why is this bad?
    The matrix unit of a TPU multiplies bfloat16. Float16 runs, but is widened first, so it costs
    more than bfloat16, and its range is smaller than that of bfloat16 and float32.

    ## Fix safety
    Results change: bfloat16 has the range of float32 and 8 bits of precision, float16 overflows
    beyond 65504 and has 11. `torch.tensor(70000.0).half()` is infinite, with bfloat16 it is 70144.

    ## References
    https://cloud.google.com/tpu/docs/bfloat16
    """

    CODE = "TPU516"
    MESSAGE = "`{code}` takes float16, which a TPU has to widen: bfloat16 is its half precision"
    SAFETY = Safety.UNSAFE
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x.half() + torch.zeros((), dtype=torch.float16)
                return y * x.to(torch.half)
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                y = x.bfloat16() + torch.zeros((), dtype=torch.bfloat16)
                return y * x.to(torch.bfloat16)
            """,
            reference="""
            def forward(x):
                return (x.bfloat16() + 0) * x.bfloat16()
            """,
            jit_error=None,
            harm="computes_in_half",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, half: bool = False):
            if x.dtype == torch.float16 or x.dtype in (torch.half, torch.bfloat16):
                x = x.clip(-65504, 65504)
            limit = torch.finfo(torch.float16).max + x.view(torch.float16).max()
            if half:
                x = x.half()
            return x.to(torch.float16 if half else torch.float32).clamp(max=limit)
        """,
        """
        import torch

        DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


        class Box:
            def half(self):
                return self.left.half()

            def forward(self, x: torch.Tensor, dtype: torch.dtype = torch.float16):
                with torch.autocast(x.device.type, dtype=torch.float16, enabled=False):
                    return x.to(dtype).half_size(), self.half
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "half":
            if not node.args and not node.keywords and context.name(node.func.value) is None:
                self._report(node, node, context)

    def visit_Attribute(self, node: ast.Attribute, context: Context) -> None:
        if node.attr not in ("float16", "half") or context.name(node) not in _HALF:
            return
        call = context.module.parents[node]
        if isinstance(call, ast.Assign) and _is_dtype(call.targets[0]):
            self._report_variable(call, node, context)
        if isinstance(call, ast.keyword) and call.arg is not None and call.arg.endswith("dtype"):
            call = context.module.parents[call]
        elif not isinstance(call, ast.Call) or node not in call.args:
            return
        if isinstance(call, ast.Call) and not _ONLY_ASK.search(ast.unparse(call.func)):
            self._report(node, call, context)

    def _report(self, node: ast.expr, call: ast.Call, context: Context) -> None:
        if within(call, context.module, "half"):
            return
        if not is_guarded(call, context.module, _ASKS_PRECISION):
            context.report(self, node, code=call, severity=severity(node, context, Severity.SLOW))

    def _report_variable(self, node: ast.Assign, value: ast.expr, context: Context) -> None:
        if not is_guarded(node, context.module, _ASKS_PRECISION):
            context.report(self, value, code=node, severity=Severity.DEVICE)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        name = node.func if isinstance(node, ast.Call) else node
        if not isinstance(name, ast.Attribute):
            raise NotFixable("the dtype has another name here")
        _, end = context.module.span(name)
        made = Passage.of("bfloat16", context.module.origin(node))
        return Fix((Edit(end - len(name.attr), end, made),))


def _is_dtype(target: ast.expr) -> bool:
    return (last_name(target) or "").endswith("dtype")
