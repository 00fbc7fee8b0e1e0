"""Abstract values of the calls in one function."""

import ast

from tpuport.source.inference import torch_library
from tpuport.source.inference.classes import ClassInfo
from tpuport.source.inference.expressions import Evaluator
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
    item_of,
    join,
    sequence_of,
)
from tpuport.source.syntax.imported import qualified_name
from tpuport.source.syntax.module import Function
from tpuport.source.syntax.statements import is_ops_call

OPS_OF_HOST = frozenset({"check", "grows", "passes", "report"})
# `tpuport.ops` helpers that return numbers of Python where nothing is traced.
_OPS_OF_NUMBERS = frozenset({"item", "to_bool", "to_float", "to_int", "to_list"})


class Caller(Evaluator):
    """Evaluates calls: of the file's own functions by walking them, of others by what is known."""

    def call(self, node: ast.Call) -> Value:
        """Return the abstract value of a call's result."""
        receiver = UNKNOWN
        if isinstance(node.func, ast.Attribute):
            receiver = self.expression(node.func.value)
        arguments = [self.expression(argument) for argument in node.args]
        keywords = {k.arg: self.expression(k.value) for k in node.keywords}
        if is_ops_call(node):
            return self._ops_call(node)
        call = torch_library.LibraryCall(node, receiver, arguments, keywords, step=self.step)
        # `tpuport.ops.rowwise(f)(x)` returns what `f(x)` returns.
        wrapped = node.func.args[:1] if is_ops_call(node.func) else []
        name = qualified_name(
            wrapped[0] if wrapped else node.func, self.imports, hidden=self.environment
        )
        if name is not None:
            return torch_library.library_call(name, call)
        match node.func:
            case ast.Attribute():
                return self._method_call(node.func, call)
            case ast.Name(id=function) if function not in self.environment:
                return self._named_call(node.func, call)
            case ast.Name():
                return self._called(self.expression(node.func), call)
            case _:
                return torch_library.module_call(self.expression(node.func), call)

    def _named_call(self, function: ast.Name, call: torch_library.LibraryCall) -> Value:
        value = self._name(function)
        if value is not UNKNOWN:
            return self._called(value, call)
        return torch_library.builtin_call(function.id, call)

    def _called(self, value: Value, call: torch_library.LibraryCall) -> Value:
        """Return the abstract value of the result of calling a value."""
        if value.form is Form.FUNCTION and value.function is not None:
            return self._own_call(value.function, value.owner, call, bound=value.owner is not None)
        if value.form is Form.CLASS and value.owner is not None:
            return Value(Kind.UNKNOWN, Form.INSTANCE, owner=value.owner)
        if value.form is Form.INSTANCE and value.owner is not None:
            return self._instance_call(value.owner, call)
        if isinstance(call.node.func, ast.Name) and call.node.func.id in self.results:
            return join(self.results[call.node.func.id])
        return torch_library.module_call(value, call)

    def _instance_call(self, owner: ClassInfo, call: torch_library.LibraryCall) -> Value:
        method = owner.method("__call__") or owner.method("forward")
        if method is None:
            return torch_library.module_call(MODULE if owner.is_module else UNKNOWN, call)
        result = self._own_call(method, owner, call, bound=True)
        if result is UNKNOWN and owner.is_module:
            return torch_library.module_call(MODULE, call)
        return result

    def _method_call(self, function: ast.Attribute, call: torch_library.LibraryCall) -> Value:
        receiver, name = call.receiver, function.attr
        if receiver.form is Form.SEQUENCE and isinstance(function.value, ast.Name):
            self._grow(function.value.id, name, call)
        if receiver.form is Form.INSTANCE and receiver.owner is not None:
            return self._call_on_instance(receiver.owner, name, call)
        if receiver.form is Form.CLASS and receiver.owner is not None:
            method = receiver.owner.method(name)
            if method is not None:
                return self._own_call(method, receiver.owner, call, bound=True)
            return UNKNOWN
        return torch_library.method_call(name, call)

    def _grow(self, name: str, method: str, call: torch_library.LibraryCall) -> None:
        """Record what a list method, called on the list bound to `name`, added to it."""
        if method in ("append", "extend", "insert") and call.arguments:
            given = call.arguments[-1]
            more = given if method == "extend" else sequence_of(given)
            if more.form is Form.SEQUENCE:
                item = join(item_of(value) for value in (call.receiver, more) if value.items != ())
                self.environment[name] = sequence_of(item)

    def _call_on_instance(
        self, owner: ClassInfo, name: str, call: torch_library.LibraryCall
    ) -> Value:
        method = owner.method(name)
        if method is not None:
            return self._own_call(method, owner, call, bound=True)
        if name == "register_buffer" and call.node.args:
            self._register(owner, call)
            return NONE
        attribute = self.inference.attribute(owner, name)
        if attribute is not None and attribute is not NONE:
            return self._called_attribute(attribute, call)
        return torch_library.module_method_call(name, call)

    def _called_attribute(self, attribute: Value, call: torch_library.LibraryCall) -> Value:
        if attribute.form in (Form.FUNCTION, Form.CLASS, Form.INSTANCE):
            return self._called(attribute, call)
        return torch_library.module_call(attribute, call)

    def _register(self, owner: ClassInfo, call: torch_library.LibraryCall) -> None:
        name = call.node.args[0]
        value = call.argument(1, "tensor")
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            is_none = value is None or value is NONE
            mask = value is not None and value.form is Form.MASK
            made = NONE if is_none else MASK if mask else TRACED
            self.inference.set_attribute(owner, name.value, made)

    def _own_call(
        self,
        function: Function,
        owner: ClassInfo | None,
        call: torch_library.LibraryCall,
        *,
        bound: bool,
    ) -> Value:
        """Bind a call's arguments to a function of this file and return the call's result."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        if bound and owner is not None and not torch_library.is_static(function):
            parameters = parameters[1:]
        passed: dict[str, Value] = {}
        if not any(isinstance(argument, ast.Starred) for argument in call.node.args):
            for parameter, value in zip(parameters, call.arguments, strict=False):
                passed[parameter.arg] = value
        passed.update({name: value for name, value in call.keywords.items() if name is not None})
        return self.inference.call(function, owner, passed)

    def _ops_call(self, node: ast.Call) -> Value:
        """Return what a `tpuport.ops` helper returns: traced if any value it depends on is."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in OPS_OF_HOST:
            return HOST
        values = [UNKNOWN]
        for argument in node.args:
            match argument:
                case ast.Lambda():
                    values.append(self.values.get(argument.body, UNKNOWN))
                case ast.Name(id=name) if name in self.results:
                    values += self.results[name]
                case _:
                    values.append(self.values.get(argument, UNKNOWN))
        found = combine(values)
        return TRACED_NUMBER if name in _OPS_OF_NUMBERS and found.kind is Kind.TRACED else found
