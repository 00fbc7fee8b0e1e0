"""Abstract values of the expressions in one function."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

from tpuport.source.inference.classes import ClassInfo
from tpuport.source.inference.kinds import structural_kind
from tpuport.source.inference.narrowing import no_tensors
from tpuport.source.inference.roles import Roles
from tpuport.source.inference.torch_facts import (
    HOST_ATTRIBUTES,
    MASK_KEEPERS,
    OUTPUT_SEQUENCES,
    SURELY_TENSOR_METHODS,
)
from tpuport.source.inference.values import (
    HOST,
    MASK,
    MODULE,
    NONE,
    TRACED,
    TRACED_NUMBER,
    UNKNOWN,
    Form,
    Kind,
    Value,
    combine,
    contains_traced,
    item_of,
    join,
    sequence,
    sequence_of,
)
from tpuport.source.syntax.module import Function, Module
from tpuport.source.syntax.names import all_arguments

_IDENTITY = (ast.Is, ast.IsNot, ast.In, ast.NotIn)


class FileValues(Protocol):
    """The part of `Inference` that evaluating one function uses: what is known of its file."""

    module: Module
    roles: Roles
    values: dict[ast.AST, Value]

    def call(self, function: Function, owner: ClassInfo | None, passed: dict[str, Value]) -> Value:
        """Return what a call of a function of this file returns."""
        ...

    def attribute(self, owner: ClassInfo, name: str) -> Value | None:
        """Return what `self.name` is, if that is known."""
        ...

    def set_attribute(self, owner: ClassInfo, name: str, value: Value) -> None:
        """Note that `self.name` is assigned."""
        ...


class Evaluator(ABC):
    """Evaluates the expressions of a function in the environment that its walker keeps."""

    def __init__(self, inference: FileValues, owner: ClassInfo | None, *, step: bool) -> None:
        self.inference = inference
        self.owner = owner
        self.step = step
        self.imports = inference.module.imports
        # Nobody asks for the values of code outside steps, so they are thrown away.
        self.values: dict[ast.AST, Value] = inference.values if step else {}
        self.environment: dict[str, Value] = {}
        self.results: dict[str, list[Value]] = {}

    def expression(self, node: ast.expr) -> Value:
        """Evaluate an expression to an abstract value."""
        method: Callable[[Any, Any], Value] = self._EXPRESSIONS.get(
            type(node), Evaluator._operation
        )
        value = method(self, node)
        known = self.values.get(node)
        # A second round of a loop or another caller evaluates a node again: once traced, always
        # traced.
        if known is None or known.kind is not Kind.TRACED or value.kind is Kind.TRACED:
            self.values[node] = value
        return value

    def looks_like_a_tensor(self, used: Iterable[str]) -> bool:
        """Return whether the attributes used of an unknown value in a step prove it a tensor."""
        return not SURELY_TENSOR_METHODS.isdisjoint(used)

    def mask_if(self, operand: Value, value: Value) -> Value:
        """Return `value`, as a mask if it is traced and the operand is a mask."""
        return MASK if operand.form is Form.MASK and value.kind is Kind.TRACED else value

    # Leaves.

    def _constant(self, node: ast.Constant) -> Value:
        return NONE if node.value is None else HOST

    def _name(self, node: ast.Name) -> Value:
        known = self.environment.get(node.id)
        if known is not None:
            return known
        roles = self.inference.roles
        if node.id in roles.functions:
            return Value(Kind.UNKNOWN, Form.FUNCTION, function=roles.functions[node.id])
        if node.id in roles.classes:
            return Value(Kind.UNKNOWN, Form.CLASS, owner=roles.classes[node.id])
        return UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Value:
        value = self.expression(node.value)
        name = node.attr
        if name in HOST_ATTRIBUTES or name == "size":
            # A tensor's `size` is a method; read as an attribute it belongs to an image or array.
            return HOST
        if value.form is Form.INSTANCE and value.owner is not None:
            return self._attribute_of(value.owner, name)
        if value.form is Form.MODULE:
            return TRACED if name in ("weight", "bias") else UNKNOWN
        if value.form is Form.MASK:
            return MASK if name in MASK_KEEPERS else TRACED
        if value.form in (Form.NONE, Form.SEQUENCE, Form.MAPPING):
            return UNKNOWN
        if name in OUTPUT_SEQUENCES:
            return UNKNOWN
        if value.kind is Kind.UNKNOWN and (name == "config" or name.endswith("_config")):
            return HOST
        return value if value.form is not Form.CLASS else UNKNOWN

    def _attribute_of(self, owner: ClassInfo, name: str) -> Value:
        """Return the abstract value of an attribute of an instance."""
        known = self.inference.attribute(owner, name)
        if known is not None and known is not NONE:
            return known
        if name in ("config", "cfg", "args", "hparams") or name.endswith(("_config", "_cfg")):
            return HOST
        method = owner.method(name)
        if method is not None:
            return Value(Kind.UNKNOWN, Form.FUNCTION, owner=owner, function=method)
        return NONE if known is NONE else UNKNOWN

    # Operations.

    def _operation(self, node: ast.expr) -> Value:
        """Evaluate an expression without a handler of its own by combining its parts."""
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        values = [self.expression(child) for child in children]
        return combine(values) if values else UNKNOWN

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.expression(node.left), self.expression(node.right)
        if Form.SEQUENCE in (left.form, right.form):
            return self._of_sequences(node, left, right)
        value = combine([left, right])
        if isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
            return self.mask_if(left if left.form is Form.MASK else right, value)
        if isinstance(node.op, ast.MatMult):
            return TRACED if value is UNKNOWN and self.step else value
        if value is TRACED and not left.is_tensor and not right.is_tensor:
            return TRACED_NUMBER
        return value

    def _of_sequences(self, node: ast.BinOp, left: Value, right: Value) -> Value:
        if isinstance(node.op, ast.Add) and left.items is not None and right.items is not None:
            return sequence([*left.items, *right.items])
        return sequence_of(join(item_of(v) for v in (left, right) if v.form is Form.SEQUENCE))

    def _unary(self, node: ast.UnaryOp) -> Value:
        operand = self.expression(node.operand)
        if isinstance(node.op, ast.Invert):
            return operand
        value = combine([operand])
        if isinstance(node.op, ast.Not):
            # `not` returns a Python bool or raises. For a container it only asks for the length.
            return TRACED_NUMBER if operand.kind is Kind.TRACED else self._host_or_unknown(operand)
        return value

    @staticmethod
    def _host_or_unknown(value: Value) -> Value:
        return HOST if value.kind is Kind.HOST else UNKNOWN

    def _boolean(self, node: ast.BoolOp) -> Value:
        values = [self.expression(value) for value in node.values]
        if any(value.kind is Kind.TRACED for value in values):
            return next(value for value in reversed(values) if value.kind is Kind.TRACED)
        return join(values)

    def _conditional(self, node: ast.IfExp) -> Value:
        self.expression(node.test)
        values: list[Value] = []
        for part, holds in ((node.body, True), (node.orelse, False)):
            saved = dict(self.environment)
            self.learn(node.test, holds=holds)
            values.append(self.expression(part))
            self.environment = saved
        return join(values)

    def learn(self, test: ast.expr, *, holds: bool) -> None:
        """Mark names as unknown where a test of their class shows that they are no tensors."""
        for name in no_tensors(test, holds=holds):
            if self.environment.get(name, UNKNOWN).is_tensor:
                self.environment[name] = UNKNOWN

    def _compare(self, node: ast.Compare) -> Value:
        parts = [node.left, *node.comparators]
        values = [self.expression(part) for part in parts]
        if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return HOST
        known = all(value.kind is Kind.HOST for value in values)
        if any(isinstance(op, _IDENTITY) for op in node.ops):
            return HOST if known else UNKNOWN
        # A value that is compared with text or None is no tensor, whatever its annotation says.
        if any(isinstance(p, ast.Constant) and isinstance(p.value, str | None) for p in parts):
            return HOST if known else UNKNOWN
        value = combine([v for v in values if v.form is not Form.SEQUENCE] or [UNKNOWN])
        if value.kind is not Kind.TRACED:
            return value
        return MASK if any(v.is_tensor for v in values) else TRACED_NUMBER

    def _subscript(self, node: ast.Subscript) -> Value:
        value = self.expression(node.value)
        index = self.expression(node.slice)
        if value.form is Form.SEQUENCE:
            match node.slice:
                case ast.Slice():
                    return value if value.items is None else sequence_of(item_of(value))
                case ast.Constant(value=int(number)):
                    return item_of(value, number)
                case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
                    return item_of(value, -number)
                case _:
                    return item_of(value)
        if value.form is Form.MAPPING:
            return value.item or UNKNOWN
        if value.form in (Form.MODULE, Form.INSTANCE):
            return MODULE
        if value.kind is Kind.TRACED:
            return value
        if value.is_tensor and contains_traced(index):
            return TRACED
        if value.kind is Kind.HOST and index.kind is Kind.HOST:
            return value
        return UNKNOWN

    def _slice(self, node: ast.Slice) -> Value:
        parts = [part for part in (node.lower, node.upper, node.step) if part is not None]
        return combine([self.expression(part) for part in parts]) if parts else HOST

    def _named(self, node: ast.NamedExpr) -> Value:
        value = self.expression(node.value)
        self.environment[node.target.id] = value
        return value

    # Displays and scopes.

    def _display(self, node: ast.Tuple | ast.List) -> Value:
        values = [self.expression(part) for part in node.elts]
        if any(isinstance(part, ast.Starred) for part in node.elts):
            return sequence_of(join(values))
        return sequence(values)

    def _starred(self, node: ast.Starred) -> Value:
        return item_of(self.expression(node.value))

    def _container(self, node: ast.expr) -> Value:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expression(child)
        kind = structural_kind(node)
        return HOST if kind is Kind.HOST else UNKNOWN

    def _text(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.values[part] = self.expression(part.value)
        return HOST

    def _lambda(self, node: ast.Lambda) -> Value:
        saved = dict(self.environment)
        for argument in all_arguments(node.args):
            self.environment[argument.arg] = UNKNOWN
        result = self.expression(node.body)
        self.values[node] = result
        self.environment = saved
        return UNKNOWN

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        saved = dict(self.environment)
        self._generators(node.generators)
        item = self.expression(node.elt)
        self.environment = saved
        return sequence_of(item)

    def _dict_comprehension(self, node: ast.DictComp) -> Value:
        saved = dict(self.environment)
        self._generators(node.generators)
        self.expression(node.key)
        self.expression(node.value)
        self.environment = saved
        return UNKNOWN

    def _generators(self, generators: Sequence[ast.comprehension]) -> None:
        for generator in generators:
            self.bind(generator.target, item_of(self.expression(generator.iter)))
            for test in generator.ifs:
                self.expression(test)

    @abstractmethod
    def bind(self, target: ast.expr, value: Value) -> None:
        """Bind a value to an assignment target."""

    @abstractmethod
    def call(self, node: ast.Call) -> Value:
        """Return the abstract value of a call's result."""

    def _call(self, node: ast.Call) -> Value:
        return self.call(node)

    _EXPRESSIONS: ClassVar[dict[type[ast.expr], Callable[[Any, Any], Value]]] = {
        ast.Constant: _constant,
        ast.Name: _name,
        ast.Attribute: _attribute,
        ast.BinOp: _binary,
        ast.UnaryOp: _unary,
        ast.BoolOp: _boolean,
        ast.IfExp: _conditional,
        ast.Compare: _compare,
        ast.Subscript: _subscript,
        ast.Slice: _slice,
        ast.NamedExpr: _named,
        ast.Tuple: _display,
        ast.List: _display,
        ast.Starred: _starred,
        ast.Dict: _container,
        ast.Set: _container,
        ast.Await: _container,
        ast.Yield: _container,
        ast.YieldFrom: _container,
        ast.JoinedStr: _text,
        ast.Lambda: _lambda,
        ast.ListComp: _comprehension,
        ast.SetComp: _comprehension,
        ast.GeneratorExp: _comprehension,
        ast.DictComp: _dict_comprehension,
        ast.Call: _call,
    }
