"""Abstract values of a file's expressions, found by walking its steps from callers to callees."""

import ast
from dataclasses import dataclass, field

from tpuport.source.inference.classes import ClassInfo
from tpuport.source.inference.kinds import Kinds, structural_kind
from tpuport.source.inference.parameters import (
    TESTED,
    annotated,
    default_value,
    defaults,
    is_used_like_a_tensor,
    names_another_class,
)
from tpuport.source.inference.roles import Role, Roles
from tpuport.source.inference.statements import Walker
from tpuport.source.inference.torch_library import is_static
from tpuport.source.inference.values import (
    HOST,
    HOST_TENSOR,
    NONE,
    TRACED,
    UNKNOWN,
    Form,
    Kind,
    Value,
    contains_traced,
    join,
)
from tpuport.source.syntax.imported import dotted_name
from tpuport.source.syntax.module import Function, Module
from tpuport.source.syntax.names import all_arguments

# A function is walked again when a call passes it other abstract values. These limits end recursion
# and long chains of calls that keep learning.
MAX_WALKS = 3
MAX_DEPTH = 12


@dataclass(eq=False)
class FunctionState:
    """The facts about a function known so far.

    Attributes:
        parameters: The abstract values of its parameters in the last walk.
        result: The abstract value that it returns.
        walks: Number of walks so far.
        running: Whether it is being walked.
    """

    parameters: dict[str, Value] = field(default_factory=dict[str, Value])
    result: Value = UNKNOWN
    walks: int = 0
    running: bool = False


