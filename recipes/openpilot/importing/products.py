"""Matrix products and convolutions.

With a constant weight they become torch's own modules, to which adapters (DoRA) can be attached.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from recipes.openpilot.importing.nodes import (
    Built,
    Constant,
    Node,
    Origin,
    Variable,
    builds,
    lifted,
)

_CONVS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
_TRANSPOSED = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d, 5: nn.ConvTranspose3d}


def _apply(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def _linear(
    node: Node, x: Variable, weight: Constant, bias: Constant | None, transposed: bool
) -> Built:
    """Build an `nn.Linear` of a weight (in, out), or (out, in) if it is transposed."""
    array, origin = weight.array, weight.origin
    if not transposed:
        array = array.T
        origin = None if origin is None else origin.permuted((1, 0))
    module = nn.Linear(array.shape[1], array.shape[0], bias=bias is not None)
    origins = {"weight": origin}
    with torch.no_grad():
        module.weight.copy_(as_float(array))
        if bias is not None:
            module.bias.copy_(as_float(bias.array.reshape(-1)))
            origins["bias"] = (
                None if bias.origin is None else bias.origin.reshaped((bias.array.size,))
            )
    return Built(_apply, [x.name], module, origins)


def as_float(array: np.ndarray) -> torch.Tensor:
    """Return a constant as a float32 tensor with its own memory."""
    return torch.from_numpy(np.array(array, np.float32))


@builds("Gemm")
def gemm(node: Node) -> Built:
    """Build alpha A B + beta C, as an `nn.Linear` if it has that form."""
    a, b, c = node.value(0), node.value(1), node.input(2)
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    plain = not node.attr("transA", 0) and alpha == 1.0 and (beta == 1.0 or c is None)
    if isinstance(a, Variable) and isinstance(b, Constant) and plain:
        width = b.shape[0] if node.attr("transB", 0) else b.shape[1]
        if c is None or (isinstance(c, Constant) and c.array.size == width == c.shape[-1]):
            return _linear(node, a, b, c, bool(node.attr("transB", 0)))
    turn = (bool(node.attr("transA", 0)), bool(node.attr("transB", 0)))
    by = 2 - len(c.shape) if isinstance(c, Variable) else 0
    call = partial(_gemm, turn=turn, alpha=alpha, beta=beta, by=by)
    operands = [v.name if isinstance(v, Variable) else node.register(v) for v in (a, b)]
    if c is not None:
        operands.append(c.name if isinstance(c, Variable) else node.register(c))
    return Built(call, operands)


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    turn: tuple[bool, bool],
    alpha: float,
    beta: float,
    by: int,
) -> torch.Tensor:
    a = a.transpose(-1, -2) if turn[0] else a
    b = b.transpose(-1, -2) if turn[1] else b
    product = torch.matmul(a, b)
    product = product if alpha == 1.0 else alpha * product
    if c is None:
        return product
    more = lifted(c, by)
    return product + (more if beta == 1.0 else beta * more)


@builds("MatMul")
def matmul(node: Node) -> Built:
    """Build a product, as an `nn.Linear` if the right side is a constant matrix."""
    a, b = node.value(0), node.value(1)
    if isinstance(a, Variable) and isinstance(b, Constant) and len(b.shape) == 2 and a.shape:
        return _linear(node, a, b, None, False)
    if not a.shape or not b.shape:
        raise node.refuse("a side has no axes")
    rows, columns = (
        len(a.shape) == 1,
        len(b.shape) == 1,
    )  # whether a side is a vector, to be made a matrix
    rank = max(len(a.shape), len(b.shape), 2)
    by = tuple(
        rank - len(v.shape) - line if isinstance(v, Variable) else 0
        for v, line in ((a, rows), (b, columns))
    )
    call = partial(_matmul, rows=rows, columns=columns, by=by)
    return Built(call, [v.name if isinstance(v, Variable) else node.register(v) for v in (a, b)])


def _matmul(
    a: torch.Tensor, b: torch.Tensor, rows: bool, columns: bool, by: tuple[int, ...]
) -> torch.Tensor:
    a = a.unsqueeze(-2) if rows else a
    b = b.unsqueeze(-1) if columns else b
    product = torch.matmul(lifted(a, by[0]), lifted(b, by[1]))
    product = product.squeeze(-1) if columns else product
    return product.squeeze(-1 if columns else -2) if rows else product


@builds("Einsum")
def einsum(node: Node) -> Built:
    """Build sums of products by letters, with one more letter for the batch."""
    equation = node.attr("equation").replace(" ", "")
    if "->" not in equation or "..." in equation:
        raise node.refuse(f"the equation {equation!r} is not written out")
    given, result = equation.split("->")
    batch = next(letter for letter in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in equation)
    values = [node.value(i) for i in range(len(node.inputs))]
    terms = [
        batch + term if isinstance(value, Variable) else term
        for term, value in zip(given.split(","), values, strict=True)
    ]
    operands = [v.name if isinstance(v, Variable) else node.register(v) for v in values]
    return Built(partial(torch.einsum, f"{','.join(terms)}->{batch}{result}"), operands)


# -- convolutions ----------------------------------------------------------------------------------


def window_pads(
    node: Node, sizes: Sequence[int], kernel: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the padding before and after each axis of a picture, `auto_pad` included."""
    strides = node.attr("strides") or (1,) * len(sizes)
    auto = node.attr("auto_pad", "NOTSET")
    if auto == "NOTSET":
        pads = node.attr("pads") or (0,) * (2 * len(sizes))
        return tuple(zip(pads[: len(sizes)], pads[len(sizes) :], strict=True))
    if auto == "VALID":
        return ((0, 0),) * len(sizes)
    found = []
    for size, width, dilation, stride in zip(sizes, kernel, dilations, strides, strict=True):
        reach = (width - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        less = total // 2
        found.append((less, total - less) if auto == "SAME_UPPER" else (total - less, less))
    return tuple(found)


def torch_pads(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Return pads in the order of `F.pad`: the last axis first."""
    return [end for ends in reversed(pads) for end in ends]


@builds("Conv")
def conv(node: Node) -> Built:
    """Build an `nn.Conv1d`, `2d` or `3d`. Uneven padding is a separate `F.pad`."""
    x, weight, bias = node.variable(0), node.value(1), node.input(2)
    if isinstance(weight, Variable) or isinstance(bias, Variable):
        raise node.refuse("its weight is computed from the inputs of the model")
    if len(weight.shape) not in _CONVS:
        raise node.refuse(f"a weight of shape {weight.shape}")
    kernel = weight.shape[2:]
    dilations = tuple(node.attr("dilations") or (1,) * len(kernel))
    pads = window_pads(node, x.shape[2:], kernel, dilations)
    even = all(low == high for low, high in pads)
    groups = node.attr("group", 1)
    module: nn.Module = _CONVS[len(weight.shape)](
        weight.shape[1] * groups,
        weight.shape[0],
        kernel,
        tuple(node.attr("strides") or (1,) * len(kernel)),
        tuple(low for low, _ in pads) if even else 0,
        dilations,
        groups,
        bias is not None,
    )
    call = partial(_conv, pads=None if even else torch_pads(pads))
    return Built(call, [x.name], module, _fill(module, weight, bias))


def _fill(module: Any, weight: Constant, bias: Constant | None) -> dict[str, Origin | None]:
    with torch.no_grad():
        module.weight.copy_(as_float(weight.array))
        if bias is None:
            return {"weight": weight.origin}
        module.bias.copy_(as_float(bias.array))
    return {"weight": weight.origin, "bias": bias.origin}


def _conv(module: nn.Module, x: torch.Tensor, pads: list[int] | None) -> torch.Tensor:
    images = x.flatten(0, 1)  # the batch, and the graph's own
    if pads is not None:
        images = F.pad(images, pads)
    return module(images).unflatten(0, x.shape[:2])


@builds("ConvTranspose")
def conv_transpose(node: Node) -> Built:
    """Build an `nn.ConvTranspose1d`, `2d` or `3d`."""
    x, weight, bias = node.variable(0), node.value(1), node.input(2)
    if isinstance(weight, Variable) or isinstance(bias, Variable):
        raise node.refuse("its weight is computed from the inputs of the model")
    if node.attr("output_shape") or node.attr("auto_pad", "NOTSET") != "NOTSET":
        raise node.refuse("output_shape or auto_pad is given")
    kernel = weight.shape[2:]
    ones = (1,) * len(kernel)
    pads = window_pads(node, x.shape[2:], kernel, ones)
    if any(low != high for low, high in pads):
        raise node.refuse(f"uneven pads {pads}")
    groups = node.attr("group", 1)
    module: nn.Module = _TRANSPOSED[len(weight.shape)](
        weight.shape[0],
        weight.shape[1] * groups,
        kernel,
        tuple(node.attr("strides") or ones),
        tuple(low for low, _ in pads),
        tuple(node.attr("output_padding") or (0,) * len(kernel)),
        groups,
        bias is not None,
        tuple(node.attr("dilations") or ones),
    )
    return Built(partial(_conv, pads=None), [x.name], module, _fill(module, weight, bias))
