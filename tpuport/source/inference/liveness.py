"""Definite assignment and liveness of the names in a function, for each statement."""

import ast
from collections.abc import Iterable, Sequence
from functools import cached_property

from tpuport.source.syntax.module import FUNCTIONS, SCOPES, Function, own_bindings
from tpuport.source.syntax.names import all_arguments, collect, local_names
from tpuport.source.syntax.statements import is_ops_call, may_swallow, walk_scope

NameSet = frozenset[str]
NOTHING: NameSet = frozenset()

# These read or write local variables by name, or see the frame that they are called from.
FRAME_READERS = frozenset({"locals", "vars", "dir", "eval", "exec"})
# These exhaust a generator before they return, so it cannot read names later.
CONSUMERS = frozenset(
    {"all", "any", "dict", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple"}
)


class NameFlow:
    """The flow of names through one function.

    Attributes:
        before: For each statement the names that are certainly bound when it starts.
        after: For each statement the names whose value may be read once it has ended.
        on_error: For each statement the names whose value may be read if it raises.
        locals: The function's parameters and local variables.
        captured: Names that nested functions, lambdas and kept generator expressions use.
        reads_frame: The name of a call, such as `locals`, that sees local variables by name.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.before: dict[ast.stmt, NameSet] = {}
        self.after: dict[ast.stmt, NameSet] = {}
        self.on_error: dict[ast.stmt, NameSet] = {}
        self.immediate = _run_at_once(function)
        inside = collect(function.body, ignored=self.immediate)
        self.locals = local_names(function)
        self.captured = inside.captured & self.locals
        self.declared = frozenset(inside.declared)
        self.reads_frame = _frame_reader(function)
        # A deleted name may be unbound anywhere after: it never counts as bound.
        self._unsure = inside.deleted
        parameters = frozenset(a.arg for a in all_arguments(function.args)) - self._unsure
        self._bind(function.body, parameters)
        self._live(function.body, NOTHING, _Exits())

    @cached_property
    def closures(self) -> list[ast.AST]:
        """Return the nodes that open a nested scope here and may outlive their statement."""
        kinds = (*SCOPES, ast.GeneratorExp)
        return [node for node in walk_scope(self.function.body) if isinstance(node, kinds)]

    @cached_property
    def binders(self) -> dict[str, list[ast.AST]]:
        """Return the nodes of this scope that bind each name; parameters and imports have none."""
        found: dict[str, list[ast.AST]] = {name: [] for name in self.locals}
        for node in walk_scope(self.function.body):
            for name in own_bindings(node):
                found.setdefault(name, []).append(node)
        return found

    def names(self, code: ast.AST | Iterable[ast.AST]) -> "tuple[dict[str, None], set[str]]":
        """Return the names that code of this function binds (in order) and captures."""
        found = collect(code, ignored=self.immediate)
        return found.bound, found.captured

    def live_into(self, statements: Sequence[ast.stmt], after: NameSet) -> NameSet:
        """Return the names live on entry to statements, if `after` is live at their end."""
        saved = self.before, self.after, self.on_error
        self.before, self.after, self.on_error = {}, {}, {}
        try:
            return self._live(statements, after, _Exits())
        finally:
            self.before, self.after, self.on_error = saved

    # Forward pass: names that are certainly bound. None means "never reached".

    def _bind(self, statements: Sequence[ast.stmt], bound: NameSet) -> NameSet | None:
        for statement in statements:
            self.before[statement] = bound
            after = self._bind_statement(statement, bound)
            if after is None:
                return None
            bound = after
        return bound

    def _bind_statement(self, statement: ast.stmt, bound: NameSet) -> NameSet | None:
        match statement:
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return None
            case ast.If():
                bound |= self._kept(surely_bound(statement.test))
                return _meet(self._bind(statement.body, bound), self._bind(statement.orelse, bound))
            case ast.While():
                bound |= self._kept(surely_bound(statement.test))
                self._bind(statement.body, bound)
                self._bind(statement.orelse, bound)
                return bound
            case ast.For() | ast.AsyncFor():
                bound |= self._kept(surely_bound(statement.iter))
                self._bind(statement.body, bound | self._kept(targets(statement.target)))
                self._bind(statement.orelse, bound)
                return bound
            case ast.With() | ast.AsyncWith():
                for item in statement.items:
                    bound |= self._kept(surely_bound(item.context_expr))
                    if item.optional_vars is not None:
                        bound |= self._kept(targets(item.optional_vars))
                inside = self._bind(statement.body, bound)
                return _meet(inside, bound) if may_swallow(statement) else inside
            case ast.Try() | ast.TryStar():
                return self._bind_try(statement, bound)
            case ast.Match():
                ends = [self._bind(case.body, bound) for case in statement.cases]
                return _meet(bound, *ends)
            case _:
                return bound | self._kept(surely_bound(statement))

    def _bind_try(self, statement: ast.Try | ast.TryStar, bound: NameSet) -> NameSet | None:
        end = self._bind(statement.body, bound)
        if end is not None:
            end = self._bind(statement.orelse, end)
        ends = [end, *(self._bind(handler.body, bound) for handler in statement.handlers)]
        joined = _meet(*ends)
        last = self._bind(statement.finalbody, bound)
        if last is None or joined is None:
            return None
        return joined | last

    def _kept(self, names: NameSet) -> NameSet:
        return names - self._unsure

    # Backward pass: names that may still be read.

    def _live(self, statements: Sequence[ast.stmt], live: NameSet, exits: "_Exits") -> NameSet:
        for statement in reversed(statements):
            self.after[statement] = live
            self.on_error[statement] = exits.error
            # Any statement may raise, so the names that handlers read are live before each.
            live = self._live_statement(statement, live, exits) | exits.error
        return live

    def _live_statement(self, statement: ast.stmt, live: NameSet, exits: "_Exits") -> NameSet:
        match statement:
            case ast.If():
                branches = self._live(statement.body, live, exits)
                branches |= self._live(statement.orelse, live, exits)
                return reads(statement.test) | (branches - surely_bound(statement.test))
            case ast.While() | ast.For() | ast.AsyncFor():
                return self._live_loop(statement, live, exits)
            case ast.With() | ast.AsyncWith():
                inner = exits.raising(live) if may_swallow(statement) else exits
                live = self._live(statement.body, live, inner)
                for item in reversed(statement.items):
                    if item.optional_vars is not None:
                        live = (live - targets(item.optional_vars)) | reads(item.optional_vars)
                    live |= reads(item.context_expr)
                return live
            case ast.Try() | ast.TryStar():
                return self._live_try(statement, live, exits)
            case ast.Match():
                entered = [self._live(case.body, live, exits) for case in statement.cases]
                asked = [reads(case) for case in statement.cases]
                return live.union(reads(statement.subject), *entered, *asked)
            case _:
                live = exits.after(statement, live)
                return (live - surely_bound(statement)) | reads(statement)

    def _live_loop(
        self, statement: ast.While | ast.For | ast.AsyncFor, live: NameSet, exits: "_Exits"
    ) -> NameSet:
        ended = self._live(statement.orelse, live, exits)
        if isinstance(statement, ast.While):
            test, bound, once = reads(statement.test), NOTHING, NOTHING
        else:
            test, bound, once = NOTHING, targets(statement.target), reads(statement.iter)
            test = reads(statement.target)
        head = ended | test
        while True:
            inner = self._live(statement.body, head, exits.in_loop(live, head))
            again = head | (inner - bound)
            if again == head:
                return head | once
            head = again

    def _live_try(
        self, statement: ast.Try | ast.TryStar, live: NameSet, exits: "_Exits"
    ) -> NameSet:
        # `finally` also runs on the way out of the function and of loops.
        beyond = live | exits.error | exits.on_break | exits.on_continue
        last = self._live(statement.finalbody, beyond, exits) if statement.finalbody else live
        on_way_out = last if statement.finalbody else NOTHING
        outer = exits.leaving_through(on_way_out)
        handled = NOTHING
        for handler in statement.handlers:
            handled |= self._live(handler.body, last, outer) - {handler.name or ""}
            handled |= reads(handler.type) if handler.type is not None else NOTHING
        ended = self._live(statement.orelse, last, outer)
        return self._live(statement.body, ended, outer.raising(handled))


class _Exits:
    """The live names at each way that control leaves a block other than by its end."""

    def __init__(
        self,
        error: NameSet = NOTHING,
        on_break: NameSet = NOTHING,
        on_continue: NameSet = NOTHING,
    ) -> None:
        self.error, self.on_break, self.on_continue = error, on_break, on_continue

    def after(self, statement: ast.stmt, live: NameSet) -> NameSet:
        """Return the names live after a simple statement; `live` if it falls through."""
        match statement:
            case ast.Return() | ast.Raise():
                return self.error
            case ast.Break():
                return self.on_break
            case ast.Continue():
                return self.on_continue
            case _:
                return live

    def in_loop(self, on_break: NameSet, on_continue: NameSet) -> "_Exits":
        return _Exits(self.error, on_break, on_continue)

    def raising(self, names: NameSet) -> "_Exits":
        return _Exits(self.error | names, self.on_break, self.on_continue)

    def leaving_through(self, names: NameSet) -> "_Exits":
        return _Exits(self.error | names, self.on_break | names, self.on_continue | names)


def _meet(*ends: NameSet | None) -> NameSet | None:
    reached = [end for end in ends if end is not None]
    return reached[0].intersection(*reached[1:]) if reached else None


def reads(code: ast.AST) -> NameSet:
    """Return the names that code may read before it binds them itself."""
    found = frozenset(collect(code).read)
    walrus = [node for node in ast.walk(code) if isinstance(node, ast.NamedExpr)]
    if not walrus:
        return found
    sure = surely_bound(code)
    return found - {w.target.id for w in walrus if w.target.id in sure and _binds_first(w, code)}


def _binds_first(walrus: ast.NamedExpr, code: ast.AST) -> bool:
    """Return whether a walrus comes before every other use of its name."""
    end = (walrus.end_lineno or 0, walrus.end_col_offset or 0)
    return all(
        (node.lineno, node.col_offset) >= end
        for node in ast.walk(code)
        if isinstance(node, ast.Name) and node.id == walrus.target.id and node is not walrus.target
    )


def targets(target: ast.expr) -> NameSet:
    """Return the names that an assignment target binds."""
    return frozenset(
        node.id
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def surely_bound(code: ast.AST) -> NameSet:
    """Return the names that a simple statement or an expression certainly binds or deletes."""
    match code:
        case ast.Assign():
            assigned = frozenset[str]().union(*(targets(target) for target in code.targets))
            return assigned | surely_bound(code.value)
        case ast.AnnAssign() if code.value is not None:
            return targets(code.target) | surely_bound(code.value)
        case ast.AugAssign():
            return targets(code.target) | surely_bound(code.value)
        case ast.Import() | ast.ImportFrom():
            return frozenset((a.asname or a.name).partition(".")[0] for a in code.names) - {"*"}
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return frozenset({code.name})
        case ast.Delete():
            return frozenset(
                node.id for node in ast.walk(code) if isinstance(node, ast.Name) and _deleted(node)
            )
        case ast.Expr(value=value) | ast.Return(value=ast.expr() as value):
            return surely_bound(value)
        case ast.expr():
            return _walrus(code)
        case _:
            return NOTHING


def _deleted(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Del)


def _walrus(expression: ast.expr) -> NameSet:
    match expression:
        case ast.NamedExpr(target=target, value=value):
            return frozenset({target.id}) | _walrus(value)
        case ast.BoolOp(values=[first, *_]):
            return _walrus(first)
        case ast.IfExp(test=test):
            return _walrus(test)
        case ast.Compare(left=left, comparators=[first, *_]):
            return _walrus(left) | _walrus(first)
        case ast.UnaryOp(operand=operand):
            return _walrus(operand)
        case ast.BinOp(left=left, right=right):
            return _walrus(left) | _walrus(right)
        case ast.Call(func=function, args=arguments):
            return frozenset[str]().union(*(_walrus(part) for part in [function, *arguments]))
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
            return _walrus(value)
        case _:
            return NOTHING


def _frame_reader(function: Function) -> str | None:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in FRAME_READERS and (node.func.id != "dir" or not node.args):
                return node.func.id
    return None


def _run_at_once(function: Function) -> frozenset[ast.AST]:
    """Return nested functions, lambdas and generators that finish within their statement."""
    local = local_names(function)
    found: set[ast.AST] = set()
    handed: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and is_ops_call(node):
            handed.update(id(argument) for argument in node.args)
            found.update(a for a in node.args if isinstance(a, ast.Lambda))
        elif isinstance(node, ast.Call) and _consumes(node, local):
            found.update(a for a in node.args if isinstance(a, ast.GeneratorExp))
    uses: dict[str, list[ast.Name]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses.setdefault(node.id, []).append(node)
    for node in ast.walk(function):
        if isinstance(node, FUNCTIONS) and node is not function:
            if uses.get(node.name) and all(id(use) in handed for use in uses[node.name]):
                found.add(node)
    return frozenset(found)


def _consumes(call: ast.Call, local: set[str]) -> bool:
    match call:
        case ast.Call(func=ast.Name(id=name), args=[_]):
            return name in CONSUMERS and name not in local
        case _:
            return False
