"""Walk over the statements of one function that tracks the abstract values of its names."""

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tpuport.source.inference.calls import Caller
from tpuport.source.inference.classes import ClassInfo
from tpuport.source.inference.expressions import FileValues
from tpuport.source.inference.parameters import annotated
from tpuport.source.inference.values import (
    NONE,
    TRACED,
    UNKNOWN,
    Form,
    Kind,
    Value,
    combine,
    contains_traced,
    item_of,
    join,
)
from tpuport.source.syntax.module import Function
from tpuport.source.syntax.names import all_arguments

Environment = dict[str, Value]
NUMBER_NAME = re.compile(r"(^|_)(h|w|height|width|len|length|size|shape|count|num|dim)$|^(num|n)_")
HELPER = re.compile(r"(if_true|if_false|loop_test|loop_body)(_\d+)?")


def is_helper(function: Function) -> bool:
    """Return whether a rule made a nested function; its parameters are the variables around it."""
    return HELPER.fullmatch(function.name) is not None


def meet(environments: Sequence[Environment]) -> Environment:
    """Join environments where paths meet; a name that one path lacks keeps the other's value."""
    first, *others = environments
    met = dict(first)
    for environment in others:
        for name, value in environment.items():
            known = met.get(name)
            if known is not value:
                met[name] = value if known is None else join([known, value])
    return met


