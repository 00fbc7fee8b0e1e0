"""What becomes of `torch.compile` under torchax."""

import ast
import re

from tpuport.rules._devices import is_guarded
from tpuport.rules._unwrapping import has_true
from tpuport.source.engine import Context
from tpuport.source.finding import Severity

# Words of a test that chooses whether to compile.
ASKS = re.compile(r"compil|dynamo|inductor|cuda|gpu|available|script|trace", re.IGNORECASE)

_COMPILERS = frozenset({"compile", "script", "script_method", "trace", "trace_module"})


def is_candidate(node: ast.Attribute | ast.Name, context: Context) -> bool:
    """Whether a name may be a compiler's; a quick look, as every name of a file comes here."""
    if isinstance(node, ast.Attribute):
        return node.attr in _COMPILERS
    full = context.module.imports.get(node.id)
    return full is not None and full.rpartition(".")[2] in _COMPILERS


def fate(node: ast.expr, context: Context) -> tuple[Severity, str]:
    """What becomes of a use of `torch.compile`, in short and in words."""
    if is_guarded(node, context.module, ASKS):
        return Severity.NOTE, "skipped under torchax"
    if has_true(context.module.parents[node], "fullgraph"):
        return Severity.ERROR, "under torchax `fullgraph=True` raises"
    return Severity.SLOW, "skipped under torchax, and raises in eager PyTorch beside it"
