"""TPU517: a function compiled by torch.compile or TorchScript."""

import ast
import re

from tpuport.rules._devices import is_guarded
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.imported import imported_names
from tpuport.source.syntax.module import own_bindings
from tpuport.source.syntax.text import Edit, Passage

_SCRIPT = ("torch.jit.script", "torch.jit.script_method")
_TRACE = ("torch.jit.trace", "torch.jit.trace_module")
# Words in a test that decides whether to compile.
ASKS = re.compile(r"compil|dynamo|inductor|cuda|gpu|available|script|trace", re.IGNORECASE)
_COMPILERS = frozenset({"compile", "script", "script_method", "trace", "trace_module"})


class CompiledFunction(Rule):
    """A function compiled by `torch.compile` or TorchScript.

    ## What it does
    Finds `torch.compile` as a decorator or a call, and `torch.jit.trace` in a step. The fix takes
    `torch.compile` away. Compilation that a test chooses is host code, and `torch.jit.script` is
    noted.

    ## Why is this bad?
    `jax.jit` compiles the program. Under torchax `torch.compile` is skipped, and raises with
    `fullgraph=True`; outside, once torchax is imported, calling the function raises
    `InternalTorchDynamoError`, so the program can no longer be compared with eager PyTorch.

    ## Fix safety
    The function is the same; its compiled form may round differently, within 1e-5 in float32.
    There is no fix where the file looks for `_orig_mod`, the wrapped module of `torch.compile`, or
    for a state dict, if a call may wrap a module: the keys would lose the prefix `_orig_mod.`.

    ## References
    https://pytorch.org/docs/stable/generated/torch.compile.html
    """

    CODE = "TPU517"
    MESSAGE = "`{code}`: {consequence}"
    SAFETY = Safety.close(1e-5)
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            from torch import compile


            @compile
            def forward(x):
                return x.sigmoid() * x
            """,
            after="""
            from torch import compile


            def forward(x):
                return x.sigmoid() * x
            """,
            reference="def forward(x): return x.sigmoid() * x",
            jit_error=None,
            harm="fails_beside_torchax",
        ),
        Example(
            before="""
            import torch


            relu, abs = torch.compile(torch.relu, mode="max-autotune"), torch.abs
            abs = torch.compile(abs)


            @torch.compile(
                fullgraph=True,
            )
            def double(x):
                return x * 2


            def forward(x: torch.Tensor):
                return double(relu(x)) + abs(x)
            """,
            after="""
            import torch


            relu, abs = torch.relu, torch.abs


            def double(x):
                return x * 2


            def forward(x: torch.Tensor):
                return double(relu(x)) + abs(x)
            """,
            reference="def forward(x): return x.relu() * 2 + x.abs()",
            jit_error="RuntimeError",
        ),
        Example(
            before="""
            import torch


            model = torch.compile(torch.nn.Sigmoid(), fullgraph=True)


            def save(path):
                torch.save(model.state_dict(), path)


            def forward(x: torch.Tensor):
                return model(x)
            """,
            left="the prefix `_orig_mod.`",
            jit_error="RuntimeError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return torch.jit.trace(lambda y: y.sin(), x)(x)
            """,
            left="not `torch.compile`",
            jit_error="RuntimeError",
        ),
    )
    CLEAN = (
        """
        import torch

        torch._dynamo.config.cache_size_limit = 64


        @torch.jit.ignore
        @torch.compiler.disable
        @torch._dynamo.disable(recursive=False)
        def forward(x: torch.Tensor):
            if torch.jit.is_scripting() or torch.compiler.is_compiling() or torch.jit.is_tracing():
                return x
            return x * 2


        def maybe(re, model, text, compile_model: bool):
            re.compile(text), compile(text, "a", "exec")
            return torch.compile(model) if compile_model else model
        """,
    )

    def visit_Attribute(self, node: ast.Attribute | ast.Name, context: Context) -> None:
        name = context.name(node) if _is_candidate(node, context) else None
        if name == "torch.compile" and _is_wrapping(node, context):
            found, consequence = _fate(node, context)
        elif name in _SCRIPT:
            found, consequence = Severity.NOTE, "rewriting does not see the code inside"
        elif name in _TRACE:
            found = Severity.ERROR if context.in_step(node) else Severity.NOTE
            consequence = "tracing again inside a traced step raises"
        else:
            return
        context.report(self, node, code=node, consequence=consequence, severity=found)

    visit_Name = visit_Attribute

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.expr)
        if context.name(node) != "torch.compile":
            raise NotFixable("it is not `torch.compile`")
        if "_orig_mod" in context.module.text.text:
            raise NotFixable("the file looks for the wrapped module")
        if is_guarded(node, context.module, ASKS):
            raise NotFixable("a test chooses whether to compile")
        if "state_dict" in context.module.text.text and not _wraps_function(node, context):
            raise NotFixable("keys of a state dict would lose the prefix `_orig_mod.` of a module")
        return _without_wrapper(node, context)


def _wraps_function(wrapper: ast.expr, context: Context) -> bool:
    """Return whether what is wrapped is a function: below a decorator, of torch or of the file."""
    call = context.module.parents[wrapper]
    if _is_decorator(wrapper, context) or _is_decorator(call, context):
        return True
    wrapped = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(wrapped, ast.Lambda):
        return True
    if isinstance(wrapped, ast.Attribute) and wrapped.attr == "forward":
        return True
    name = None if wrapped is None else context.name(wrapped)
    return name is not None and name.startswith("torch.")