class Walker(Caller):
    """One walk through a function.

    Args:
        inference: The inference of the file.
        owner: The class whose method is walked, if it is one.
        step: Whether the function is part of a step.
    """

    def __init__(self, inference: FileValues, owner: ClassInfo | None, *, step: bool) -> None:
        super().__init__(inference, owner, step=step)
        self.returned: list[Value] = []
        self.evidence: dict[str, set[str]] = {}

    def run(self, function: Function, parameters: Environment) -> Value:
        """Walk a function and return the join of the values that it returns."""
        self.environment = dict(parameters)
        self.evidence = self.inference.roles.used(function)
        self.block(function.body)
        return join(self.returned) if self.returned else NONE

    def nested(self, function: Function) -> None:
        """Walk a nested function where it is defined, in the environment at that place."""
        around, returned = self.environment, self.returned
        self.environment, self.returned = dict(around), []
        for argument in all_arguments(function.args):
            same = around.get(argument.arg, UNKNOWN) if is_helper(function) else UNKNOWN
            value = annotated(argument.annotation)
            if value is None and not is_helper(function):
                value = self.by_evidence(argument.arg, UNKNOWN)
            self.environment[argument.arg] = same if value in (None, UNKNOWN, NONE) else value  # pyright: ignore[reportArgumentType]
        self.block(function.body)
        self.results[function.name] = self.returned
        self.environment, self.returned = around, returned
        around[function.name] = UNKNOWN

    # Statements.

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Walk statements in order."""
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        """Walk one statement."""
        method = self._STATEMENTS.get(type(node), Walker.parts)
        method(self, node)

    def parts(self, node: ast.AST) -> None:
        """Walk everything below a node that has no handler of its own, in the order written."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                if isinstance(getattr(child, "ctx", None), ast.Store):
                    self.bind(child, UNKNOWN)
                else:
                    self.expression(child)
            else:
                self.parts(child)

    def _assign(self, node: ast.Assign) -> None:
        value = self.expression(node.value)
        for target in node.targets:
            self.bind(target, value)

    def _annotated_assign(self, node: ast.AnnAssign) -> None:
        value = self.expression(node.value) if node.value is not None else UNKNOWN
        if value is UNKNOWN or value is NONE:
            value = annotated(node.annotation) or value
        if node.value is not None:
            self.bind(node.target, value)

    def _augmented_assign(self, node: ast.AugAssign) -> None:
        value = combine([self.expression(node.target), self.expression(node.value)])
        if isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
            value = self.mask_if(self.values[node.target], value)
        self.bind(node.target, value)

    def _return(self, node: ast.Return) -> None:
        self.returned.append(NONE if node.value is None else self.expression(node.value))

    def _expression_statement(self, node: ast.Expr) -> None:
        self.expression(node.value)

    def _branches(self, node: ast.If | ast.Try | ast.TryStar | ast.Match) -> None:
        head = node.test if isinstance(node, ast.If) else getattr(node, "subject", None)
        if head is not None:
            self.expression(head)
        before, ends = dict(self.environment), list[Environment]()
        if isinstance(node, ast.Match):
            alternatives: list[Sequence[ast.AST]] = [*([case] for case in node.cases), []]
        elif isinstance(node, ast.If):
            alternatives = [node.body, node.orelse]
        else:
            alternatives = [[*node.body, *node.orelse], *([h] for h in node.handlers)]
        for index, alternative in enumerate(alternatives):
            self.environment = dict(before)
            if isinstance(node, ast.If):
                self.learn(node.test, holds=index == 0)
            for part in alternative:
                if isinstance(part, ast.stmt):
                    self.statement(part)
                else:
                    self.parts(part)
            # If every path leaves, code after the statement is dead: any environment will do.
            if not self._leaves(alternative) or (alternative is alternatives[-1] and not ends):
                ends.append(self.environment)
        self.environment = meet(ends)
        if isinstance(node, ast.Try | ast.TryStar):
            self.block(node.finalbody)

    @staticmethod
    def _leaves(alternative: Sequence[ast.AST]) -> bool:
        last = alternative[-1] if alternative else None
        return isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        # The second round sees what the first one left in the names that the loop carries.
        for _ in range(2):
            before = dict(self.environment)
            if isinstance(node, ast.While):
                self.expression(node.test)
            else:
                self.bind(node.target, item_of(self.expression(node.iter)))
            self.block(node.body)
            self.environment = meet([before, self.environment])
            if self.environment == before:
                break
        self.block(node.orelse)

    def _nested_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.environment[node.name] = UNKNOWN
        self.nested(node)

    def _nested_class(self, node: ast.ClassDef) -> None:
        self.environment[node.name] = UNKNOWN
        saved = dict(self.environment)
        self.block(node.body)
        self.environment = saved

    # Names.

    def bind(self, target: ast.expr, value: Value) -> None:
        """Bind a value to an assignment target."""
        match target:
            case ast.Name(id=name):
                self.environment[name] = self.by_evidence(name, value)
                self.values[target] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                self._unpack(parts, value)
            case ast.Starred(value=inner):
                self.bind(inner, UNKNOWN)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                self.parts(target)
                holder = self.environment.get(name, UNKNOWN)
                if holder.form is Form.INSTANCE and holder.owner is not None:
                    self.inference.set_attribute(holder.owner, attribute, value)
            case ast.Subscript(value=ast.Name(id=name)):
                self.parts(target)
                # A host tensor that a traced value is written into becomes part of the program.
                known = self.environment.get(name, UNKNOWN)
                if contains_traced(value) and known.is_tensor and known.kind is Kind.HOST:
                    self.environment[name] = TRACED
            case _:
                self.parts(target)

    def _unpack(self, parts: list[ast.expr], value: Value) -> None:
        starred = any(isinstance(part, ast.Starred) for part in parts)
        same = value.items is not None and len(value.items) == len(parts) and not starred
        for index, part in enumerate(parts):
            item = item_of(value, index if same else None)
            # A module may return a tensor and numbers: `x, height, width = self.embed(x)`.
            if value.kind is Kind.TRACED and NUMBER_NAME.search(getattr(part, "id", "")):
                item = UNKNOWN
            self.bind(part, item)

    def by_evidence(self, name: str, value: Value) -> Value:
        """Return the value, or TRACED if it is unknown and the name is used like a tensor."""
        if value is UNKNOWN and self.step and self.looks_like_a_tensor(self.evidence.get(name, ())):
            return TRACED
        return value

    _STATEMENTS: ClassVar[dict[type[ast.stmt], Callable[[Any, Any], None]]] = {
        ast.Assign: _assign,
        ast.AnnAssign: _annotated_assign,
        ast.AugAssign: _augmented_assign,
        ast.Return: _return,
        ast.Expr: _expression_statement,
        ast.If: _branches,
        ast.Try: _branches,
        ast.TryStar: _branches,
        ast.Match: _branches,
        ast.For: _loop,
        ast.AsyncFor: _loop,
        ast.While: _loop,
        ast.FunctionDef: _nested_function,
        ast.AsyncFunctionDef: _nested_function,
        ast.ClassDef: _nested_class,
    }
