"""TPU119: a call that asks for the truth of traced values."""

import ast

from tpuport.rules._expressions import OPS
from tpuport.rules._origins import is_one_tensor, last_name
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_CHOICES = {"max": "largest", "min": "smallest"}
_OF_ITEMS = frozenset({"max", "min", "sorted", "any", "all"})
_NAMES = _OF_ITEMS | {"equal", "is_nonzero"}


class TruthInCall(Rule):
    """A call that asks for the truth of traced values without saying so.

    ## What it does
    Finds Python's `max(a, b)` and `min(a, b)` of values that depend on the program's inputs,
    `sorted`, `any`, `all`, `max` and `min` over the elements of such a tensor, `t in (1, 2)`,
    `0 in t`, `torch.equal` and `t.is_nonzero()`. The fix of `max(a, b)` calls
    `tpuport.ops.largest`, which compares in the program while it is traced.

    ## Why is this bad?
    These compare values and take the truth of the outcome. While a program is traced there is none
    yet, so they raise `ConcretizationTypeError`.

    ## Fix safety
    The fix is exact in eager PyTorch. Only `max` and `min` of several values, of a list or of a
    generator have one: over the elements of a tensor, torch's own `t.max()`, `t.any()` and
    `torch.sort` are better.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.ConcretizationTypeError
    """

    CODE = "TPU119"
    MESSAGE = "`{call}` decides by values that do not exist while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR
    LIVE = True

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, limit: float = 2.0):
                scale = max(x.abs().mean(), 0.5, x.std())
                y = x * min(limit, len(x))
                return y / scale, min(x.flatten()[-1], x.max())
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor, limit: float = 2.0):
                scale = tpuport.ops.largest(x.abs().mean(), 0.5, x.std())
                y = x * min(limit, len(x))
                return y / scale, tpuport.ops.smallest(x.flatten()[-1], x.max())
            """,
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x * max(x[0])
            """,
            left="torch has this for the elements of a tensor",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                kept = any(x[0] > 0)
                return x, kept
            """,
            left="torch has this for the elements of a tensor",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                known = x[0, 0].long() in (1, 2)
                return x, known
            """,
            left="torch.isin",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                mask = (x > 0).long()
                return x, mask if mask is not None and 0 in mask else None
            """,
            left="(mask == ...).any()",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                same = torch.equal(x, -x)
                return x, same
            """,
            jit_error="TracerBoolConversionError",
            left="as a tensor",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, names: list, parts: list[torch.Tensor], steps: int = 4):
            n = max(x.shape[0], steps, key=None) + min(x.shape) + max(len(part) for part in parts)
            if any(name in names for name in ("a", "b")) and all(p.ndim == 2 for p in parts):
                x = x.max(-1, keepdim=True).values + torch.any(x > 0)
            known = parts[0] not in ("none", "all") and x.dtype in (torch.float32, torch.float64)
            known = known and 3 in parts and 3 in x.shape
            return x * n, known, sum(parts), sorted(names)
        """,
        """
        import torch


        class Pool(torch.nn.Module):
            def max(self, x, y):
                return torch.maximum(x, y)

            def forward(self, x: torch.Tensor, y: torch.Tensor):
                return self.max(x, y) + torch.max(x, y) + x.max() + x.all()
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if _asks_truth(node, context):
            context.report(self, node, call=node)

    def visit_Compare(self, node: ast.Compare, context: Context) -> None:
        match node:
            case ast.Compare(ops=[ast.In() | ast.NotIn()], left=left, comparators=[items]):
                in_list = _is_list_of_numbers(items) and context.is_traced(left)
                if in_list or is_one_tensor(items, context):
                    context.report(self, node, call=node)
            case _:
                pass

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if isinstance(node, ast.Compare):
            items = node.comparators[0]
            better = (
                "torch.isin"
                if _is_list_of_numbers(items)
                else f"({ast.unparse(items)} == ...).any()"
            )
            raise NotFixable(f"{better} returns the answer as a tensor")
        assert isinstance(node, ast.Call)
        if not isinstance(node.func, ast.Name):
            raise NotFixable("(a == b).all() returns the answer as a tensor")
        if not _is_choice(node, context):
            raise NotFixable("torch has this for the elements of a tensor")
        helper = Passage.of(f"{OPS}.{_CHOICES[node.func.id]}", context.module.origin(node))
        return Fix((Edit(*context.module.span(node.func), helper),), (OPS,))


def _asks_truth(node: ast.Call, context: Context) -> bool:
    """Return whether a call takes the truth of traced values."""
    if last_name(node.func) not in _NAMES:
        return False
    return _is_choice(node, context) or _is_over_items(node, context) or _is_equal(node, context)


def _is_choice(node: ast.Call, context: Context) -> bool:
    """Return whether a call is Python's `max` or `min` of several values, one of them traced."""
    match node:
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[items], keywords=[]):
            # Only a trace knows that of what a list or generator gives.
            is_plain = not isinstance(items, ast.Starred) and not is_one_tensor(items, context)
            return is_plain and not context.module.binds_otherwise(name) and context.is_traced(node)
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_, _, *_], keywords=[]):
            # A trace records the call as traced, inference from source its arguments.
            return not context.module.binds_otherwise(name) and any(
                context.is_traced(value) for value in (node, *node.args)
            )
        case _:
            return False


def _is_over_items(node: ast.Call, context: Context) -> bool:
    """Return whether a call is one of Python's functions that compare a tensor's elements."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[items]) if name in _OF_ITEMS:
            return not context.module.binds_otherwise(name) and is_one_tensor(items, context)
        case _:
            return False


def _is_equal(node: ast.Call, context: Context) -> bool:
    """Return whether a call returns the truth of traced tensors as a Python bool."""
    match node:
        case ast.Call(func=ast.Attribute(attr="equal", value=value), args=[first, *_]):
            is_torch = context.name(node.func) == "torch.equal"
            return context.is_traced(first if is_torch else value)
        case ast.Call(func=ast.Attribute(value=value, attr="is_nonzero"), args=[]):
            return context.is_traced(value)
        case _:
            return False


def _is_list_of_numbers(items: ast.expr) -> bool:
    """Return whether items are written out and none is a string: text is looked up in text."""
    if not isinstance(items, ast.Tuple | ast.List):
        return False
    return not any(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in items.elts)
