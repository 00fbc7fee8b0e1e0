"""TPU112: a Python loop over the rows of a traced tensor."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpuport.rules._masks import parts
from tpuport.rules._origins import bound_values, is_one_tensor
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.statements import walk_scope

Loop = ast.For | ast.comprehension


class UnrolledLoop(Rule):
    """A Python loop over the rows of a traced tensor.

    ## What it does
    Finds `for row in x` (also through `enumerate`, `zip` and `x.unbind()`) and
    `for i in range(x.shape[1])` with `x[:, i]` in its body, where `x` depends on the program's
    inputs. A loop over a batch by its index, `x[i]`, is only a note.

    ## Why is this bad?
    Python runs the loop while the program is traced, so the program holds its body once for each
    row: tracing and compiling take longer with every row, a changed number of rows means a retrace,
    and the device works on one row at a time.

    ## Fix safety
    There is no automatic fix. Write the body for all rows at once, or use `torch.vmap`; where one
    iteration needs the result of the one before, `tpuport.ops.while_loop`.

    ## References
    https://docs.jax.dev/en/latest/jit-compilation.html
    """

    CODE = "TPU112"
    MESSAGE = "the program holds the body of this loop once for each row of `{tensor}`"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor, w: torch.Tensor):
                found = []
                for i, row in enumerate(x):
                    found.append(row @ w + i)
                return torch.stack(found)
            """,
            inputs="(torch.randn(3, 4), torch.randn(4, 4))",
            jit_error=None,
            harm="unrolls",
            left="for all rows at once",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                rows, width = x.shape
                y = torch.zeros_like(x)
                for i in range(1, width):
                    y[:, i] = y[:, i - 1] * 0.5 + x[:, i]
                return y
            """,
            jit_error=None,
            harm="unrolls",
            left="for all rows at once",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return torch.stack([x[i] * i for i in range(len(x))])
            """,
            jit_error=None,
            harm="unrolls",
            left="for all rows at once",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, layers: list, parts: tuple[torch.Tensor, ...], steps: int = 4):
            for layer in layers:
                x = layer(x)
            for i in range(steps):
                x = x + parts[i]
            for part in x.chunk(2, dim=-1):
                x = x + part.sum()
            sizes = [size for size in x.shape]
            for i in range(x.ndim):
                sizes[i] = x.shape[i]
            total = sum(part.mean() for part in parts)
            for a, b in zip(parts, torch.meshgrid(x[0], x[0], indexing="ij")):
                total = total + a.sum() + b.sum()
            return x, total
        """,
        """
        import torch


        def forward(x: torch.Tensor, xs: list[torch.Tensor], y: torch.Tensor, tile: int = 2):
            b, n = x.shape
            if isinstance(y, (list, tuple)):
                return [part + 1 for part in y]
            for i in range(x.shape[-1]):
                xs.append(x[..., i])
            for i in range(0, n, tile):
                xs.append(x[:, i : i + tile])
            for part, known in zip(x, xs):
                xs.append(part + known)
            halves = torch.split(x, n // 2, dim=1)
            for i in range(b):
                xs.append(xs[i] + 1)
            return [half * 2 for half in halves] + [y for y in xs]
        """,
    )

    def visit_For(self, node: ast.For, context: Context) -> None:
        self._visit(node, node.body, context)

    def visit_comprehension(self, node: ast.comprehension, context: Context) -> None:
        self._visit(node, [context.module.parents[node]], context)

    def _visit(self, node: Loop, body: Sequence[ast.AST], context: Context) -> None:
        if context.in_step(node.iter):
            rows = _rows_of(node, body, context)
            if rows is not None:
                severity = Severity.NOTE if rows.of_batch else self.SEVERITY
                context.report(self, node.iter, severity=severity, tensor=rows.tensor)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        del node, context
        raise NotFixable("its body has to be written for all rows at once")


@dataclass(frozen=True)
class _Rows:
    """The tensor whose rows a loop takes one by one.

    Attributes:
        tensor: The tensor.
        of_batch: Whether it indexes the first dimension. Such a loop is often written on purpose,
            since a batch may be short.
    """

    tensor: ast.expr
    of_batch: bool = False


def _rows_of(node: Loop, body: Sequence[ast.AST], context: Context) -> _Rows | None:
    """Return the traced tensor whose rows a loop takes one by one, if there is one."""
    tensor = next(_iterated(node.iter, context), None)
    return _indexed(node, body, context) if tensor is None else _Rows(tensor)


def _iterated(iterated: ast.expr, context: Context) -> Iterator[ast.expr]:
    """Yield the tensors whose rows a loop runs over."""
    match iterated:
        case ast.Call(func=ast.Name(id="enumerate" | "reversed"), args=[part, *_]):
            yield from _iterated(part, context)
        case ast.Call(func=ast.Name(id="zip"), args=parts):
            # Next to a list, a value annotated as a tensor is often a list of tensors, too.
            found = [tensor for part in parts for tensor in _iterated(part, context)]
            if len(found) == len(parts):
                yield from found
        case ast.Call(func=ast.Attribute(attr="unbind", value=value)):
            if context.name(iterated.func) == "torch.unbind" and iterated.args:
                value = iterated.args[0]
            if is_one_tensor(value, context):
                yield value
        case _ if is_one_tensor(iterated, context):
            yield iterated
        case _:
            pass


def _indexed(node: Loop, body: Sequence[ast.AST], context: Context) -> _Rows | None:
    """Return the tensor that a loop over its length indexes by the loop's counter."""
    match node:
        case (
            ast.For(target=ast.Name(id=index), iter=iterated)
            | ast.comprehension(target=ast.Name(id=index), iter=iterated)
        ):
            pass
        case _:
            return None
    match iterated:
        case ast.Call(func=ast.Name(id="range"), args=[stop] | [_, stop]):
            pass
        case _:
            return None
    for inner in walk_scope(body):
        if isinstance(inner, ast.Subscript) and _takes_element(inner.slice, index):
            if is_one_tensor(inner.value, context) and _is_length(stop, context):
                is_first = _takes_element(parts(inner.slice)[0], index)
                return _Rows(inner.value, of_batch=is_first)
    return None


def _takes_element(index: ast.expr, name: str) -> bool:
    """Return whether an index takes one element by a name; a slice takes a tile instead."""
    return any(
        isinstance(inner, ast.Name) and inner.id == name
        for part in parts(index)
        if not isinstance(part, ast.Slice)
        for inner in ast.walk(part)
    )


def _is_length(node: ast.expr, context: Context) -> bool:
    """Return whether an expression is the length of a traced tensor along some dimension."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[tensor]):
            return is_one_tensor(tensor, context)
        case ast.Call(func=ast.Attribute(attr="size", value=tensor), args=[dim]):
            return context.is_traced(tensor) and not _is_last(dim)
        case ast.Subscript(value=ast.Attribute(attr="shape", value=tensor), slice=dim):
            return context.is_traced(tensor) and not _is_last(dim)
        case ast.Name():
            values = bound_values(node, context)
            if values is not None:
                return all(_is_length(value, context) for value in values)
            return _unpacked(node, context)
        case _:
            return False


def _is_last(dim: ast.expr) -> bool:
    """Return whether a dimension is the last one: often coordinates, so never many."""
    match dim:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
        case _:
            return False


def _unpacked(name: ast.Name, context: Context) -> bool:
    """Return whether a name is bound once, by unpacking the shape of a traced tensor."""
    function = context.module.function(name)
    found = [
        inner.value
        for inner in walk_scope([] if function is None else function.body)
        if isinstance(inner, ast.Assign)
        and isinstance(inner.targets[0], ast.Tuple)
        and any(isinstance(e, ast.Name) and e.id == name.id for e in inner.targets[0].elts)
    ]
    match found:
        case [ast.Attribute(attr="shape", value=tensor)]:
            return context.is_traced(tensor)
        case [ast.Call(func=ast.Attribute(attr="size", value=tensor), args=[])]:
            return context.is_traced(tensor)
        case _:
            return False
