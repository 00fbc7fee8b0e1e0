"""TPU104: a Python loop whose end depends on a traced value."""

import ast
from collections.abc import Callable
from functools import partial

from tpuport.rules._blocks import Layout
from tpuport.rules._effects import changed_names, refuse_changed_operands, refuse_effects
from tpuport.rules._expressions import OPS, Expressions, function_around
from tpuport.rules._lifting import Lift, as_tuple, end_of, is_range, refuse_loop_exits
from tpuport.rules._loop_returns import return_after
from tpuport.rules._reports import is_harmless_log
from tpuport.rules._rule import Example, Rule
from tpuport.source.inference.liveness import NameSet, targets
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.statements import loop_exits, returns, walk_scope
from tpuport.source.syntax.text import Edit, Passage


class TensorWhile(Rule):
    """A loop that runs until a traced tensor's value stops it.

    ## What it does
    Finds `while` loops whose test takes the truth of a tensor that depends on the program's inputs.
    The fix moves test and body into nested functions of the variables that the loop carries, and
    hands them to `tpuport.ops.while_loop`, which loops in eager PyTorch and becomes
    `lax.while_loop` in a program.

    `convert` also rewrites `for` loops over rows whose number depends on data, such as the experts
    that some token chose (`for e in hit.nonzero()`): `tpuport.ops.for_each` runs a round for every
    row that there can be, under a `lax.cond` that asks whether the row is there. A loop over a
    range that has many rounds, or makes a tensor longer (`x = torch.cat([x, y])`), calls
    `tpuport.ops.for_range`: its body is compiled once, with a buffer of the last size for such a
    tensor, where that is proved to be the same. A long loop over the rows or equal parts of
    a tensor, with `enumerate` and `zip` too, calls `tpuport.ops.for_items` in the same way.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so asking for its truth raises
    `ConcretizationTypeError`; the number of iterations is not known either.

    ## Fix safety
    The fix is exact in eager PyTorch. There is none where a `while` is left by `break` or
    `continue`, or a loop by `return`, where a variable that it carries may be unbound before it,
    or where its body writes to an object that others see. `convert` also rewrites such loops: it
    carries whether the loop goes on, returns after it, binds variables in a first round of their
    own, carries attributes and items that a round replaces, and leaves out lines that
    only log.

    A `lax.while_loop` has no reverse-mode gradient under plain torchax. `convert` gives it one, of
    first order: the backward pass runs the rounds again.

    ## References
    https://docs.jax.dev/en/latest/_autosummary/jax.lax.while_loop.html
    """

    CODE = "TPU104"
    MESSAGE = "a loop's end depends on `{test}`, which has no value while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True
    PINS = True

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                rounds = torch.zeros((), dtype=torch.long)
                while x.abs().max() > 0.5 and rounds < 20:
                    step = x * 0.25  # shrink
                    x = x - step
                    rounds = rounds + 1
                return x, rounds
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                rounds = torch.zeros((), dtype=torch.long)

                def loop_test(x, rounds):
                    return tpuport.ops.both(x.abs().max() > 0.5, lambda: rounds < 20)

                def loop_body(x, rounds):
                    step = x * 0.25  # shrink
                    x = x - step
                    rounds = rounds + 1
                    return (x, rounds)

                x, rounds = tpuport.ops.while_loop(loop_test, loop_body, (x, rounds))
                return x, rounds
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                history = []
                while x.sum() > 1:
                    x = x / 2
                    history.append(x)
                return x
            """,
            left="history.append(x)",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                while x.sum() > 1:
                    x = x / 2
                    if x.ndim > 2:
                        return x
                return x
            """,
            left="its body returns",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, rounds: int = 3):
            while rounds > 0 and x.numel() > 0:
                x = x / 2
                rounds -= 1
            return x
        """,
    )

    def visit_While(self, node: ast.While, context: Context) -> None:
        # A trace also finds those whose rounds branch, such as `while True` with a `break`.
        if context.asks_traced(node.test) or (context.is_live and context.grows(node)):
            context.report(self, node, test=node.test)

    def visit_For(self, node: ast.For, context: Context) -> None:
        # Only a trace knows whether the number of rows depends on data.
        if not context.is_live or not context.is_traced(node.iter):
            return
        if is_range(node.iter) or _is_paired(node.iter) or not _is_builtin(node.iter):
            context.report(self, node, test=node.iter)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if context.is_live and isinstance(node, ast.For | ast.While) and returns(node.body):
            return Fix((return_after(node, context),), (OPS,))  # the next pass makes it a call
        if isinstance(node, ast.For):
            return Fix((_for_edit(node, context),), (OPS,))
        assert isinstance(node, ast.While)
        function = function_around(node, context)
        if not context.is_live:
            refuse_loop_exits(node.body, context)
        if returns(node.body) or (node.orelse and not context.is_live):
            raise NotFixable("it has an else block" if node.orelse else "its body returns")
        refuse_effects([node.test], context)
        flow = context.flow(function)
        if node not in flow.before:
            raise NotFixable("it is never reached")
        # The next iteration also reads the variables that the body assigns.
        after = _read_later(node, context)
        # What else a round changes of a loop that makes a tensor longer is seen when it runs.
        is_live = context.is_live
        lift = Lift(node, [node.body], context, after=after, effects=is_live, unbound=is_live)
        if context.is_live and not context.grows(node):
            changed = changed_names(node.body)
            known = {"merged": changed, "watched": ("self",)}
            body = [one for one in node.body if not is_harmless_log(one)]
            refuse_effects(body, context, entering=lift.operands, **known)
        refuse_changed_operands(node.body, context, carried=lift.outputs)
        begun = _begun(lift, flow.after[node])
        if not lift.outputs and not context.is_live:
            raise NotFixable("no variable that its test could read changes in its body")
        return Fix((_loop_edit(node, lift.outputs, begun, context),), (OPS,))


def _begun(lift: Lift, after: NameSet) -> list[str]:
    """Return what the variables of a loop begin with.

    Those that may be unbound have a round of their own in a trace, which binds them.

    Args:
        lift: The loop.
        after: The names that may be read though no round binds them.

    Raises:
        NotFixable: a variable that may be unbound is none of these.
    """
    for name in lift.outputs:
        if name not in lift.bound_before and not (lift.context.is_live and name in after):
            raise NotFixable(f"{name} may be unbound before the loop")
    return [n if n in lift.bound_before else _if_bound(n, lift) for n in lift.outputs]


def _if_bound(name: str, lift: Lift) -> str:
    return f"{OPS}.if_bound(lambda: {name}{', sure=False' if name in lift.operands else ''})"


def _loop_edit(node: ast.While, carried: list[str], begun: list[str], context: Context) -> Edit:
    """Return the edit that makes a loop two functions and a call of `tpuport.ops.while_loop`.

    The second one returns first whether the loop goes on, if it has a `break`.
    """
    layout, expressions = Layout(node, context), Expressions(context)
    if context.is_live:  # a program reports nothing, as for a branch that logs
        layout.dropped.update(filter(is_harmless_log, node.body))
    names = [context.module.fresh_name(node, name) for name in ("loop_test", "loop_body")]
    with expressions.moving(node.test):
        test = expressions.truth(node.test)
    is_long = len(test.lines) > 1
    returned = layout.line("return (" if is_long else "return ", layout.inner) + test
    returned = returned + (")" if is_long else "")
    exits = list(loop_exits(node.body))
    stops = any(isinstance(one, ast.Break) for one in exits)
    going, ended = (as_tuple([one, *carried] if stops else carried) for one in ("True", "False"))
    layout.replaced = {
        one: f"return {ended if isinstance(one, ast.Break) else going}" for one in exits
    }
    result = layout.line(f"return {going}", layout.inner)
    functions = [
        layout.function(names[0], carried, returned),
        layout.function(names[1], carried, layout.body().at(layout.inner), result),
    ]
    more = ", grows=True" if context.grows(node) else ""
    more += ", stops=True" if stops else ""
    more += ", tells=True" if node.orelse else ""
    call = f"{OPS}.while_loop({names[0]}, {names[1]}, {as_tuple(begun)}{more})"
    results = list(carried)
    after: list[Passage] = []
    if node.orelse:
        results.append(context.module.fresh_name(node, "going"))
        layout.replaced = {}  # those are in the body
        block = layout.orelse(nested=False).at(layout.inner)
        after = [layout.line(f"if {results[-1]}:"), *([] if block is None else [block])]
    target = as_tuple(results) if len(results) == 1 else ", ".join(results)
    made = layout.line(f"{target} = {call}" if target else call)
    return layout.edit([*functions, made, *after], expressions, gap=True)


# Their calls take numbers, or give more than rows.
_BUILTINS = {"enumerate", "filter", "list", "map", "range", "reversed", "sorted", "tuple", "zip"}


def _is_builtin(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _BUILTINS
        case _:
            return False


def _for_edit(node: ast.For, context: Context) -> Edit:
    if is_range(node.iter):
        return _counted_edit(node, context, "for_range")
    if not context.grows(node):
        return _rows_edit(node, context)
    try:
        return _counted_edit(node, context, "for_items")
    except NotFixable:
        if _is_builtin(node.iter):
            raise
        return _rows_edit(node, context)


def _rows_edit(node: ast.For, context: Context) -> Edit:
    """Return the edit that makes a loop over rows a function and a call of `for_each`."""
    lift = _lifted(node, context, merges=True)
    if not lift.outputs and not lift.written:
        raise NotFixable("it changes nothing that is read later")
    return _call_edit(node, lift, context, "for_each", as_tuple(lift.written))


def _counted_edit(node: ast.For, context: Context, function: str) -> Edit:
    """Return the edit that makes a loop a function and a call of `for_range` or `for_items`."""
    for inner in walk_scope(node.body):
        if isinstance(inner, ast.Yield | ast.YieldFrom | ast.Await | ast.Delete):
            raise NotFixable("its body yields, awaits or deletes a name")
    # What else a round changes is seen when it runs.
    end = end_of(node, over_items=function == "for_items")
    lift = _lifted(node, context, end=end, effects=True, unbound=True)
    stops = any(isinstance(one, ast.Break) for one in loop_exits(node.body))
    more = ("stops=True",) if stops else ()
    return _call_edit(node, lift, context, function, *more, end=end)


def _lifted(node: ast.For, context: Context, *, end: ast.If | None = None, **options: bool) -> Lift:
    """Return the names that the body of a loop takes and returns.

    Raises:
        NotFixable: it would behave differently in a function.
    """
    flow = context.flow(function_around(node, context))
    if returns(node.body) or returns(node.orelse):
        raise NotFixable("it returns")
    if "merges" in options:  # a call of `for_each` does not end, nor does it return its row
        if node.orelse:
            raise NotFixable("it has an else block")
        exits = list(loop_exits(node.body))
        refuse_loop_exits([e for e in exits if isinstance(e, ast.Break)], context)
    refuse_effects([node.iter] if end is None else [node.iter, end.test], context)
    if node not in flow.before:
        raise NotFixable("it is never reached")
    given = targets(node.target)
    after = _read_later(node, context)
    if (read := given & after) and "merges" in options:
        raise NotFixable(f"{min(read)} is read after the loop")
    lift = Lift(node, [node.body], context, after=after, given=given, **options)
    # What only later rounds read may stay unbound: `c` of `if lstm: h, c = ...` for a GRU.
    _begun(lift, frozenset() if "merges" in options else after)
    return lift


def _read_later(node: ast.For | ast.While, context: Context) -> NameSet:
    """Return the names read after a round: by later ones, an else block and what follows."""
    flow = context.flow(function_around(node, context))
    later = flow.after[node] | flow.after[node.body[-1]]
    return later | flow.live_into(node.orelse, flow.after[node]) if node.orelse else later


def _call_edit(
    node: ast.For,
    lift: Lift,
    context: Context,
    function: str,
    *more: str,
    end: ast.If | None = None,
) -> Edit:
    """Return the edit that makes the body of a loop a function, and calls one of `ops` with it.

    If it `stops`, the function returns before the rest whether the loop ends: by its last
    statement, an `end`, or by others.
    """
    layout, expressions = Layout(node, context), Expressions(context)
    targets_read: list[str] = []
    if function != "for_each":
        later = targets(node.target) & _read_later(node, context)
        targets_read = sorted(later - set(lift.outputs))
    outputs = [*lift.outputs, *targets_read]
    state = as_tuple(outputs)
    going, ended = (f"return {as_tuple([one, *outputs])}" for one in ("False", "True"))
    result = going if "stops=True" in more else f"return {state}"
    exits = loop_exits([one for one in node.body if one is not end])
    layout.replaced = {one: ended if isinstance(one, ast.Break) else result for one in exits}
    is_name = isinstance(node.target, ast.Name) and node.target.id not in outputs
    row = ast.unparse(node.target) if is_name else context.module.fresh_name(node, "row")
    unpacked = None if is_name else layout.line(f"{ast.unparse(node.target)} = {row}", layout.inner)
    name = context.module.fresh_name(node, "loop_body")
    last = layout.line(result, layout.inner)
    if end is not None:
        layout.dropped.add(end)
        with expressions.moving(end.test):
            test = expressions.truth(end.test)
        last = layout.line("return (", layout.inner) + test + f", {', '.join(outputs)})"
    parameters = [row, *outputs]
    made = layout.function(name, parameters, unpacked, layout.body().at(layout.inner), last)
    results = list(outputs)
    after: list[Passage] = []
    if node.orelse:
        results.append(context.module.fresh_name(node, "ended"))
        more = (*more, "tells=True")
        test = layout.line(f"if not {results[-1]}:")
        layout.replaced = {}  # those are in the body
        block = layout.orelse(nested=False).at(layout.inner)
        after = [test, *([] if block is None else [block])]
    bound = f"{as_tuple(results)} = " if results else ""
    # A range without numbers leaves the loop's own name as it was.
    own = dict.fromkeys(targets_read, "None")
    begun = [n if n in lift.bound_before else own.get(n) or _if_bound(n, lift) for n in outputs]
    is_apart = function == "for_items"
    over = _items(node.iter, expressions) if is_apart else _range(node.iter, expressions)
    arguments = [over, name, as_tuple(begun) if begun else state, *more]
    call = layout.call(bound, f"{OPS}.{function}", arguments)
    return layout.edit([made, call, *after], expressions, gap=True)


# Methods of tensors that give views of all their parts.
_PARTS = {"unbind", "split", "chunk"}


def _is_paired(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="enumerate" | "zip")):
            return True
        case _:
            return False


def _range(node: ast.expr, expressions: Expressions) -> Passage:
    """Return the range of a loop, whose end may be a size that depends on data."""
    match node:
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if not all(
            isinstance(one, ast.Constant | ast.Starred) for one in args
        ):
            return _apart(node, expressions.copy, expressions)
        case _:
            return expressions.copy(node)


def _items(node: ast.expr, expressions: Expressions) -> Passage:
    """Return what a loop goes over, with calls that give parts of tensors left to the loop."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in _PARTS:
            inner = expressions.copy
        case ast.Call() if _is_paired(node):
            inner = partial(_items, expressions=expressions)
        case _:
            return expressions.copy(node)
    return _apart(node, inner, expressions)


def _apart(
    node: ast.Call, inner: Callable[[ast.expr], Passage], expressions: Expressions
) -> Passage:
    """Return a call that is left to the loop: `tpuport.ops.Items(function, ...)`."""
    is_spread = None in {one.arg for one in node.keywords}
    if is_spread or any(isinstance(one, ast.Starred) for one in node.args):
        return expressions.copy(node)
    made = Passage.of(f"{OPS}.Items(", expressions.module.origin(node))
    made = made + expressions.copy(node.func)
    for one in node.args:
        made = made + ", " + inner(one)
    for one in node.keywords:
        made = made + f", {one.arg}=" + expressions.copy(one.value)
    return made + ")"
