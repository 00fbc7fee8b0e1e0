"""The truth of an expression: whether evaluating it takes one, and whether a test takes its own."""

import ast

from tpuport.source.rewrite.matching import Context


def asks_within(node: ast.expr, context: Context) -> bool:
    """Return whether evaluating an expression takes the truth of a traced value."""
    match node:
        case ast.BoolOp(values=[*first, last]):
            # The last operand is the result, and `and` and `or` do not take its truth.
            return any(context.asks_traced(v) for v in first) or asks_within(last, context)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return context.asks_traced(operand)
        case ast.Compare(ops=[_, _, *_]):
            return context.is_traced(node)
        case _:
            return False


def is_asked(node: ast.expr, context: Context) -> bool:
    """Return whether an expression is part of a test; then the owner of the test is reported."""
    parent = context.module.parents[node]
    match parent:
        case (
            ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test)
        ):
            return test is node
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.comprehension(ifs=tests):
            return node in tests
        case _:
            return False
