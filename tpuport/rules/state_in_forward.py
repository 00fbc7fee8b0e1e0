"""TPU413: state that a step leaves in `self`."""

import ast

from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import ClassState, Write, class_state
from tpuport.rules._writing import step_writes
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context


class StateInForward(Rule):
    """State that one step leaves in `self` for the next.

    ## What it does
    Finds assignments of traced tensors to attributes of `self`, counters such as `self.calls += 1`,
    lists in `self` that take traced tensors, and updates of registered buffers, in the code of a
    step. Where an attribute is read only later in the same step, or not at all, it is a note: the
    value is right, but what stays in the attribute belongs to a finished trace.

    ## Why is this bad?
    Python runs while the program is traced and never again. A counter advances once, a running mean
    is computed from its first value in every call, and a tensor that is carried to the next call is
    a value of a finished trace. No error is raised at the write.

    ## Fix safety
    There is no automatic fix: state has to enter the step as an argument and leave it as a result.
    Registered buffers need no change, if the caller passes in and takes out those that
    `functional_call` changes (`tpuport.convert` does).

    ## References
    https://docs.jax.dev/en/latest/stateful-computations.html
    """

    CODE = "TPU413"
    MESSAGE = "`{attribute}` is state that the step leaves behind: a program does not advance it"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SILENT

    EXAMPLES = (
        Example(
            before="""
            import torch


            class Warm(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.calls = 0

                def forward(self, x: torch.Tensor):
                    self.calls += 1
                    return x * min(self.calls / 10, 1.0)


            forward = Warm()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Smooth(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("mean", torch.zeros(4))

                def forward(self, x: torch.Tensor):
                    self.mean.mul_(0.9).add_(0.1 * x.mean(0))
                    return x - self.mean


            forward = Smooth()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch


            class Recurrent(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.last = None

                def forward(self, x: torch.Tensor):
                    moved = x if self.last is None else x - self.last
                    self.last = x * 2
                    return moved


            forward = Recurrent()
            """,
            jit_error=None,
            harm="forgets",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.width = 4
                self.calls = 0
                self.table = torch.nn.Buffer(torch.ones(4))

            def set_width(self, width):
                self.width = width

            def forward(self, x: torch.Tensor):
                self.height = x.shape[0]
                self.gradient_checkpointing = False
                self.width = self.width.to(x.device)
                table = self.table
                if table.device != x.device:
                    self.table = table = table.to(x.device)
                calls = self.calls + 1
                last = x.clone()
                last.mul_(2)
                return x * self.width + self.height + calls + last + table
        """,
        """
        import torch


        class Counter:
            def __init__(self):
                self.calls = 0

            def tick(self, x: torch.Tensor):
                self.calls += 1
                self.last = x.abs()
                return self.last
        """,
    )

    def visit_ClassDef(self, node: ast.ClassDef, context: Context) -> None:
        for write, way in step_writes(node, context):
            if way == "plain" and _is_state(write, class_state(node, context), context):
                carried = _is_carried(write, class_state(node, context), context)
                severity = Severity.SILENT if carried else Severity.NOTE
                attribute = f"self.{write.attribute}"
                context.report(self, write.node, severity=severity, attribute=attribute)


def _is_state(write: Write, state: ClassState, context: Context) -> bool:
    """Return whether a write leaves more than a constant that is the same in every call."""
    if write.way == "augment" and isinstance(write.value, ast.Constant):
        return True
    if write.way in ("in_place", "element") and write.attribute in state.buffers:
        return True
    if write.value is not None and _is_moved(write.value, write.attribute):
        return False
    return write.value is not None and context.is_traced(write.value)


def _is_moved(value: ast.expr, attribute: str) -> bool:
    """Return whether a value is the attribute itself on another device: the same state."""
    match value:
        case ast.IfExp(body=body):
            return _is_moved(body, attribute)
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr="to" | "cuda")):
            return name == attribute
        case _:
            return False


def _is_carried(write: Write, state: ClassState, context: Context) -> bool:
    """Return whether a later call reads what a write leaves behind."""
    if write.way in ("augment", "in_place", "element", "append"):
        return not _is_reset(write, state, context)
    later = state.reached_from(write.method.name)
    for read in state.reads.get(write.attribute, ()):
        reader = context.module.outermost_function(read)
        assert isinstance(reader, ast.FunctionDef | ast.AsyncFunctionDef)
        if reader is write.method:
            # A read that the write does not surely precede may see what the call before left.
            if read.lineno <= write.node.lineno or not _is_followed(write.node, read, context):
                return True
        elif reader.name not in later and context.in_step(read):
            return True
    return False


def _is_reset(write: Write, state: ClassState, context: Context) -> bool:
    """Return whether a step binds the attribute to a first value before it changes it."""
    return any(
        other.attribute == write.attribute
        and other.way == "bind"
        and other.value is not None
        and not context.is_traced(other.value)
        and (context.in_step(other.node) or other.method.name.startswith("init_"))
        for other in state.writes
        if other.method.name != "__init__"
    )


def _is_followed(node: ast.stmt, read: ast.AST, context: Context) -> bool:
    """Return whether a read can only come after a statement of the same call."""
    block, _ = context.module.block(node)
    return any(ancestor in block for ancestor in context.module.ancestors(read))
