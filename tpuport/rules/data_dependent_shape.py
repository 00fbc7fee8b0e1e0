"""TPU212: a shape that depends on traced values."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._following import RowFix
from tpuport.rules._masks import is_python_number, severity
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

# For each name the position of the argument that decides the size (0 is also the tensor that a
# method is called on), and the keywords under which it may be passed.
_COUNTED: dict[str, tuple[int, tuple[str, ...]]] = {
    "argwhere": (0, ("input",)),
    "bincount": (0, ("input",)),
    "combinations": (0, ("input",)),
    "masked_select": (1, ("mask",)),
    "nonzero": (0, ("input",)),
    "nonzero_static": (0, ("input",)),
    "unique": (0, ("input",)),
    "unique_consecutive": (0, ("input",)),
}
_METHODS = (frozenset(_COUNTED) | {"repeat_interleave"}) - {"combinations"}
_KNOWN = _METHODS | {"combinations", "one_hot", "where"}


class DataDependentShape(Rule):
    """A tensor whose shape depends on traced values.

    ## What it does
    Finds `nonzero`, `argwhere`, `torch.where(condition)`, `masked_select`, `unique`,
    `unique_consecutive`, `bincount`, `one_hot` without a number of classes and `repeat_interleave`
    with a tensor of repeats. A `masked_select` whose elements are reduced is rewritten with
    `tpuport.ops.masked_select`.

    ## Why is this bad?
    Every array of a traced program has a shape that is known before any value is, so torchax raises
    `ConcretizationTypeError`. That also holds where the code could state the size: for `bincount`
    with `minlength`, and `nonzero_static`.

    ## Fix safety
    The fix is exact in eager PyTorch; a program adds in another order. For the other calls there is
    none: `torch.where` with three arguments, a `topk` of fixed size, or counting with
    `one_hot(x, n).sum(0)` replace them. Code that packs tokens for flash attention is only noted:
    it never runs without a CUDA device.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU212"
    MESSAGE = "the shape of `{made}` depends on `{decides}`, which has no value while tracing"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                low = torch.masked_select(x, x < 0).sum()
                return low + x.masked_select(x > 0).mean()
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                low = tpuport.ops.masked_select(x, x < 0).sum()
                return low + tpuport.ops.masked_select(x, x > 0).mean()
            """,
        ),
        *(
            Example(
                before=f"""
                import torch


                def forward(x: torch.Tensor, ids: torch.Tensor):
                    return {code}
                """,
                inputs="(torch.randn(3, 4), torch.arange(3))",
                jit_error=error,
                left=left,
            )
            for code, error, left in (
                ("x[torch.nonzero(ids).flatten()]", "ConcretizationTypeError", "no fix"),
                ("torch.where(x > 0)", "ConcretizationTypeError", "no fix"),
                ("torch.bincount(ids, minlength=4)", "ConcretizationTypeError", "no fix"),
                ("ids.unique(), x", "ConcretizationTypeError", "no fix"),
                ("x.repeat_interleave(ids, dim=0)", "ConcretizationTypeError", "no fix"),
                ("torch.nn.functional.one_hot(ids)", "ConcretizationTypeError", "no fix"),
                ("torch.combinations(x[0])", "ConcretizationTypeError", "no fix"),
                ("x.nonzero_static(size=4)", "ConcretizationTypeError", "no fix"),
                ("x.masked_select(x > 0)", "ConcretizationTypeError", "returns as many rows"),
            )
        ),
    )
    CLEAN = (
        """
        import numpy as np
        import torch
        import torch.nn.functional as F


        def forward(x: torch.Tensor, ids: torch.Tensor, names: list, n: int = 3):
            size = x.shape[0]
            one_hot = F.one_hot(ids, num_classes=n) + F.one_hot(ids, n)
            chosen = torch.where(x > 0, x, 0)[: size - 1, :n]
            twice = x.repeat_interleave(2, dim=0).repeat_interleave(repeats=n, dim=1)
            steps = torch.arange(size, device=x.device) + torch.full((n,), 0.5).sum()
            even = torch.nonzero(torch.arange(n) % 2 == 0).flatten()
            return one_hot, chosen, twice, steps, x[even], torch.histc(x), names[:n]
        """,
        """
        import numpy as np
        import torch


        def forward(x: torch.Tensor, table: np.ndarray):
            found = np.unique(table), np.where(table > 0), table.nonzero()
            filled = torch.full((2,), 1.0) + torch.linspace(0, 1, x.shape[1])[:2]
            total = x.count_nonzero() + torch.isin(x, x).sum()
            return found, filled, total, x.new_zeros(x.shape[0], 2), torch.full_like(x, 2)


        def unpad(mask: torch.Tensor):
            return mask.sum(-1), torch.nonzero(mask.flatten()).flatten()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        decides = _why_dynamic(node, context)
        if decides is not None:
            context.report(self, node, severity=severity(node, context), made=node, decides=decides)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        function = node.func if isinstance(node, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else ""
        if not isinstance(node, ast.Call) or name != "masked_select" or node.keywords:
            raise NotFixable("this has no fix: choose a size that holds for every input")
        assert isinstance(function, ast.Attribute)
        rows = RowFix(node, context)
        rows.follow(node)
        start, end = context.module.span(function)
        origin = context.module.origin(node)
        edit = Edit(start, end, Passage.of(f"{OPS}.masked_select", origin))
        if context.name(function) is None:
            opening = context.module.token_after(end, "(") + 1
            call = Passage.of(f"{OPS}.masked_select(", origin)
            receiver = context.module.copy_node(function.value)
            edit = Edit(start, opening, call + receiver + ", ")
        rows.edits[start, end] = edit
        return rows.fix()


def _why_dynamic(call: ast.Call, context: Context) -> str | None:
    """Return the source of what the size of a call's result depends on, or None if it is static."""
    name, arguments = _called(call, context)
    if name is None:
        return None
    if name in _COUNTED:
        position, keywords = _COUNTED[name]
        decides = _argument(call, arguments, position, keywords)
        return _text(decides) if _is_value(decides, context) else None
    if name in ("where", "one_hot"):
        return _of_where_or_one_hot(name, call, arguments, context)
    return _of_repeat(call, arguments, context)


def _called(call: ast.Call, context: Context) -> tuple[str | None, list[ast.expr]]:
    """Return the name of torch's function and all its arguments, a method's tensor first."""
    function = call.func
    last = function.attr if isinstance(function, ast.Attribute) else ""
    if isinstance(function, ast.Name):
        last = (context.name(function) or "").rpartition(".")[2]
    if last not in _KNOWN or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None, []
    name = context.name(function)
    if name is not None:
        is_torch = name.rpartition(".")[0] in ("torch", "torch.nn.functional", "torch.Tensor")
        return (last if is_torch else None), call.args
    if last not in _METHODS or not isinstance(function, ast.Attribute):
        return None, []
    is_traced = context.is_traced(function.value)
    return (last if is_traced else None), [function.value, *call.args]


def _argument(
    call: ast.Call, arguments: list[ast.expr], position: int, keywords: tuple[str, ...]
) -> ast.expr | None:
    if position < len(arguments):
        return arguments[position]
    return next((k.value for k in call.keywords if k.arg in keywords), None)


def _is_value(node: ast.expr | None, context: Context) -> bool:
    return node is not None and context.is_traced(node) and not is_python_number(node, context)


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _of_where_or_one_hot(
    name: str, call: ast.Call, arguments: list[ast.expr], context: Context
) -> str | None:
    if not arguments or not _is_value(arguments[0], context):
        return None
    if name == "where":
        return _text(arguments[0]) if len(arguments) == 1 and not call.keywords else None
    classes = _argument(call, arguments, 1, ("num_classes",))
    if classes is None or ast.unparse(classes) == "-1":
        return f"the largest of {_text(arguments[0])}"
    return None


def _of_repeat(call: ast.Call, arguments: list[ast.expr], context: Context) -> str | None:
    repeats = _argument(call, arguments, 1, ("repeats",))
    if repeats is None and len(arguments) == 1:
        repeats = arguments[0]
    return _text(repeats) if _is_value(repeats, context) else None
