"""Helpers of the rules about devices: who runs the code, and whether a test guards it."""

import ast
import re
from pathlib import PurePath

from tpuport.source.inference.roles import Role
from tpuport.source.rewrite.finding import NotFixable, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Module

# Words in a test after which code may take CUDA for granted.
ASKS_DEVICE = re.compile(r"cuda|gpu|nccl|accelerat|available|deepspeed", re.IGNORECASE)
ASKS_CUDA = re.compile(
    rf"{ASKS_DEVICE.pattern}|is_\w*(initialized|distributed)|world_size|\bddp\b", re.IGNORECASE
)
_CUDA = re.compile(r"cuda")
_ASSERTED = re.compile(r"cuda|gpu|available|is_initialized", re.IGNORECASE)
# Streams are used to move weights to a GPU and back, so a test of offloading guards them, too.
ASKS_STREAMS = re.compile(
    rf"{ASKS_CUDA.pattern}|offload|stream|pin_memory|torch_greater", re.IGNORECASE
)
# Exceptions raised where CUDA, a package or a process group is missing.
CATCHING = {
    "Exception",
    "BaseException",
    "ImportError",
    "ModuleNotFoundError",
    "AssertionError",
    "RuntimeError",
    "ValueError",
    "AttributeError",
    "OSError",
}
# Names of host code that a port can leave out, or that looks for devices itself.
_ASIDE = re.compile(
    r"(^|_)(tests?|bench\w*|demo|evals?|evaluat\w*|example|profile\w*|plot\w*|debug)(_|$)"
)
_PREDICATE = re.compile(r"^_?(is|has|can|supports?|check|detect)_")
# Names of functions for CUDA alone, of classes that measure, and of calls that require CUDA.
FOR_CUDA = re.compile(r"cuda|gpu|nccl|nvidia|nvtx|nsys|_dist(_|$)|distribut|slurm|ddp", re.I)
_MEASURES = re.compile(r"nvtx|nsys|profil|timer", re.I)
REQUIRES = re.compile(r"(check|require|assert|ensure|verify)\w*(cuda|gpu)", re.IGNORECASE)
# A `try` around more statements than this is about errors of any kind.
_SHORT_TRY = 3
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
AVAILABLE = "torch.cuda.is_available()"


def severity(node: ast.AST, context: Context, reached: Severity = Severity.ERROR) -> Severity:
    """Return the severity of a site: `reached` in the step and in set-up, `device` elsewhere.

    In a function whose name says that it is for CUDA, it is `device`, too.
    """
    module = context.module
    if context.role(node) is Role.HOST or is_aside(node, module):
        return Severity.DEVICE
    function = module.function(node)
    return Severity.DEVICE if function and FOR_CUDA.search(function.name) else reached


def severity_anywhere(
    node: ast.AST, context: Context, reached: Severity = Severity.ERROR
) -> Severity:
    """Return the severity of a site that raises on a TPU machine in any code, host code included.

    It is `device` in tests, benchmarks and demos, after `if __name__ == "__main__":`, in classes
    that measure, and in functions that are for CUDA, start processes or find out about devices.
    """
    module = context.module
    function = module.function(node)
    scope = next((p for p in module.ancestors(node) if isinstance(p, ast.ClassDef)), None)
    if scope is not None and _MEASURES.search(scope.name):
        return Severity.DEVICE
    aside = function is not None and (
        _PREDICATE.search(function.name)
        or FOR_CUDA.search(function.name)
        or (context.role(node) is Role.HOST and _ASIDE.search(function.name))
    )
    return Severity.DEVICE if aside or is_aside(node, module) else reached


def is_aside(node: ast.AST, module: Module) -> bool:
    """Return whether a port can leave code out: tests, benchmarks, or a `__main__` block."""
    path = PurePath(module.file)
    folder = _ASIDE.fullmatch(path.parent.name) is not None
    return folder or _ASIDE.search(path.stem) is not None or _in_main(node, module)


def _in_main(node: ast.AST, module: Module) -> bool:
    return any(
        isinstance(parent, ast.If)
        and isinstance(parent.test, ast.Compare)
        and isinstance(parent.test.left, ast.Name)
        and parent.test.left.id == "__name__"
        for parent in module.ancestors(node)
    )


def is_guarded(
    node: ast.AST, module: Module, words: re.Pattern[str] = ASKS_CUDA, *, strictly: bool = False
) -> bool:
    """Return whether a test around a node, or an exit before it, asks for what the node needs.

    The side of the test that the node is on does not count, since code that asks knows of machines
    that have none. But `if x.device != cuda:` only asks whether `x` has been moved yet.

    Args:
        node: The node that needs CUDA, or what `words` is about.
        module: The file.
        words: The pattern that the source of such a test contains.
        strictly: Whether an assertion, and a `try` around many statements, are no guards.
    """
    child = node
    for parent in module.ancestors(node):
        if _asks(parent, child, words) or _exits(parent, child, words, strictly=strictly):
            return True
        if _is_caught(parent, child) and not (strictly and _is_long(parent)):
            return True
        child = parent
    return False


