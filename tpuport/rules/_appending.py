"""The fix that adds an argument to a call."""

import ast

from tpuport.source.rewrite.finding import Fix
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage


def with_argument(
    call: ast.Call, text: str, context: Context, imports: tuple[str, ...] = ()
) -> Fix:
    """Return the fix that adds an argument after the last one of a call, which has some.

    Args:
        call: The call.
        text: The argument, such as `device=x.device`.
        context: The file.
        imports: Modules that the argument needs.
    """
    module = context.module
    last = max([*call.args, *call.keywords], key=module.start)
    end, closing = module.span(last)[1], module.span(call)[1] - 1
    # Parentheses around the last argument are not part of its node.
    while (after := module.token_after(end, ")")) < closing:
        end = after + 1
    added = Passage.of(f", {text}", module.origin(last))
    return Fix((Edit(end, end, added),), imports)
