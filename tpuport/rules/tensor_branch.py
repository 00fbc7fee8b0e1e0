"""TPU101: a Python branch on a traced value."""

import ast

from tpuport.rules._blocks import Layout, StatementBlock
from tpuport.rules._expressions import OPS, Expressions, function_around
from tpuport.rules._lifting import Lift, end_of, in_loop, refuse_loop_exits
from tpuport.rules._reports import is_report
from tpuport.rules._rule import Example, Rule
from tpuport.source.inference.liveness import NameSet
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.statements import exits_loop, leaves, returns
from tpuport.source.syntax.text import Edit, Passage


class TensorBranch(Rule):
    """A branch that Python decides by the value of a traced tensor.

    ## What it does
    Finds `if`, `elif`, `x if t else y`, `and`, `or`, `not` and chained comparisons whose outcome
    takes the truth of a tensor that depends on the program's inputs. The fix moves both sides into
    nested functions and hands them to `tpuport.ops.cond`, which calls one of them in eager PyTorch
    and becomes `lax.cond` in a program.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so `bool(tensor)` raises
    `ConcretizationTypeError`.

    ## Fix safety
    The fix is exact in eager PyTorch: order of evaluation, short circuits, exceptions and bindings
    stay. One thing differs: reading a variable that was never bound raises `NameError`, no longer
    its subclass `UnboundLocalError`. There is no fix where a side writes to an object that others
    see (a trace that rewrites the function has one: it merges what the sides change), where a name
    is bound on one side only and read later, or where control leaves the branch by `break`, `yield`
    or a `return` on some paths only.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU101"
    MESSAGE = "Python branches on `{test}`, which has no value while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True
    PINS = True

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, limit: float | None = 2.0):
                if limit is not None and x.abs().max() > limit:  # too large
                    x = x / limit
                    hit = torch.ones(())
                else:
                    hit = torch.zeros(())
                return x, hit
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, limit: float | None = 2.0):
                # too large
                def if_true(x):
                    x = x / limit
                    hit = torch.ones(())
                    return x, hit

                def if_false(x):
                    hit = torch.zeros(())
                    return x, hit

                x, hit = tpuport.ops.cond(
                    tpuport.ops.both(limit is not None, lambda: x.abs().max() > limit),
                    if_true,
                    if_false,
                    (x,),
                )
                return x, hit
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                if x.sum() > 0:
                    return x * 2
                # Rare.
                if x.min() < -2:
                    x = x.clamp(min=-2)
                return x - 1
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                def if_true_2(x):
                    return x * 2

                def if_false_2(x):
                    # Rare.
                    def if_true(x):
                        x = x.clamp(min=-2)
                        return x

                    def if_false(x):
                        return x

                    x = tpuport.ops.cond(x.min() < -2, if_true, if_false, (x,))
                    return x - 1

                return tpuport.ops.cond(x.sum() > 0, if_true_2, if_false_2, (x,))
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = torch.zeros_like(x)
                for i in range(3):
                    if x.mean() > 0.1 * i:
                        continue
                    y = y + x
                return y
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                y = torch.zeros_like(x)
                for i in range(3):
                    def if_true(y):
                        return y

                    def if_false(y):
                        y = y + x
                        return y

                    y = tpuport.ops.cond(x.mean() > 0.1 * i, if_true, if_false, (y,))
                return y
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x + 1 if not x.any() else x
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                return tpuport.ops.cond(tpuport.ops.negate(x.any()), lambda: x + 1, lambda: x)
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, counts: list):
                if x.sum() > 0:
                    counts.append(1)
                    x = x + 1
                return x
            """,
            left="would happen on both sides",
            inputs="(torch.randn(3, 4), [])",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                if x.sum() > 0:
                    scale = 2
                return x * scale
            """,
            left="scale may be unbound",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                for i in range(3):
                    if x.sum() > i:
                        break
                    x = x + 1
                return x
            """,
            left="the break on line 7",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, mask: torch.Tensor | None = None):
            if mask is None or x.shape[0] > 3 and x.dim() == 2:
                mask = torch.ones_like(x)
            n = len(x) if x.size(0) else 0
            return torch.where(mask > 0, x, n)
        """,
        """
        import torch


        def forward(x: torch.Tensor, steps: int = 4):
            table = torch.arange(steps)
            if table.max() > 2 and not isinstance(steps, torch.Tensor):
                x = x + table.sum()
            return x
        """,
    )

    def visit_If(self, node: ast.If, context: Context) -> None:
        if context.asks_traced(node.test) and not is_report(node):
            # The end of a loop is made one with the loop, by TPU104.
            if not context.is_live or end_of(context.module.parents[node]) is not node:
                context.report(self, node, test=node.test)

    def visit_IfExp(self, node: ast.IfExp, context: Context) -> None:
        if context.asks_traced(node.test):
            context.report(self, node, test=node.test)

    def visit_BoolOp(self, node: ast.BoolOp, context: Context) -> None:
        if not _is_asked(node, context) and _asks_within(node, context):
            context.report(self, node, test=node)

    def visit_UnaryOp(self, node: ast.UnaryOp, context: Context) -> None:
        if not _is_asked(node, context) and _asks_within(node, context):
            context.report(self, node, test=node.operand)

    def visit_Compare(self, node: ast.Compare, context: Context) -> None:
        if not _is_asked(node, context) and _asks_within(node, context):
            context.report(self, node, test=node)

    def visit_comprehension(self, node: ast.comprehension, context: Context) -> None:
        for test in node.ifs:
            if context.asks_traced(test):
                context.report(self, test, test=test)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if isinstance(node, ast.If):
            return Fix((_BranchFix(node, context).edit(),), (OPS,))
        assert isinstance(node, ast.expr)
        parent = context.module.parents[node]
        if isinstance(parent, ast.comprehension) and node in parent.ifs:
            raise NotFixable("how many elements a comprehension keeps would depend on data")
        # Called for its refusals: an expression outside a function, or one that reads the frame.
        function_around(node, context)
        expressions = Expressions(context)
        if isinstance(node, ast.IfExp):
            start = Passage.of(f"{OPS}.cond(", context.module.origin(node))
            test = expressions.truth(node.test)
            sides = [expressions.delayed(side) for side in (node.body, node.orelse)]
            made = start + test + ", " + sides[0] + ", " + sides[1] + ")"
        else:
            made = expressions.value(node)
        return Fix((expressions.edit(node, made),), (OPS,))


def _asks_within(node: ast.expr, context: Context) -> bool:
    """Return whether evaluating an expression takes the truth of a traced value."""
    match node:
        case ast.BoolOp(values=[*first, last]):
            # The last operand is the result, and `and` and `or` do not take its truth.
            return any(context.asks_traced(v) for v in first) or _asks_within(last, context)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return context.asks_traced(operand)
        case ast.Compare(ops=[_, _, *_]):
            return context.is_traced(node)
        case _:
            return False


def _is_asked(node: ast.expr, context: Context) -> bool:
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


class _BranchFix:
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
        # While a program is traced, a branch makes results of what its sides change.
        live = self.context.imports_inside
        lift = Lift(
            *(self.node, blocks, self.context), ends=self.ends, after=self.after, merges=live
        )
        if not (self.ends or lift.outputs or live):
            raise NotFixable("neither side binds a name that is read later")
        result = ", ".join(lift.outputs)
        last = layout.line(f"return {result}", layout.inner) if result else None
        names = [self.module.fresh_name(self.node, name) for name in ("if_true", "if_false")]
        functions = [
            layout.function(name, lift.operands, *(block.at(layout.inner) for block in side), last)
            for name, side in zip(names, sides, strict=True)
        ]
        arguments = [expressions.truth(self.node.test), *names, *lift.operands_argument()]
        start = "return " if self.ends else f"{result} = " if result else ""
        call = layout.call(start, f"{OPS}.cond", arguments)
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
            # there: a later pass can fix it. So is that of a loop which `convert` rewrites.
            around, waits = self.parent, self.context.is_live and in_loop(self.node, self.context)
            if isinstance(around, ast.If):
                waits = waits or self.context.asks_traced(around.test)
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
