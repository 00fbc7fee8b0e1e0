"""TPU111: a traced value where a size must be known."""

import ast
import builtins
from collections.abc import Iterator

from tpuport.rules._expressions import OPS
from tpuport.rules._masks import parts
from tpuport.rules._origins import last_name
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_ALL = range(99)
_AFTER_FIRST = range(1, 99)
_STEPS = range(2, 3)
# The positions of the sizes among the arguments; for methods without the tensor itself.
_FUNCTIONS: dict[str, range] = {
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn", "arange", "randint"), _ALL),
    **dict.fromkeys(("eye", "randperm"), _ALL),
    "full": range(1),
    **dict.fromkeys(("linspace", "logspace"), _STEPS),
    **dict.fromkeys(
        ("reshape", "tile", "broadcast_to", "narrow", "split", "chunk", "roll", "topk", "tril"),
        _AFTER_FIRST,
    ),
    **dict.fromkeys(("triu", "unflatten", "tensor_split"), _AFTER_FIRST),
}
_FUNCTIONAL: dict[str, range] = dict.fromkeys(("pad", "one_hot", "interpolate"), range(1, 2))
_METHODS: dict[str, range] = {
    **dict.fromkeys(("reshape", "view", "expand", "repeat", "tile", "broadcast_to"), _ALL),
    **dict.fromkeys(("unflatten", "narrow", "split", "chunk", "tensor_split", "roll"), _ALL),
    **dict.fromkeys(("topk", "unfold", "new_zeros", "new_ones", "new_empty", "tril"), _ALL),
    "triu": _ALL,
    "new_full": range(1),
}
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "data", "grad", "imag", "real", "shape"})
# A quick look at the name: nearly every call is of another function.
_NAMES = frozenset({*_FUNCTIONS, *_FUNCTIONAL, *_METHODS})
_KEYWORDS = frozenset(
    {
        "size",
        "steps",
        "start",
        "end",
        "step",
        "n",
        "m",
        "k",
        "chunks",
        "repeats",
        "shifts",
        "split_size_or_sections",
        "length",
        "num_classes",
        "pad",
        "low",
        "high",
        "diagonal",
        "shape",
    }
)


