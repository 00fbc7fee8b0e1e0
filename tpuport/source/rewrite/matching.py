"""One walk over a file's syntax tree that every rule takes part in."""

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuport.source.inference.gpu_only import is_for_processes, is_off_tpu
from tpuport.source.inference.inference import Inference, StaticKinds
from tpuport.source.inference.kinds import Kind, Kinds, Oracle, truth_tests
from tpuport.source.inference.liveness import NameFlow
from tpuport.source.inference.roles import Role, Roles
from tpuport.source.rewrite.finding import Finding, Fix, NotFixable, Safety, Severity
from tpuport.source.syntax.imported import qualified_name
from tpuport.source.syntax.module import Function, Module

MAX_QUOTE = 60


# The start of the codes of rules about devices.
ABOUT_DEVICES = "TPU5"


class RuleVisitor:
    """The part of a rule that matching and rewriting use; `tpuport.rules._rule.Rule` documents it.

    Methods `visit_X(node, context)` are called for every node of class `ast.X` and report with
    `context.report(self, node)`.
    """

    CODE: ClassVar[str]
    MESSAGE: ClassVar[str]
    SAFETY: ClassVar[Safety]
    SEVERITY: ClassVar[Severity]
    PINS: ClassVar[bool] = False

    def fix(self, node: ast.AST, context: "Context") -> Fix:
        """Return the edits that remove a finding.

        Args:
            node: The node that was reported.
            context: What may be asked about the file.

        Raises:
            NotFixable: no rewriting is proved to compute the same.
        """
        del node, context
        raise NotFixable("this rule has no automatic fix")


@dataclass(frozen=True, eq=False)
class Match:
    """A finding, the node that it is about and the rule that found it."""

    rule: RuleVisitor
    node: ast.AST
    finding: Finding


class Context:
    """The view of a file that a rule gets when it visits the file's nodes.

    Attributes:
        module: The file's text and tree.
        kinds: The oracle's answers for this file.
        matches: The findings reported so far.
        imports_inside: Whether a fix imports what it needs inside the function, as live rewriting
            does, and not at the top of the file.
        strict: Whether values of unknown kind count as traced inside a step.
        own: The packages for CUDA that the linted code itself is.
    """

    def __init__(
        self,
        module: Module,
        kinds: Kinds,
        *,
        imports_inside: bool = False,
        strict: bool = False,
        own: frozenset[str] = frozenset(),
    ) -> None:
        self.module = module
        self.own = own
        self.kinds = kinds
        self.matches: list[Match] = []
        self.imports_inside = imports_inside
        self.strict = strict
        self._flows: dict[Function, NameFlow] = {}
        self._names: dict[ast.expr, str | None] = {}
        self._roles = kinds.roles if isinstance(kinds, Inference) else Roles(module)

    def kind(self, node: ast.expr) -> Kind:
        """Return the kind of an expression while the program is traced."""
        return self.kinds.kind(node)

    def is_traced(self, node: ast.expr) -> bool:
        """Return whether an expression is known to be traced.

        Always false outside the step: tensors in constructors and data loading are never traced.
        With `strict`, everything that is not known to be a host value counts as traced.
        """
        kind = self.kind(node)
        if kind is Kind.HOST or (kind is Kind.UNKNOWN and not (self.strict and self.in_step(node))):
            return False
        # A real trace reached the code, even if a test around it looks like a CUDA branch.
        return self.is_live or not is_off_tpu(node, self.module)

    def is_boolean(self, node: ast.expr) -> bool:
        """Return whether an expression is known to be a traced tensor of dtype bool."""
        return self.kinds.is_boolean(node)

    def name(self, node: ast.expr) -> str | None:
        """Return the full name of an imported thing: `torch.nn.functional.pad` for `F.pad`.

        Returns None if the expression is not a dotted name or does not start at an import.
        Relative imports keep their dots: `.layers.Block`.
        """
        if node not in self._names:
            self._names[node] = qualified_name(node, self.module.imports)
        return self._names[node]

    def role(self, node: ast.AST) -> Role:
        """Return what runs the code at a node: the traced step, set-up, or the host.

        What only GPUs run counts as host code here.
        """
        return Role.HOST if self._roles.is_off_tpu(node) else self._roles.of(node)

    def in_step(self, node: ast.AST) -> bool:
        """Return whether code runs in a traced step: `forward`, a training step, a callee."""
        return self._roles.of(node) is Role.STEP

    @property
    def is_live(self) -> bool:
        """Return whether a trace met traced values here: what the fix calls will run in it."""
        return not isinstance(self.kinds, Inference)

    def grows(self, loop: ast.stmt) -> bool:
        """Return whether a trace found that a loop makes a tensor longer."""
        return self.kinds.grows(loop)

    def asks_traced(self, test: ast.expr) -> bool:
        """Return whether Python needs the truth value of a traced value to evaluate `test`."""
        inferred = isinstance(self.kinds, Inference)
        # A trace may blame all of `a and b`, but inference knows which operand is traced.
        whole = not (inferred and isinstance(test, ast.BoolOp)) and self.is_traced(test)
        return whole or any(self.is_traced(leaf) for leaf in truth_tests(test))

    def flow(self, function: Function) -> NameFlow:
        """Return the flow of names through a function of this file."""
        if function not in self._flows:
            self._flows[function] = NameFlow(function)
        return self._flows[function]

    def report(
        self,
        rule: RuleVisitor,
        node: ast.AST,
        *,
        severity: Severity | None = None,
        **parts: ast.AST | str,
    ) -> None:
        """Record a finding about a node.

        Args:
            rule: The rule that found it.
            node: The statement or expression that it is about. Of an `if` or a loop the finding
                covers the part up to the colon.
            severity: The finding's severity; the rule's severity if left out.
            parts: Values for the placeholders of the rule's message: text, or nodes, which are
                quoted.
        """
        module = self.module
        quotes = {
            name: part if isinstance(part, str) else quote(module.source(part))
            for name, part in parts.items()
        }
        line: int = getattr(node, "lineno")  # noqa: B009 (nodes without a place have none)
        last = head(node) if isinstance(node, ast.If | ast.While | ast.For) else node
        end_line: int = getattr(last, "end_lineno")  # noqa: B009
        column: int = getattr(node, "col_offset")  # noqa: B009
        end_column: int = getattr(last, "end_col_offset")  # noqa: B009
        finding = Finding(
            file=module.file,
            line=module.text.origin(line),
            column=module.text.column(line, column),
            end_line=module.text.origin(end_line),
            end_column=module.text.column(end_line, end_column),
            code=rule.CODE,
            message=rule.MESSAGE.format(**quotes),
            severity=self._severity(rule, node, severity or rule.SEVERITY),
            rule=type(rule).__name__,
        )
        self.matches.append(Match(rule, node, finding))

    def is_off_tpu(self, node: ast.AST) -> bool:
        """Return whether only GPUs run code, for its package of kernels or in several processes."""
        if self.is_live:
            return False
        return self._roles.is_off_tpu(node) or is_for_processes(node, self.module)

    def _severity(self, rule: RuleVisitor, node: ast.AST, found: Severity) -> Severity:
        """Return the severity of a finding: code that only GPUs run stops nothing on a TPU.

        Rules about devices (TPU5) decide that themselves.
        """
        decided = found in (Severity.DEVICE, Severity.NOTE) or rule.CODE.startswith(ABOUT_DEVICES)
        return found if decided or not self.is_off_tpu(node) else Severity.DEVICE