def _is_candidate(node: ast.Attribute | ast.Name, context: Context) -> bool:
    """Return whether a name may be a compiler's: a quick look, as every name of a file is asked."""
    if isinstance(node, ast.Attribute):
        return node.attr in _COMPILERS
    full = context.module.imports.get(node.id)
    return full is not None and full.rpartition(".")[2] in _COMPILERS


def _fate(node: ast.expr, context: Context) -> tuple[Severity, str]:
    """Return the severity of a use of `torch.compile`, and what happens to it, in words."""
    if is_guarded(node, context.module, ASKS):
        return Severity.DEVICE, "skipped under torchax: a program is compiled in any case"
    if _has_true(context.module.parents[node], "fullgraph"):
        return Severity.ERROR, "under torchax `fullgraph=True` raises"
    return (
        Severity.SLOW,
        "skipped under torchax, and raises in eager PyTorch once torchax is imported",
    )


def _without_wrapper(wrapper: ast.expr, context: Context) -> Fix:
    """Return the fix that removes a wrapper: a decorator, a call that makes one, or a call.

    Args:
        wrapper: The name of the wrapper where it is used.
        context: The file and what is inferred about it.

    Raises:
        NotFixable: it is not clear what is wrapped, or other code is on the same lines.
    """
    if _is_decorator(wrapper, context):
        return _without_lines(wrapper, context)
    call = context.module.parents[wrapper]
    assert isinstance(call, ast.Call)
    return (
        _without_lines(call, context) if _is_decorator(call, context) else _unwrapped(call, context)
    )


def _is_wrapping(wrapper: ast.expr, context: Context) -> bool:
    """Return whether a name is used as a wrapper: called, or a decorator."""
    call = context.module.parents[wrapper]
    return _is_decorator(wrapper, context) or (isinstance(call, ast.Call) and call.func is wrapper)


def _has_true(call: ast.AST, name: str) -> bool:
    """Return whether a node is a call with `name=True`."""
    return isinstance(call, ast.Call) and any(
        keyword.arg == name
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for keyword in call.keywords
    )


def _is_decorator(node: ast.AST, context: Context) -> bool:
    """Return whether an expression is a decorator."""
    return node in getattr(context.module.parents[node], "decorator_list", [])


def _unwrapped(call: ast.Call, context: Context) -> Fix:
    """Return the fix that replaces a call by its first argument, or drops `f = wrapper(f)`."""
    module = context.module
    if not call.args or isinstance(call.args[0], ast.Starred):
        raise NotFixable("it is not clear what is wrapped")
    statement = module.parents[call]
    if isinstance(statement, ast.Assign) and _rebinds(statement, call):
        block, _ = module.block(statement)
        if all(_rebinds(each) for each in block):
            raise NotFixable("the block would be empty")
        if _is_bound_elsewhere(statement, context):
            return _without_lines(statement, context)
    start, end = module.span(call)
    if module.comments(start, end):
        raise NotFixable("a comment would be lost")
    bare = module.copy_node(call.args[0])
    if _stands_alone(call.args[0], bare.text):
        return Fix((Edit(start, end, bare),))
    return Fix((Edit(start, end, Passage.of("(", module.origin(call)) + bare + ")"),))


def _rebinds(statement: ast.AST | None, call: ast.Call | None = None) -> bool:
    """Return whether a statement is `f = wrapper(f)`; with `call`, of that call."""
    match statement:
        case ast.Assign(targets=[target], value=ast.Call(args=[wrapped, *_]) as value):
            is_asked = call is None or value is call
            return is_asked and ast.unparse(target) == ast.unparse(wrapped)
        case _:
            return False


def _is_bound_elsewhere(statement: ast.Assign, context: Context) -> bool:
    """Return whether an assignment's target is also bound elsewhere, and read without effects."""
    (target,) = statement.targets
    if not isinstance(target, ast.Name):
        return not any(isinstance(node, ast.Call | ast.NamedExpr) for node in ast.walk(target))
    module = context.module
    scope = module.scope(statement)
    if isinstance(scope, ast.ClassDef):
        return False
    return any(
        node is not target
        and (target.id in own_bindings(node) or target.id in imported_names([node]))
        and module.scope(node) is scope
        and not _rebinds(module.parents.get(node))
        for node in module.nodes
        if node is not scope
    )


def _stands_alone(node: ast.expr, text: str) -> bool:
    """Return whether an expression means the same anywhere, also on more than one line."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return False
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def _without_lines(node: ast.expr | ast.stmt, context: Context) -> Fix:
    text, module = context.module.text, context.module
    start, end = module.span(node)
    first, last = text.line_at(start), text.line_at(end)
    line_start, line_end = text.line_start(first), text.line_end(last)
    around = text.text[line_start:start].strip(" \t@") + text.text[end:line_end].strip()
    if around or module.comments(line_start, line_end):
        raise NotFixable("something else is on its lines")
    nothing = Passage.of("", module.origin(node))
    if line_end == len(text.text):  # the last line has no line break of its own
        return Fix((Edit(max(line_start - 1, 0), line_end, nothing),))
    return Fix((Edit(line_start, line_end + 1, nothing),))