class TensorAsSize(Rule):
    """A traced value used as a size, a bound or a count.

    ## What it does
    Finds a tensor (or a number read from one) that depends on the program's inputs where a shape or
    a number of iterations is made of it: `range(t)`, `torch.zeros(t)`, `torch.arange(t)`,
    `x.reshape(t, -1)`, `x.topk(t)`, the bounds of a slice `x[:t]`, `[pad] * t`.

    ## Why is this bad?
    A program has static shapes: every size is known when it is traced, and a traced value is not.
    The call raises `ConcretizationTypeError`, `TracerBoolConversionError` or `TypeError`.

    ## Fix safety
    The fix of `F.one_hot(i, t)[..., :n]` is exact: it makes the first `n` columns alone, with the
    errors of `one_hot`. A program raises if `t` is less than `n`.

    There is no other automatic fix, since the result has another shape for every input. Take a
    bound that is known instead: build the largest case and mask what is too much
    (`torch.arange(bound) < t`, `torch.where`), or pass the size as a Python number.

    ## References
    https://docs.jax.dev/en/latest/notebooks/Common_Gotchas_in_JAX.html#dynamic-shapes
    """

    CODE = "TPU111"
    MESSAGE = "`{size}` decides a size, which has to be known when the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True

    EXAMPLES = (
        Example(
            before="""
            import torch
            import torch.nn.functional as F


            def forward(x: torch.Tensor, ids: torch.Tensor, n: int = 4):
                classes = torch.clamp(ids.max() + 1, min=n)
                return x @ F.one_hot(ids, classes)[..., :n].float()
            """,
            after="""
            import torch
            import torch.nn.functional as F
            import tpuport.ops


            def forward(x: torch.Tensor, ids: torch.Tensor, n: int = 4):
                classes = torch.clamp(ids.max() + 1, min=n)
                return x @ tpuport.ops.one_hot(F.one_hot)(ids, classes, n).float()
            """,
            inputs="(torch.randn(2, 3), torch.tensor([1, 5, 0]))",
            jit_error="TracerBoolConversionError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, lengths: torch.Tensor):
                longest = lengths.max()
                return x[:, :longest]
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, (3,)))",
            left="bound that is known",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, lengths: torch.Tensor):
                positions = torch.arange(lengths.max() + 1, device=x.device)
                return positions[None] < lengths[:, None]
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, (3,)))",
            jit_error="TracerBoolConversionError",
            left="bound that is known",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, rounds: torch.Tensor):
                for _ in range(rounds):
                    x = x * 0.5
                return x
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, ()))",
            left="bound that is known",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, groups: torch.Tensor):
                zeros = torch.zeros((groups, 4), device=x.device)
                return x.reshape(-1, 4) + zeros[:1]
            """,
            inputs="(torch.randn(3, 4), torch.randint(1, 4, ()))",
            jit_error="TypeError",
            left="bound that is known",
        ),
    )
    CLEAN = (
        """
        import torch
        import torch.nn.functional as F


        def forward(x: torch.Tensor, mask: torch.Tensor, steps: int = 4):
            b, n = x.shape[0], x.size(1)
            for i in range(n):
                mask = mask + i
            table = torch.arange(steps)
            size = table.max() + 1
            x = x[: b // 2, -n:].reshape(b // 2, *mask.shape[1:]).expand(b // 2, n)
            x = torch.full((b // 2, n), x.mean(), device=x.device) + x[:, table[0] :]
            return F.pad(x, (0, n), value=0.0)[: len(mask)].repeat(size, 1).view(mask.dtype)
        """,
        """
        import torch


        def forward(x: torch.Tensor, index: torch.Tensor, embed: torch.nn.Module, block):
            x, height, width = embed(x)
            x = x.view(-1, height * width, block.num_heads).to(block.norm(x).mean().dtype)
            y = x[index] + x[:, 0, None].roll(1, dims=0)
            return torch.linspace(0, x.max(), 5, device=x.device), y.clamp(x.min(), x.max())
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if _classes_of_columns(context.module.parents.get(node), context) is not None:
            return
        for size in _size_arguments(node, context):
            if context.is_traced(size) and _is_of_a_tensor(size, context):
                context.report(self, size, size=size)
                return

    def visit_Subscript(self, node: ast.Subscript, context: Context) -> None:
        classes = _classes_of_columns(node, context)
        # A trace records the call as traced, inference from source the number of classes.
        traced = node.value if context.imports_inside else classes
        if classes is not None and traced is not None and context.is_traced(traced):
            context.report(self, node, size=classes)
            return
        for bound in _bounds(node):
            if context.is_traced(bound) and _is_of_a_tensor(bound, context):
                context.report(self, bound, size=bound)
                return

    def visit_BinOp(self, node: ast.BinOp, context: Context) -> None:
        match node:
            case (
                ast.BinOp(op=ast.Mult(), left=ast.List(), right=count)
                | ast.BinOp(op=ast.Mult(), left=count, right=ast.List())
            ) if context.is_traced(count) and _is_of_a_tensor(count, context):
                context.report(self, count, size=count)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        match node:
            case ast.Subscript(
                value=ast.Call() as call,
                slice=ast.Tuple(elts=[_, ast.Slice(upper=ast.expr() as n)]),
            ) if _classes_of_columns(node, context) is not None:
                source, origin = context.module, context.module.origin(node)
                start, end = source.span(call.func)
                wrapped = f"{OPS}.one_hot({source.source(call.func)})"
                function = Edit(start, end, Passage.of(wrapped, origin))
                start, end = source.span(call.args[-1])[1], source.span(node)[1]
                rest = Edit(start, end, Passage.of(f", {source.source(n)})", origin))
                return Fix((function, rest), (OPS,))
            case _:
                pass
        raise NotFixable("the shape of the result depends on data; take a bound that is known")


def _classes_of_columns(node: ast.AST | None, context: Context) -> ast.expr | None:
    """Return the number of classes of `F.one_hot(i, classes)[..., :n]`."""
    match node:
        case ast.Subscript(
            value=ast.Call(func=function, args=[_, classes], keywords=[]),
            slice=ast.Tuple(
                elts=[ast.Constant(value=builtins.Ellipsis), ast.Slice(None, ast.expr(), None)]
            ),
            ctx=ast.Load(),
        ) if last_name(function) == "one_hot":
            # A trace sees the function's own text alone, so the helper compares the functions.
            is_known = context.name(function) == "torch.nn.functional.one_hot"
            return classes if is_known or context.imports_inside else None
        case _:
            return None


def _bounds(node: ast.Subscript) -> Iterator[ast.expr]:
    indices = parts(node.slice)
    for index in indices:
        if isinstance(index, ast.Slice):
            yield from (b for b in (index.lower, index.upper, index.step) if b is not None)
    if isinstance(node.value, ast.List):
        # An index of a Python list has to be known, that of a tensor need not.
        yield from (index for index in indices if not isinstance(index, ast.Slice))


def _size_arguments(node: ast.Call, context: Context) -> Iterator[ast.expr]:
    """Yield the expressions of a call that decide a size; those of a tuple or list one by one."""
    positions = _positions(node, context)
    if positions is None:
        return
    for index, argument in enumerate(node.args):
        if index in positions:
            yield from _elements(argument)
    for keyword in node.keywords:
        if keyword.arg in _KEYWORDS and not (positions == _STEPS and keyword.arg != "steps"):
            yield from _elements(keyword.value)


def _is_of_a_tensor(size: ast.expr, context: Context) -> bool:
    """Return whether a size that counts as traced is surely computed from a tensor.

    It is not if it reads an attribute that no tensor has, such as `attn.num_heads`, or one of
    several results of an unknown call: `x, height, width = self.embed(x)`.
    """
    called = {node.func for node in ast.walk(size) if isinstance(node, ast.Call)}
    for node in ast.walk(size):
        match node:
            case ast.Attribute(attr=name, value=value) if node not in called:
                is_own = isinstance(value, ast.Name) and value.id == "self"
                if not is_own and name not in _TENSOR_ATTRIBUTES:
                    return False
            case ast.Name() if context.is_traced(node) and _is_one_of_several(node, context):
                return False
            case _:
                pass
    return True


def _is_one_of_several(name: ast.Name, context: Context) -> bool:
    """Return whether a name is bound by unpacking the result of an unknown call."""
    function = context.module.function(name)
    for node in () if function is None else context.module.inside(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call() as call):
                bound = any(isinstance(t, ast.Name) and t.id == name.id for t in targets)
                if bound and not _is_of_torch(call, context):
                    return True
            case _:
                pass
    return False


def _is_of_torch(call: ast.Call, context: Context) -> bool:
    if (context.name(call.func) or "").startswith("torch."):
        return True
    return isinstance(call.func, ast.Attribute) and context.is_traced(call.func.value)


def _positions(node: ast.Call, context: Context) -> range | None:
    function = node.func
    if isinstance(function, ast.Name) and function.id == "range":
        return None if context.module.binds_otherwise("range") else _ALL
    if last_name(function) not in _NAMES:
        return None
    name = context.name(function)
    if name is not None:
        root, _, last = name.rpartition(".")
        table = {"torch": _FUNCTIONS, "torch.nn.functional": _FUNCTIONAL}.get(root, {})
        return table.get(last)
    if isinstance(function, ast.Attribute) and context.is_traced(function.value):
        return _METHODS.get(function.attr)
    return None


def _elements(argument: ast.expr) -> Iterator[ast.expr]:
    match argument:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _elements(part)
        case ast.Starred(value=value):
            yield value
        case _:
            yield argument
