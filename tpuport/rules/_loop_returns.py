"""Loops that return, as loops that end by `break` and return after it."""

import ast

from tpuport.rules._expressions import function_around
from tpuport.source.rewrite.finding import NotFixable
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.names import collect
from tpuport.source.syntax.statements import loop_exits, walk_scope
from tpuport.source.syntax.text import Edit, Passage


def return_after(node: ast.While | ast.For, context: Context) -> Edit:
    """Return the edit that makes each `return` of a loop's body a `break`, and returns after it.

    A variable says which of them ended the loop. What they return is computed after it, where
    nothing has changed since. A `break` leaves out an `else` block, as a `return` does.

    Raises:
        NotFixable: a `return` is in a block that runs more code when it is left, or in another
            loop inside this one.
    """
    module, flow = context.module, context.flow(function_around(node, context))
    found = [one for one in walk_scope(node.body) if isinstance(one, ast.Return)]
    found.sort(key=lambda one: (one.lineno, one.col_offset))
    for one in found:
        _refuse_around(one, node, context)
    left = module.fresh_name(node, "left")
    indent = module.text.indentation(node.lineno)

    def line(text: str, at: ast.AST) -> Passage:
        return Passage.of(indent + text, module.origin(at))

    inside, after, names = list[Edit](), list[Passage](), dict[str, None]()
    for number, one in enumerate(found, 1):
        made = Passage.of(f"{left} = {number}; break", module.origin(one))
        inside.append(Edit(*module.span(one), made))
        value = line("return", one)
        if one.value is not None:
            text = module.copy_node(one.value)
            value = value + (" (" if len(text.lines) > 1 else " ") + text
            value = value + (")" if len(text.lines) > 1 else "")
            names |= dict.fromkeys(_read(one.value))
        if _ends_otherwise(node) or number < len(found):
            after += [line(f"if {left} == {number}:", one), value.indented(module.indent)]
        else:
            after.append(value)
    # Only the `return` reads these, so where there is none they may be anything.
    live = flow.after[node] | flow.live_into([node], flow.after[node])
    free = names.keys() & flow.locals - flow.before[node] - live
    before = [line(f"{name} = None", node) for name in sorted(free)]
    begin, end = module.text.line_start(node.lineno), module.text.line_end(_last_line(node))
    loop = module.copy(begin, end, inside)
    return Edit(begin, end, Passage.stack([*before, line(f"{left} = 0", node), loop, *after]))


def _ends_otherwise(node: ast.While | ast.For) -> bool:
    """Return whether a loop may end by something else than a `return`."""
    test = node.test if isinstance(node, ast.While) else None
    is_endless = isinstance(test, ast.Constant) and bool(test.value)
    return not is_endless or any(isinstance(one, ast.Break) for one in loop_exits(node.body))


def _read(value: ast.expr) -> list[str]:
    names = (one for one in ast.walk(value) if isinstance(one, ast.Name))
    return [one.id for one in names if isinstance(one.ctx, ast.Load)]


def _last_line(node: ast.While | ast.For) -> int:
    return node.end_lineno or node.lineno


def _refuse_around(one: ast.Return, loop: ast.stmt, context: Context) -> None:
    """Refuse a `return` that cannot become a `break` of a loop."""
    if one not in context.flow(function_around(one, context)).before:
        raise NotFixable("it returns where it never comes to")
    if one.value is not None and collect([one.value]).bound:
        raise NotFixable("it returns an expression that binds a name")
    for around in context.module.ancestors(one):
        if around is loop:
            return
        if isinstance(around, ast.While | ast.For | ast.AsyncFor):
            raise NotFixable("it returns out of a loop inside it")
        is_with = isinstance(around, ast.With | ast.AsyncWith)
        if isinstance(around, ast.Try | ast.TryStar) or is_with:
            raise NotFixable("it returns inside a `try` or `with`")
