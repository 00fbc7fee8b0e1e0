"""Names that a piece of code binds and reads in the scope that it runs in."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpuport.source.syntax.module import FUNCTIONS, Function, own_bindings

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Names:
    """Names met in one scope, in the order met.

    Attributes:
        bound: Names that are bound, deleted names and walrus targets included.
        read: Names that are read, those that nested functions read from here included.
        captured: Names that code which may run later (nested functions, lambdas, generator
            expressions) reads or rebinds.
        deleted: Names that `del` or the end of an `except ... as name` unbinds.
        declared: Names declared `global` or `nonlocal`.
    """

    bound: dict[str, None] = field(default_factory=dict[str, None])
    read: set[str] = field(default_factory=set[str])
    captured: set[str] = field(default_factory=set[str])
    deleted: set[str] = field(default_factory=set[str])
    declared: set[str] = field(default_factory=set[str])


class _Collector(ast.NodeVisitor):
    def __init__(self, ignored: frozenset[ast.AST]) -> None:
        self.names = Names()
        self.ignored = ignored

    def generic_visit(self, node: ast.AST) -> None:
        for name in own_bindings(node):
            self.names.bound[name] = None
        super().generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.read.add(node.id)
            return
        self.names.bound[node.id] = None
        if isinstance(node.ctx, ast.Del):
            self.names.read.add(node.id)
            self.names.deleted.add(node.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.names.read.add(node.target.id)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # `x: int` alone binds nothing, and a local's annotation is never evaluated.
        if node.value is not None:
            self.visit(node.target)
            self.visit(node.value)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self.names.deleted.add(node.name)
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.names.bound[(node.asname or node.name).partition(".")[0]] = None

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.names.declared.update(node.names)

    visit_Nonlocal = visit_Global

    # Scopes within the scope.

    def _visit_function(self, node: Function | ast.Lambda) -> None:
        arguments = node.args
        outside: list[ast.expr | None] = [*arguments.defaults, *arguments.kw_defaults]
        if isinstance(node, FUNCTIONS):
            self.names.bound[node.name] = None
            annotations = [argument.annotation for argument in all_arguments(arguments)]
            outside += [*node.decorator_list, node.returns, *annotations]
        for expression in outside:
            if expression is not None:
                self.visit(expression)
        free = free_names(node)
        self.names.read |= free
        if node not in self.ignored:
            self.names.captured |= free

    visit_FunctionDef = _visit_function
    visit_AsyncFunctionDef = _visit_function
    visit_Lambda = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.bound[node.name] = None
        for expression in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
            self.visit(expression)
        # The class body runs at once, and what it binds stays inside it; its methods run later.
        inside = collect(node.body, ignored=self.ignored)
        self.names.read |= inside.read
        self.names.captured |= inside.captured

    def _visit_comprehension(self, node: ast.AST) -> None:
        assert isinstance(node, COMPREHENSIONS)
        inside = _Collector(self.ignored)
        targets = _Collector(self.ignored)
        first = node.generators[0].iter  # it runs outside, before anything else
        for generator in node.generators:
            targets.visit(generator.target)
            if generator.iter is not first:
                inside.visit(generator.iter)
            for test in generator.ifs:
                inside.visit(test)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for element in elements:
            inside.visit(element)
        read = inside.names.read - set(targets.names.bound)
        self.visit(first)
        self.names.read |= read
        self.names.bound |= inside.names.bound  # only walrus targets reach the scope outside
        self.names.captured |= inside.names.captured
        if isinstance(node, ast.GeneratorExp) and node not in self.ignored:
            self.names.captured |= read

    visit_ListComp = _visit_comprehension
    visit_SetComp = _visit_comprehension
    visit_DictComp = _visit_comprehension
    visit_GeneratorExp = _visit_comprehension


def collect(
    code: ast.AST | Iterable[ast.AST], *, ignored: frozenset[ast.AST] = frozenset()
) -> Names:
    """Collect the names that code binds and reads in its own scope.

    Args:
        code: Statements or expressions of one scope.
        ignored: Nested functions and generator expressions known to run at once, so that what they
            read does not count as captured.
    """
    collector = _Collector(ignored)
    for node in [code] if isinstance(code, ast.AST) else code:
        collector.visit(node)
    return collector.names


def all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters, positional ones first and `*args` and `**kwargs` last."""
    star = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *star]


def local_names(function: Function | ast.Lambda) -> set[str]:
    """Return the parameters and local variables of a function."""
    return _local(function, collect(_body(function)))


def free_names(function: Function | ast.Lambda) -> set[str]:
    """Return the names that a function takes from the scopes around it, globals included."""
    inside = collect(_body(function))
    return (inside.read | inside.declared | inside.captured) - _local(function, inside)


def _body(function: Function | ast.Lambda) -> Sequence[ast.AST]:
    return [function.body] if isinstance(function, ast.Lambda) else function.body


def _local(function: Function | ast.Lambda, inside: Names) -> set[str]:
    parameters = {argument.arg for argument in all_arguments(function.args)}
    return parameters | (set(inside.bound) - inside.declared)
