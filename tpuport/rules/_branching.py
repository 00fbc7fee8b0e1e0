"""The fix of an `if`: its two sides become functions, and `tpuport.ops.cond` calls one of them."""

import ast

from tpuport.rules._blocks import Layout, StatementBlock
from tpuport.rules._expressions import OPS, Expressions, function_around
from tpuport.rules._lifting import Lift, refuse_loop_exits
from tpuport.source.inference.liveness import NameSet
from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.statements import exits_loop, leaves, returns
from tpuport.source.syntax.text import Edit


class BranchFix:
    """The rewriting of one `if` into a call of `tpuport.ops.cond`.

    Args:
        node: The statement.
        context: The file and what is inferred about it.
    """

    def __init__(self, node: ast.If, context: Context) -> None:
        self.node, self.context, self.module = node, context, context.module
        self.function = function_around(node, context)
        self.layout = Layout(node, context)
        block, index = context.module.block(node)
        self.following = block[index + 1 :]
        self.parent = context.module.parents[node]
        self.is_parent_body = block is getattr(self.parent, "body", None)
        self.after: NameSet | None = None
        self.ends = False

    def edit(self) -> Edit:
        """Return the edit that replaces the statement by two functions and a call.

        Raises:
            NotFixable: the rewritten code might behave differently.
        """
        layout, expressions = self.layout, Expressions(self.context)
        sides = self._sides()
        blocks = [[s for block in side for s in block.statements] for side in sides]
        lift = Lift(self.node, blocks, self.context, ends=self.ends, after=self.after)
        if not self.ends and not lift.outputs:
            raise NotFixable("neither side binds a name that is read later")
        result = ", ".join(lift.outputs)
        last = None if self.ends else layout.line(f"return {result}", layout.inner)
        names = [self.module.fresh_name(self.node, name) for name in ("if_true", "if_false")]
        functions = [
            layout.function(name, lift.operands, *(block.at(layout.inner) for block in side), last)
            for name, side in zip(names, sides, strict=True)
        ]
        arguments = [expressions.truth(self.node.test), *names, *lift.operands_argument()]
        call = layout.call("return " if self.ends else f"{result} = ", f"{OPS}.cond", arguments)
        return layout.edit([*functions, call], expressions, gap=True)

    def _sides(self) -> tuple[list[StatementBlock], list[StatementBlock]]:
        """Return the blocks that make up each side."""
        body, orelse = self.node.body, self.node.orelse
        for side in (body, orelse):
            if len(side) == 1 and isinstance(side[0], ast.Pass):
                self.layout.dropped.add(side[0])
        if returns([*body, *orelse]):
            return self._returning_sides()
        if exits_loop([*body, *orelse]) is not None:
            return self._continuing_sides()
        return [self.layout.body()], [self.layout.orelse()]

    def _returning_sides(self) -> tuple[list[StatementBlock], list[StatementBlock]]:
        """Return the sides of an `if` of which a side returns: then both have to return.

        The side that does not return takes along the statements that follow the `if`.
        """
        body, orelse, following = self.node.body, self.node.orelse, self.following
        refuse_loop_exits([*body, *orelse], self.context)
        falls = [not leaves(body), not leaves(orelse)]
        if all(falls) and following:
            raise NotFixable("one side returns on some of its paths only")
        ends_function = self.parent is self.function and self.is_parent_body
        if any(falls) and not ends_function and not leaves(following):
            # Once the branch around it is fixed, this block is the body of a function and ends
            # there: a later pass can fix it.
            around = self.parent
            waits = isinstance(around, ast.If) and self.context.asks_traced(around.test)
            raise NotFixable("it returns, but its block goes on after it", pins=not waits)
        self.ends = True
        sides = [self.layout.body()], [self.layout.orelse()]
        if any(falls) and following:
            refuse_loop_exits(following, self.context)
            sides[falls.index(True)].append(self.layout.rest())
        return sides

    def _continuing_sides(self) -> tuple[list[StatementBlock], list[StatementBlock]]:
        """Return the sides of an `if` of which one ends in `continue`.

        The other side takes along the rest of the loop's body, so that no `continue` is needed.
        """
        body, orelse, following = self.node.body, self.node.orelse, self.following
        skips_in_body = isinstance(body[-1], ast.Continue)
        last = body[-1] if skips_in_body else (orelse or body)[-1]
        others = [s for s in [*body, *orelse, *following] if s is not last]
        in_loop = isinstance(self.parent, ast.For | ast.While) and self.is_parent_body
        if not isinstance(last, ast.Continue) or not in_loop:
            refuse_loop_exits([*body, *orelse], self.context)
        refuse_loop_exits(others, self.context)
        if returns(following):
            raise NotFixable("a return cannot leave the loop around it")
        if following:
            self.after = self.context.flow(self.function).after[following[-1]]
        self.layout.dropped.add(last)
        sides = [self.layout.body()], [self.layout.orelse()]
        if following:
            sides[1 if skips_in_body else 0].append(self.layout.rest())
        return sides
