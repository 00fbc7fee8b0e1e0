"""Method calls turned into calls of a helper: `value.method()` into `helper(value)`."""

import ast

from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage


def wrapped(node: ast.Call, helper: str, context: Context) -> tuple[Edit, Edit]:
    """Return the edits that turn a method call into a call of a helper on the same value.

    Args:
        node: The method's call; its arguments are dropped.
        helper: The helper's full name.
        context: The file and what is inferred about it.

    Raises:
        NotFixable: a comment between the value and the method would be lost.
    """
    assert isinstance(node.func, ast.Attribute)
    module = context.module
    start, end = module.span(node)
    # Parentheses around the value are not part of its node, and the dot follows them.
    value_end = module.span(node.func.value)[1]
    dot = module.token_after(value_end, ".")
    if module.comments(value_end, end):
        raise NotFixable("a comment inside it would be lost")
    kept = start + len(module.text.text[start:dot].rstrip())
    opening = Passage.of(f"{helper}(", module.origin(node))
    closing = Passage.of(")", module.text.origin(module.text.line_at(kept)))
    return Edit(start, start, opening), Edit(kept, end, closing)