def head(node: ast.If | ast.While | ast.For) -> ast.expr:
    """Return the expression before the colon: a test, or what a loop goes over."""
    return node.iter if isinstance(node, ast.For) else node.test


def quote(source: str) -> str:
    """Join source into one line and shorten it to fit a message."""
    line = " ".join(source.split())
    return line if len(line) <= MAX_QUOTE else line[: MAX_QUOTE - 3] + "..."


def find(
    source: str,
    *,
    rules: Sequence[type[RuleVisitor]],
    kinds: Oracle | None = None,
    file: str = "<string>",
    strict: bool = False,
) -> list[Finding]:
    """Find what the rules report about Python source.

    Args:
        source: The text of a file.
        rules: The rules to ask.
        kinds: What decides which expressions are traced; `StaticKinds()` if left out.
        file: What findings name as the file.
        strict: Whether what is not known counts as traced inside a step.

    Returns:
        The findings, sorted by place.

    Raises:
        SyntaxError: the source is not Python.
    """
    module = Module(normal_line_breaks(source), file=file)
    context = Context(module, (kinds or StaticKinds()).bind(module), strict=strict)
    return sorted(match.finding for match in matches(context, [rule() for rule in rules]))


def normal_line_breaks(source: str) -> str:
    """Replace every line break that Python knows by `\\n`."""
    return source.replace("\r\n", "\n").replace("\r", "\n")


def matches(context: Context, rules: Iterable[RuleVisitor]) -> list[Match]:
    """Run the `visit_` methods of rules on all nodes of their classes, and return the findings."""
    table = _dispatch_table(rules)
    for node_class, visits in table.items():
        for node in context.module.by_class.get(node_class, ()):
            for visit in visits:
                visit(node, context)
    return context.matches


def _dispatch_table(
    rules: Iterable[RuleVisitor],
) -> dict[type[ast.AST], list[Callable[[Any, Context], None]]]:
    table: dict[type[ast.AST], list[Callable[[Any, Context], None]]] = {}
    for rule in rules:
        for name in dir(rule):
            if name.startswith("visit_"):
                node_class = getattr(ast, name.removeprefix("visit_"))
                table.setdefault(node_class, []).append(getattr(rule, name))
    return table
