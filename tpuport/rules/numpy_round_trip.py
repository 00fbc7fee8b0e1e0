"""TPU310: a traced tensor handed to numpy or scipy, or moved to the host."""

import ast
from collections.abc import Iterator

from tpuport.rules._expressions import OPS
from tpuport.rules._receivers import wrapped
from tpuport.rules._rule import Example, Rule
from tpuport.source.inference.kinds import Kind
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

_METHODS = frozenset({"numpy", "item", "tolist", "cpu", "to"})
# These read the shape of a tensor only.
_SHAPES = frozenset({"numpy.shape", "numpy.ndim"})
_LIBRARIES = ("numpy.", "scipy.")


class NumpyRoundTrip(Rule):
    """A traced tensor handed to numpy or scipy, or moved to the host.

    ## What it does
    Finds `t.numpy()`, `t.cpu()`, `t.to("cpu")` and functions of numpy and scipy called with a
    tensor that depends on the program's inputs, in code that is part of a step. The fix of
    `t.cpu()` calls `tpuport.ops.to_cpu`, which moves the tensor in eager PyTorch and leaves it
    where it is while a program is traced.

    ## Why is this bad?
    While a program is traced the tensor has no value yet, so the call raises
    `TracerArrayConversionError`. In eager mode each such call waits for the device.

    ## Fix safety
    The fix is exact in eager PyTorch. There is none for numpy: torch has most of its functions,
    but not always with the same dtype of the result. What only scipy has, such as an assignment or
    a spline, belongs before or after the step.

    ## References
    https://docs.jax.dev/en/latest/errors.html#jax.errors.TracerArrayConversionError
    """

    CODE = "TPU310"
    MESSAGE = "`{call}` takes a value to the host that does not exist while the program is traced"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                y = x.detach().cpu() * 2  # on the host
                z = (x + 1).to("cpu")
                return y + z.to(device="cpu")
            """,
            after="""
            import torch
            import tpuport.ops


            def forward(x: torch.Tensor):
                y = tpuport.ops.to_cpu(x.detach()) * 2  # on the host
                z = tpuport.ops.to_cpu((x + 1))
                return y + tpuport.ops.to_cpu(z)
            """,
            jit_error="TracerArrayConversionError",
        ),
        Example(
            before="""
            import numpy as np
            import torch


            def forward(x: torch.Tensor):
                array = x.detach().cpu().numpy()
                return x + torch.from_numpy(np.fft.fftshift(array))
            """,
            jit_error="TracerArrayConversionError",
            left="is numpy's",
        ),
        Example(
            before="""
            import numpy as np
            import torch


            def forward(x: torch.Tensor):
                return x * torch.as_tensor(np.sqrt(x.abs()))
            """,
            jit_error="TracerArrayConversionError",
            left="is numpy's",
        ),
        Example(
            before="""
            import torch
            from scipy.ndimage import gaussian_filter


            def forward(x: torch.Tensor):
                return x * torch.as_tensor(gaussian_filter(x, 1.0))
            """,
            jit_error="TracerArrayConversionError",
            left="it is scipy's",
        ),
        Example(
            before="""
            import torch

            WAYS = {"sum": torch.sum}


            def forward(x: torch.Tensor, way: str = "sum"):
                return x * WAYS[way](x).cpu().item()
            """,
            jit_error="TracerArrayConversionError",
            left="it is not known what it is called on",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x.to("cpu", torch.float64)
            """,
            jit_error="TracerArrayConversionError",
            left="it also changes the dtype or makes a copy",
        ),
    )
    CLEAN = (
        """
        import numpy as np
        import torch
        from numpy import argsort
        from scipy.stats import rankdata


        def forward(x: torch.Tensor, table: np.ndarray, y, device="cpu"):
            scale = np.sqrt(x.shape[-1]) * float(np.prod(x.shape)) + np.ndim(x)
            noise = torch.from_numpy(np.linspace(0, 1, 4, dtype=np.float32)).to(x.device)
            weights = torch.arange(4).cpu().numpy()
            order = argsort(list(x.shape)) + rankdata(weights)[0]
            return x.to(torch.float32) * scale + noise.to(x) + np.float32(2) + float(order[0])
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if _takes_to_host(node, context):
            context.report(self, node, call=node)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        name = context.name(node.func) or "numpy"
        if not isinstance(node.func, ast.Attribute) or name.startswith(_LIBRARIES):
            raise NotFixable(f"it is {name.partition('.')[0]}'s")
        if node.func.attr in ("item", "tolist"):
            raise NotFixable("it is not known what it is called on")
        if node.func.attr not in ("cpu", "to"):
            raise NotFixable(f"{ast.unparse(node.func)} is numpy's")
        if len(node.args) + len(node.keywords) > 1 or (node.func.attr == "cpu" and node.args):
            raise NotFixable("it also changes the dtype or makes a copy")
        return Fix(wrapped(node, f"{OPS}.to_cpu", context), (OPS,))


def _takes_to_host(node: ast.Call, context: Context) -> bool:
    """Return whether a call moves a traced tensor to the host or passes it to numpy."""
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in _METHODS:
        return _moves(node, function, context)
    name = context.name(function) or ""
    if not name.startswith(_LIBRARIES) or name in _SHAPES:
        return False
    return any(context.is_traced(argument) for argument in _arguments(node))


def _moves(node: ast.Call, function: ast.Attribute, context: Context) -> bool:
    """Return whether a call of one of `_METHODS` moves a traced tensor."""
    match function:
        case ast.Attribute(
            attr="numpy" | "item" | "tolist",
            value=ast.Call(func=ast.Attribute(attr="cpu", value=value)),
        ) if context.kind(value) is Kind.UNKNOWN:
            # A module has none of these methods, and a value known to Python needs no `.cpu()`.
            return context.in_step(node)
        case ast.Attribute(value=value, attr="numpy"):
            return context.is_traced(value)
        case ast.Attribute(value=value, attr="cpu"):
            return context.is_traced(value) and not _becomes_numpy(node, context)
        case ast.Attribute(value=value, attr="to") if _names_cpu(node):
            return context.is_traced(value) and not _becomes_numpy(node, context)
        case _:
            return False


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
        if isinstance(argument, ast.List | ast.Tuple):
            yield from argument.elts
        else:
            yield argument


def _names_cpu(node: ast.Call) -> bool:
    devices = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "device")]
    return any(isinstance(d, ast.Constant) and d.value == "cpu" for d in devices)


def _becomes_numpy(node: ast.Call, context: Context) -> bool:
    """Return whether a later call of the chain is `.numpy()`, which is reported instead."""
    parents = context.module.parents
    outer: ast.AST = node
    while isinstance(attribute := parents[outer], ast.Attribute):
        outer = parents[attribute]
        if not isinstance(outer, ast.Call) or outer.func is not attribute:
            return False
        if attribute.attr == "numpy":
            return True
    return False