class Inference:
    """The values of a file's expressions.

    Only steps are walked. Elsewhere nothing is traced, so the form of an expression decides alone.

    Args:
        module: The file.
        roles: The roles of its functions: step, set-up or host.
    """

    def __init__(self, module: Module, roles: Roles | None = None) -> None:
        self.module = module
        self.roles = roles or Roles(module)
        self.values: dict[ast.AST, Value] = {}
        self._states: dict[Function, FunctionState] = {}
        self._with_attributes: set[ClassInfo] = set()
        self._depth = 0
        self._walked = False

    def kind(self, node: ast.expr) -> Kind:
        """Return the kind of an expression; outside steps its form decides alone."""
        value = self.value(node)
        return structural_kind(node) if value is None else value.kind

    def grows(self, loop: ast.stmt) -> bool:
        """Return False: only a trace finds such loops."""
        del loop
        return False

    def is_boolean(self, node: ast.expr) -> bool:
        """Return whether an expression is known to be a traced tensor of dtype bool."""
        value = self.value(node)
        return value is not None and value.kind is Kind.TRACED and value.form is Form.MASK

    def value(self, node: ast.expr) -> Value | None:
        """Return the abstract value of an expression of a step; None elsewhere."""
        if not self._walked:
            self._walked = True
            for function in self.roles.steps:
                self._walk_unless_called(function)
        return self.values.get(node)

    def _walk_unless_called(self, function: Function) -> None:
        if not self.state(function).walks:
            self.call(function, self.roles.owners.get(function), {})

    # Functions.

    def state(self, function: Function) -> FunctionState:
        """Return the facts about a function, which start out empty."""
        return self._states.setdefault(function, FunctionState())

    def call(self, function: Function, owner: ClassInfo | None, passed: dict[str, Value]) -> Value:
        """Return the result of a call of a function of this file, walking it for new arguments.

        Args:
            function: The function.
            owner: The class that it is a method of, if it is one.
            passed: The value passed for each parameter, by name.
        """
        state = self.state(function)
        parameters = self._parameters(function, owner, passed, state.parameters)
        known = state.walks and parameters == state.parameters
        if state.running:
            # Recursion: the result is that of the other paths. NONE adds nothing in a join.
            return state.result if state.walks > 1 else NONE
        if known or state.walks >= MAX_WALKS or self._depth >= MAX_DEPTH:
            return state.result
        state.parameters, state.running = parameters, True
        state.walks += 1
        self._depth += 1
        try:
            walker = Walker(self, owner, step=self.roles.of(function) is Role.STEP)
            state.result = walker.run(function, parameters)
        finally:
            state.running = False
            self._depth -= 1
        return state.result

    def _parameters(
        self,
        function: Function,
        owner: ClassInfo | None,
        passed: dict[str, Value],
        before: dict[str, Value],
    ) -> dict[str, Value]:
        found: dict[str, Value] = {}
        default = defaults(function)
        arguments = all_arguments(function.args)
        for number, argument in enumerate(arguments):
            name = argument.arg
            if number == 0 and owner is not None and not is_static(function):
                form = Form.CLASS if _is_class_method(function) else Form.INSTANCE
                found[name] = Value(Kind.UNKNOWN, form, owner=owner)
                continue
            value = self._parameter(function, argument, default.get(name))
            if name == "self":  # a method to be, which the file assigns to a class
                value = UNKNOWN
            if name in passed:
                value = _refined(value, passed[name])
            if name in before:
                value = join([before[name], value]) if before[name].kind is value.kind else value
            found[name] = value
        return found

    def _parameter(self, function: Function, argument: ast.arg, default: ast.expr | None) -> Value:
        """Infer a parameter from the function's own text: annotation, use and default."""
        arguments = function.args
        if argument is arguments.vararg:
            item = annotated(argument.annotation) or UNKNOWN
            return Value(Kind.UNKNOWN, Form.SEQUENCE, item=item)
        if argument is arguments.kwarg:
            return UNKNOWN
        is_step = self.roles.of(function) is Role.STEP
        value = annotated(argument.annotation)
        if value is None and is_step:
            value = self._record(argument.annotation)
        if value is None and self._is_used_like_a_tensor(function, argument):
            value = TRACED if is_step else HOST_TENSOR
        unknown = value is None or value is UNKNOWN
        if unknown and is_step and self._has_tensors_as_items(function, argument):
            return TRACED
        if value is None:
            value = default_value(default)
        if value is None and not is_step:
            return HOST
        if value is not None and not is_step and contains_traced(value):
            return HOST_TENSOR
        return UNKNOWN if value is None or value is NONE else value

    def _record(self, annotation: ast.expr | None) -> Value | None:
        """Return an instance, if an annotation names a class of this file that holds tensors."""
        if annotation is None:
            return None
        name = annotation.value if isinstance(annotation, ast.Constant) else dotted_name(annotation)
        owner = self.roles.classes.get(str(name))
        if owner is None or owner.is_module:
            return None
        for info in owner.lineage():
            self._learn_attributes(info)
            if any(contains_traced(value) for value in info.attributes.values()):
                return Value(Kind.UNKNOWN, Form.INSTANCE, owner=owner)
        return None

    def _is_used_like_a_tensor(self, function: Function, argument: ast.arg) -> bool:
        """Return whether the use of a parameter shows that it can only be a tensor."""
        used = self.roles.used(function).get(argument.arg, set[str]())
        other = TESTED in used or names_another_class(argument.annotation)
        return not other and is_used_like_a_tensor(used)

    def _has_tensors_as_items(self, function: Function, argument: ast.arg) -> bool:
        """Return whether the code calls `item()` on items of a parameter, which may be a list."""
        used = self.roles.used(function)
        tested = TESTED in used.get(argument.arg, ())
        return not tested and "item" in used.get(f"{argument.arg}[]", ())

    # Classes.

    def attribute(self, owner: ClassInfo, name: str) -> Value | None:
        """Return the abstract value of `self.name` in a class; None if nothing is known of it."""
        for info in owner.lineage():
            self._learn_attributes(info)
        return owner.attribute(name)

    def _learn_attributes(self, info: ClassInfo) -> None:
        if info in self._with_attributes:
            return
        self._with_attributes.add(info)
        for statement in info.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = annotated(statement.annotation)
                info.attributes[statement.target.id] = value or UNKNOWN
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        info.attributes[target.id] = HOST
        for name in ("__init__", "setup", "__post_init__", "_init_weights", "configure_model"):
            if name in info.methods:
                self.call(info.methods[name], info, {})

    def set_attribute(self, owner: ClassInfo, name: str, value: Value) -> None:
        """Join a value that code assigned to `self.name` with those assigned before."""
        known = owner.attributes.get(name)
        owner.attributes[name] = value if known is None else join([known, value])


def _refined(own: Value, passed: Value) -> Value:
    """Combine a parameter's value by its own text with the value that a call passes."""
    if own.kind is Kind.UNKNOWN and own.form is Form.ANY:
        return passed
    if passed.kind is Kind.TRACED and own.is_tensor:
        return passed
    return own


def _decorators(function: Function) -> set[str]:
    names = set[str]()
    for node in function.decorator_list:
        names.add(node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", ""))
    return names


def _is_class_method(function: Function) -> bool:
    return "classmethod" in _decorators(function)


class StaticKinds:
    """Kinds that can be proved by reading a file.

    In steps, tensor parameters, parameters and buffers of modules, and the results of torch and of
    modules on those are TRACED. Shapes, dtypes, lengths and tensors of Python numbers are HOST.

    Args:
        reached: Functions of the file that a step in another file calls, as
            `tpuport.source.inference.cross_file.find_reached` returns them.
    """

    def __init__(self, reached: frozenset[str] = frozenset()) -> None:
        self.reached = reached

    def bind(self, module: Module) -> Kinds:
        """Return the answers for one parsed file, which is walked at the first question."""
        return Inference(module, Roles(module, reached=self.reached))