def outermost_choice(node: ast.expr, module: Module) -> tuple[ast.expr, ast.AST]:
    """Return the outermost `or` or `x if t else y` that offers a value, and its parent."""
    parent = module.parents[node]
    while isinstance(parent, ast.BoolOp) or (
        isinstance(parent, ast.IfExp) and parent.test is not node
    ):
        node, parent = parent, module.parents[parent]
    return node, parent


def is_half_guarded(node: ast.AST, module: Module) -> bool:
    """Return whether what guards a node says nothing about machines without CUDA.

    It asks for several processes or for offloading, insists on CUDA, or is a `try` around much
    else. A TPU machine may come here, so a port changes the line.
    """
    return not is_guarded(node, module, ASKS_DEVICE, strictly=True)


def refuse_guarded(node: ast.AST, module: Module, words: re.Pattern[str] = ASKS_CUDA) -> None:
    """Refuse to fix what a test guards in part: only the author knows what the test stands for.

    Raises:
        NotFixable: a test guards the node.
    """
    if is_guarded(node, module, words):
        raise NotFixable("a test around it asks for CUDA or for several processes")


def _asks(parent: ast.AST, child: ast.AST, words: re.Pattern[str]) -> bool:
    match parent:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if isinstance(parent, ast.If) and child in parent.body and _says_not_there(test):
                return False
            return child is not test and _mentions(test, words)
        case ast.BoolOp(values=values):
            before = values[: next(i for i, value in enumerate(values) if value is child)]
            return any(_mentions(value, words) for value in before)
        case _:
            return False


def _says_not_there(test: ast.expr) -> bool:
    """Return whether a test is true for a value that is not on a CUDA device yet."""
    match test:
        case ast.Compare(ops=[ast.NotEq() | ast.NotIn()]):
            return _mentions(test, _CUDA)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(attr="is_cuda")):
            return True
        case _:
            return False


def _mentions(test: ast.AST, words: re.Pattern[str]) -> bool:
    return words.search(ast.unparse(test)) is not None


def _is_caught(parent: ast.AST, child: ast.AST) -> bool:
    if not isinstance(parent, ast.Try) or child not in parent.body:
        return False
    return any(
        not isinstance(handler.body[-1], ast.Raise) and _catches(handler)
        for handler in parent.handlers
    )


def _is_long(parent: ast.AST) -> bool:
    return isinstance(parent, ast.Try) and len(parent.body) > _SHORT_TRY


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(
        (isinstance(name, ast.Name) and name.id in CATCHING)
        or (isinstance(name, ast.Attribute) and name.attr in CATCHING)
        for name in ast.walk(handler.type)
    )


def _exits(parent: ast.AST, child: ast.AST, words: re.Pattern[str], *, strictly: bool) -> bool:
    """Return whether an earlier statement of `child`'s block exits, depending on a test."""
    for field in ("body", "orelse", "finalbody", "handlers"):
        block: list[ast.AST] | ast.AST = getattr(parent, field, [])
        if isinstance(block, list) and child in block:
            before = block[: block.index(child)]
            return any(
                _leaves(statement, words)
                for statement in before
                if not (strictly and isinstance(statement, ast.Assert))
            )
    return False


def _leaves(statement: ast.AST, words: re.Pattern[str]) -> bool:
    match statement:
        case ast.Assert(test=test):
            # `assert world_size % 8 == 0` asks for no process group.
            return _mentions(test, _ASSERTED) and _mentions(test, words)
        case ast.If(test=test, body=[*_, last]):
            return isinstance(last, EXITS) and _mentions(test, words)
        case ast.Expr(value=ast.Call(func=function)):
            return (
                words in (ASKS_CUDA, ASKS_STREAMS, ASKS_DEVICE)
                and REQUIRES.search(ast.unparse(function)) is not None
            )
        case _:
            return False


def within(node: ast.AST, module: Module, name: str) -> bool:
    """Return whether a node is inside a function with this name."""
    function = module.function(node)
    return function is not None and function.name == name


def insists_on_cuda(node: ast.Assert, context: Context) -> bool:
    """Return whether an assertion that always runs requires CUDA, or a tensor on a GPU."""
    tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    asks = any(_insists(test, context) for test in tests)
    around = context.module.ancestors(node)
    return asks and not any(isinstance(parent, ast.If | ast.Try) for parent in around)


def _insists(test: ast.expr, context: Context) -> bool:
    match test:
        case ast.Call(func=function):
            return context.name(function) == AVAILABLE[:-2]
        case ast.Attribute(attr=name):
            return name == "is_cuda"
        case ast.Compare(left=ast.Attribute(attr="type"), comparators=[ast.Constant(value=kind)]):
            return kind == "cuda" and isinstance(test.ops[0], ast.Eq)
        case _:
            return False
