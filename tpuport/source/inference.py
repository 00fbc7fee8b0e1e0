"""What each expression of a function is, found by walking its statements once in order."""

import ast
import re
from collections.abc import Sequence

from tpuport.source.imported import qualified_name
from tpuport.source.kinds import (
    HOST,
    HOST_ATTRIBUTES,
    HOST_METHODS,
    HOST_TORCH,
    HOST_TORCH_PACKAGES,
    RANDOM_TORCH,
    TRACED,
    UNKNOWN,
    Kind,
    structural_kind,
    tensor_parameters,
)
from tpuport.source.module import FUNCTIONS, Function, Module
from tpuport.source.names import COMPREHENSIONS
from tpuport.source.statements import is_ops_call

Environment = dict[str, Kind]
BOOLEAN_METHODS = frozenset(
    {
        *("bool", "isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_not"),
        *("eq", "ne", "lt", "gt", "le", "ge"),
    }
)
OPS_OF_HOST = frozenset({"check", "passes", "report"})
HELPER = re.compile(r"(if_true|if_false|loop_test|loop_body)(_\d+)?")


class Inference:
    """The kinds of a file's expressions, function by function as they are asked for."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.imports = module.imports
        self._known: dict[ast.AST, dict[ast.AST, Kind]] = {}

    def kind(self, node: ast.expr) -> Kind:
        """What an expression is; UNKNOWN outside functions."""
        function = self.module.outermost_function(node)
        if not isinstance(function, FUNCTIONS):
            return structural_kind(node)
        if function not in self._known:
            walker = _Walker(self.imports)
            walker.function(function, {})
            self._known[function] = walker.kinds
        return self._known[function].get(node, UNKNOWN)

    def is_boolean(self, node: ast.expr) -> bool:
        """Whether an expression is known to be a traced tensor of dtype bool."""
        return self.kind(node) is TRACED and self._is_mask(node)

    def _is_mask(self, node: ast.expr) -> bool:
        match node:
            case ast.Compare():
                return True
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self._is_mask(operand)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor(), left=left, right=right):
                return self._is_mask(left) or self._is_mask(right)
            case ast.Subscript(value=value):
                return self._is_mask(value)
            case ast.Call(func=ast.Attribute(attr=attribute)):
                return attribute in BOOLEAN_METHODS
            case ast.Name(id=name):
                function = self.module.function(node)
                bound = [
                    each.value
                    for each in (() if function is None else ast.walk(function))
                    if isinstance(each, ast.Assign)
                    and any(isinstance(t, ast.Name) and t.id == name for t in each.targets)
                ]
                return bool(bound) and all(self._is_mask(value) for value in bound)
            case _:
                return False


def is_helper(function: Function) -> bool:
    """Whether a nested function was made by a rule: its parameters are the variables around it."""
    return HELPER.fullmatch(function.name) is not None


def join(*kinds: Kind) -> Kind:
    """What a name is that is one or the other."""
    return kinds[0] if len(set(kinds)) == 1 else UNKNOWN


def combine(kinds: Sequence[Kind]) -> Kind:
    """What an operation on values of these kinds gives."""
    if TRACED in kinds:
        return TRACED
    return HOST if all(kind is HOST for kind in kinds) else UNKNOWN


class _Walker:
    def __init__(self, imports: dict[str, str]) -> None:
        self.imports = imports
        self.kinds: dict[ast.AST, Kind] = {}
        self.environment: Environment = {}
        self.results: dict[str, list[Kind]] = {}
        self.returned: list[Kind] = []

    def function(self, function: Function, around: Environment) -> None:
        tensors = tensor_parameters(function)
        outer, self.environment = self.environment, dict(around)
        for argument in ast.walk(function.args):
            if isinstance(argument, ast.arg):
                same = around.get(argument.arg, UNKNOWN) if is_helper(function) else UNKNOWN
                self.environment[argument.arg] = TRACED if argument.arg in tensors else same
        outer_returned, self.returned = self.returned, []
        self.block(function.body)
        self.results[function.name] = self.returned
        self.environment, self.returned = outer, outer_returned

    # Statements.

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                kind = self.expression(value)
                for target in targets:
                    self.bind(target, kind, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.expression(value), value)
            case ast.AugAssign(target=target, value=value):
                kinds = [self.expression(target), self.expression(value)]
                self.bind(target, combine(kinds), None)
            case ast.Return(value=ast.expr() as value):
                self.returned.append(self.expression(value))
            case ast.If() | ast.Try() | ast.TryStar() | ast.Match():
                self.branches(node)
            case ast.For() | ast.AsyncFor() | ast.While():
                self.loop(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.environment[node.name] = UNKNOWN
                self.function(node, self.environment)
            case ast.ClassDef():
                self.environment[node.name] = UNKNOWN
                saved = dict(self.environment)
                self.block(node.body)
                self.environment = saved
            case _:
                self.parts(node)

    def parts(self, node: ast.AST) -> None:
        """Everything below a node that has no rule of its own, in the order written."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                if isinstance(getattr(child, "ctx", None), ast.Store):
                    self.bind(child, UNKNOWN, None)
                else:
                    self.expression(child)
            else:
                self.parts(child)

    def branches(self, node: ast.If | ast.Try | ast.TryStar | ast.Match) -> None:
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
        for alternative in alternatives:
            self.environment = dict(before)
            for part in alternative:
                if isinstance(part, ast.stmt):
                    self.statement(part)
                else:
                    self.parts(part)
            ends.append(self.environment)
        self.environment = meet(ends)
        if isinstance(node, ast.Try | ast.TryStar):
            self.block(node.finalbody)

    def loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        # The second round sees what the first one left in the names that the loop carries.
        for _ in range(2):
            before = dict(self.environment)
            if isinstance(node, ast.While):
                self.expression(node.test)
            else:
                kind = self.expression(node.iter)
                self.bind(node.target, kind if kind is TRACED else UNKNOWN, None)
            self.block(node.body)
            self.environment = meet([before, self.environment])
        self.block(node.orelse)

    def bind(self, target: ast.expr, kind: Kind, value: ast.expr | None) -> None:
        match target:
            case ast.Name(id=name):
                self.environment[name] = kind
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
                if len(values) == len(parts):
                    for part, one in zip(parts, values, strict=True):
                        self.bind(part, self.kinds.get(one, UNKNOWN), one)
                else:
                    for part in parts:
                        self.bind(part, kind, None)
            case ast.Starred(value=inner):
                self.bind(inner, UNKNOWN, None)
            case _:
                self.parts(target)

    # Expressions.

    def expression(self, node: ast.expr) -> Kind:
        kind = self._expression(node)
        self.kinds[node] = kind
        return kind

    def _expression(self, node: ast.expr) -> Kind:
        match node:
            case ast.Constant():
                return HOST
            case ast.Name(id=name):
                return self.environment.get(name, UNKNOWN)
            case ast.NamedExpr(target=target, value=value):
                self.environment[target.id] = kind = self.expression(value)
                return kind
            case ast.Call():
                return self.call(node)
            case ast.Attribute(value=value, attr=attribute):
                kind = self.expression(value)
                return HOST if attribute in HOST_ATTRIBUTES else kind
            case ast.Compare():
                return self.compare(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.expression(test)
                return join(self.expression(body), self.expression(orelse))
            case _:
                return self.compound(node)

    def compound(self, node: ast.expr) -> Kind:
        """An expression that is a container, a scope of its own, or an operation on its parts."""
        match node:
            case ast.Lambda():
                self.inner([node.args, node.body])
                return UNKNOWN
            case _ if isinstance(node, COMPREHENSIONS):
                self.inner([*node.generators, *ast.iter_child_nodes(node)])
                return UNKNOWN
            case ast.List() | ast.Dict() | ast.Set() | ast.Await() | ast.Yield() | ast.YieldFrom():
                self.parts(node)
                return structural_kind(node)
            case ast.JoinedStr():
                self.parts(node)
                return HOST
            case _:
                children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
                kinds = [self.expression(child) for child in children]
                return combine(kinds) if kinds else UNKNOWN

    def inner(self, parts: Sequence[ast.AST]) -> None:
        """Code with names of its own: they do not reach the function."""
        saved = dict(self.environment)
        for part in parts:
            if isinstance(part, ast.comprehension):
                kind = self.expression(part.iter)
                self.bind(part.target, kind if kind is TRACED else UNKNOWN, None)
                for test in part.ifs:
                    self.expression(test)
            elif isinstance(part, ast.arguments):
                for argument in ast.walk(part):
                    if isinstance(argument, ast.arg):
                        self.environment[argument.arg] = UNKNOWN
            elif isinstance(part, ast.expr):
                self.expression(part)
        self.environment = saved

    def compare(self, node: ast.Compare) -> Kind:
        kinds = [self.expression(part) for part in [node.left, *node.comparators]]
        if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return HOST
        if any(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in node.ops):
            return HOST if all(kind is HOST for kind in kinds) else UNKNOWN
        # A value that is compared with text is text, whatever its annotation says.
        is_text = any(
            isinstance(part, ast.Constant) and isinstance(part.value, str)
            for part in [node.left, *node.comparators]
        )
        kind = combine(kinds)
        return UNKNOWN if is_text and kind is TRACED else kind

    def call(self, node: ast.Call) -> Kind:
        receiver = UNKNOWN
        if isinstance(node.func, ast.Attribute):
            receiver = self.expression(node.func.value)
        arguments = [self.expression(argument) for argument in node.args]
        arguments += [self.expression(keyword.value) for keyword in node.keywords]
        if is_ops_call(node):
            return self.ops_call(node)
        name = qualified_name(node.func, self.imports, hidden=self.environment)
        if name is not None:
            return self.library_call(name, arguments)
        match node.func:
            case ast.Attribute(attr=attribute) if receiver is TRACED:
                return HOST if attribute in HOST_METHODS else TRACED
            case ast.Attribute() if receiver is HOST:
                return join(HOST, *arguments)
            case ast.Name(id="float" | "int" | "bool" | "abs" | "round" | "min" | "max"):
                return combine(arguments)
            case _:
                return structural_kind(node)

    def ops_call(self, node: ast.Call) -> Kind:
        """What our own helpers give: part of the program if anything that decides it is."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in OPS_OF_HOST:
            return HOST
        kinds = [UNKNOWN]
        for argument in node.args:
            match argument:
                case ast.Lambda(body=body):
                    kinds.append(self.kinds[body])
                case ast.Name(id=name) if name in self.results:
                    kinds += self.results[name]
                case _:
                    kinds.append(self.kinds[argument])
        return combine(kinds)

    def library_call(self, name: str, arguments: list[Kind]) -> Kind:
        root, _, last = name.rpartition(".")
        if name.startswith("math."):
            return combine(arguments)
        makes_module = name.startswith("torch.nn.") and last[:1].isupper()
        if root.partition(".")[0] != "torch" or makes_module:
            return UNKNOWN
        if last in HOST_TORCH or name.startswith(HOST_TORCH_PACKAGES):
            return HOST
        return TRACED if root == "torch" and last in RANDOM_TORCH else combine(arguments)


def meet(environments: Sequence[Environment]) -> Environment:
    """What names are where several paths meet; a name that one path lacks keeps the other's."""
    names = {name for environment in environments for name in environment}
    return {
        name: join(*(environment[name] for environment in environments if name in environment))
        for name in names
    }
