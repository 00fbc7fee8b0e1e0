"""The effect of torchax on `torch.compile`."""

import ast
import re

from tpuport.rules._devices import is_guarded
from tpuport.rules._unwrapping import has_true
from tpuport.source.rewrite.finding import Severity
from tpuport.source.rewrite.matching import Context

# Words in a test that decides whether to compile.
ASKS = re.compile(r"compil|dynamo|inductor|cuda|gpu|available|script|trace", re.IGNORECASE)

_COMPILERS = frozenset({"compile", "script", "script_method", "trace", "trace_module"})


def is_candidate(node: ast.Attribute | ast.Name, context: Context) -> bool:
    """Return whether a name may be a compiler's: a quick look, as every name of a file is asked."""
    if isinstance(node, ast.Attribute):
        return node.attr in _COMPILERS
    full = context.module.imports.get(node.id)
    return full is not None and full.rpartition(".")[2] in _COMPILERS


def fate(node: ast.expr, context: Context) -> tuple[Severity, str]:
    """Return the severity of a use of `torch.compile`, and what happens to it, in words."""
    if is_guarded(node, context.module, ASKS):
        return Severity.NOTE, "skipped under torchax"
    if has_true(context.module.parents[node], "fullgraph"):
        return Severity.ERROR, "under torchax `fullgraph=True` raises"
    return (
        Severity.SLOW,
        "skipped under torchax, and raises in eager PyTorch once torchax is imported",
    )
