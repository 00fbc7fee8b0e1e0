"""The fix of a `while`: its test and body become functions of the variables it carries."""

import ast

from tpuport.rules._blocks import Layout
from tpuport.rules._expressions import OPS, Expressions
from tpuport.rules._lifting import as_tuple
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit


def loop_edit(node: ast.While, carried: list[str], context: Context) -> Edit:
    """Return the edit that makes a loop two functions and a call of `tpuport.ops.while_loop`."""
    layout, expressions = Layout(node, context), Expressions(context)
    names = [context.module.fresh_name(node, name) for name in ("loop_test", "loop_body")]
    with expressions.moving(node.test):
        test = expressions.truth(node.test)
    is_long = len(test.lines) > 1
    returned = layout.line("return (" if is_long else "return ", layout.inner) + test
    returned = returned + (")" if is_long else "")
    state = as_tuple(carried)
    result = layout.line(f"return {state}", layout.inner)
    functions = [
        layout.function(names[0], carried, returned),
        layout.function(names[1], carried, layout.body().at(layout.inner), result),
    ]
    call = f"{OPS}.while_loop({names[0]}, {names[1]}, {state})"
    target = state if len(carried) == 1 else ", ".join(carried)
    return layout.edit([*functions, layout.line(f"{target} = {call}")], expressions, gap=True)
