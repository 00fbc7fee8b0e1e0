"""What each expression of a file is: its steps are walked from their callers inwards."""

import ast
from dataclasses import dataclass, field

from tpuport.source.classes import ClassInfo
from tpuport.source.kinds import Kinds, structural_kind
from tpuport.source.library import is_static
from tpuport.source.module import Function, Module
from tpuport.source.names import all_arguments
from tpuport.source.parameters import (
    TESTED,
    annotated,
    default_value,
    defaults,
    is_used_like_a_tensor,
    names_another_class,
)
from tpuport.source.roles import Role, Roles
from tpuport.source.values import (
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
from tpuport.source.walker import Walker

# A function is walked again when a call hands it something new; recursion and long chains of calls
# that keep learning end here.
MAX_WALKS = 3
MAX_DEPTH = 12


@dataclass(eq=False)
class FunctionState:
    """What is known of a function so far.

    Attributes:
        parameters: What its parameters were when it was walked last.
        result: What it returns.
        walks: How often it was walked.
        running: Whether it is being walked.
    """

    parameters: dict[str, Value] = field(default_factory=dict[str, Value])
    result: Value = UNKNOWN
    walks: int = 0
    running: bool = False


class Inference:
    """The values of a file's expressions.

    Only steps are walked: elsewhere nothing is traced, and the form of an expression alone counts.

    Args:
        module: The file.
        roles: What runs its functions.
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
        """What an expression is; outside steps only its form counts."""
        value = self.value(node)
        return structural_kind(node) if value is None else value.kind

    def is_boolean(self, node: ast.expr) -> bool:
        """Whether an expression is known to be a traced tensor of dtype bool."""
        value = self.value(node)
        return value is not None and value.kind is Kind.TRACED and value.form is Form.MASK

    def value(self, node: ast.expr) -> Value | None:
        """What an expression of a step is; None elsewhere."""
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
        """What is known of a function."""
        return self._states.setdefault(function, FunctionState())

    def call(self, function: Function, owner: ClassInfo | None, passed: dict[str, Value]) -> Value:
        """What a call of a function of this file returns; walks it if it was handed news.

        Args:
            function: The function.
            owner: The class that it is a method of, if it is one.
            passed: What was passed for each parameter, by name.
        """
        state = self.state(function)
        parameters = self._parameters(function, owner, passed, state.parameters)
        known = state.walks and parameters == state.parameters
        if state.running:
            # Recursion: what it returns is what its other paths return.
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
            if name in passed:
                value = _refined(value, passed[name])
            if name in before:
                value = join([before[name], value]) if before[name].kind is value.kind else value
            found[name] = value
        return found

    def _parameter(self, function: Function, argument: ast.arg, default: ast.expr | None) -> Value:
        """What a parameter is as far as the function itself tells."""
        arguments = function.args
        if argument is arguments.vararg:
            item = annotated(argument.annotation) or UNKNOWN
            return Value(Kind.UNKNOWN, Form.SEQUENCE, item=item)
        if argument is arguments.kwarg:
            return UNKNOWN
        is_step = self.roles.of(function) is Role.STEP
        value = annotated(argument.annotation)
        if value is None and self._is_used_like_a_tensor(function, argument):
            value = TRACED if is_step else HOST_TENSOR
        if value is UNKNOWN and is_step and self._has_tensors_as_items(function, argument):
            return TRACED
        if value is None:
            value = default_value(default)
        if value is None and not is_step:
            return HOST
        if value is not None and not is_step and contains_traced(value):
            return HOST_TENSOR
        return UNKNOWN if value is None or value is NONE else value

    def _is_used_like_a_tensor(self, function: Function, argument: ast.arg) -> bool:
        """Whether the use of a parameter shows that it is a tensor, and only that."""
        used = self.roles.used(function).get(argument.arg, set[str]())
        other = TESTED in used or names_another_class(argument.annotation)
        return not other and is_used_like_a_tensor(used)

    def _has_tensors_as_items(self, function: Function, argument: ast.arg) -> bool:
        """Whether of a parameter that may be a list or a tensor `x[0].item()` is asked."""
        used = self.roles.used(function)
        tested = TESTED in used.get(argument.arg, ())
        return not tested and "item" in used.get(f"{argument.arg}[]", ())

    # Classes.

    def attribute(self, owner: ClassInfo, name: str) -> Value | None:
        """What `self.name` is in a class; None if nothing is known of it."""
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
        """Remember that code assigned `self.name`."""
        known = owner.attributes.get(name)
        owner.attributes[name] = value if known is None else join([known, value])


def _refined(own: Value, passed: Value) -> Value:
    """A parameter by its own text and by what a call passes."""
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
    """What reading a file can prove.

    In steps, tensor parameters, parameters and buffers of modules, and what torch and modules make
    of those are TRACED; shapes, dtypes, lengths and tensors made of Python numbers are HOST.

    Args:
        reached: Functions of the file that a step in another file calls, as
            `tpuport.source.project.find_reached` gives them.
    """

    def __init__(self, reached: frozenset[str] = frozenset()) -> None:
        self.reached = reached

    def bind(self, module: Module) -> Kinds:
        """The answers for one parsed file, which is read when they are first asked for."""
        return Inference(module, Roles(module, reached=self.reached))
