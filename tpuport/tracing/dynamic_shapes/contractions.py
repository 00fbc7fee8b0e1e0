"""Matrix products, einsum and attention, where a dim of data-dependent size may be summed over."""

import math
import string
from typing import Any

import torch

from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    bound_of,
    extents_of,
    filled,
    isolated,
    node_of,
    refuse,
    require_equal,
    resized,
    strip,
    valid,
)

aten = torch.ops.aten


def masked_contraction(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Mask the operands of a product over the data-dependent dim: zeros past the real elements."""
    name = func._opname
    if name not in ("mm", "bmm", "addmm"):
        return args
    at = 1 if name == "addmm" else 0
    a, b = args[at], args[at + 1]
    found, new_a, new_b = _masked_contraction_of(a, b, a.dim() - 1, b.dim() - 2)
    return (*args[:at], new_a, new_b, *args[at + 2 :]) if found else args


def _masked_contraction_of(a: Any, b: Any, inner_a: int, inner_b: int) -> tuple[bool, Any, Any]:
    left, right = extents_of(a).get(inner_a), extents_of(b).get(inner_b)
    if left is None and right is None:
        return False, a, b
    if left is None or right is None:
        size = bound_of(a if left is None else b, inner_a if left is None else inner_b)
        require_equal(left or right, node_of(size), "mat1 and mat2 shapes cannot be multiplied")  # type: ignore[arg-type]
    else:
        require_equal(left, right, "mat1 and mat2 shapes cannot be multiplied")
        size = min(bound_of(a, inner_a), bound_of(b, inner_b))
    new_a = _keep(a, resized(filled(a, 0), inner_a, size), inner_a)
    new_b = _keep(b, resized(filled(b, 0), inner_b, size), inner_b)
    return True, new_a, new_b


def _keep(source: Any, physical: Any, without: int) -> Any:
    extents = {d: n for d, n in extents_of(source).items() if d != without}
    return attach(physical, extents) if extents and isinstance(physical, TracedTensor) else physical


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b` for operands of at least two dims.

    The summed dim may depend on data, the same way on both sides.
    """
    if a.dim() < 2 or b.dim() < 2:
        raise refuse(aten.mm.default, " (matrix with vector)")
    inner_a, inner_b = a.dim() - 1, b.dim() - 2
    _, left, right = _masked_contraction_of(a, b, inner_a, inner_b)
    rank = max(a.dim(), b.dim())
    extents = {d + rank - a.dim(): n for d, n in extents_of(a).items() if d != inner_a}
    for d, n in extents_of(b).items():
        if d != inner_b:
            at = d + rank - b.dim()
            require_equal(extents.setdefault(at, n), n, "batch dims of a matrix product differ")
    return isolated(attach(torch.matmul(filled(left, 0), filled(right, 0)), extents))


def einsum(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """Return `torch.einsum`; a letter, summed or not, may depend on data."""
    letters, output = _letters(equation, operands)
    nodes: dict[str, NumberNode] = {}
    for names, operand in zip(letters, operands, strict=True):
        for d, n in extents_of(operand).items():
            require_equal(nodes.setdefault(names[d], n), n, f"einsum: sizes of {names[d]!r} differ")
    plain = []
    for names, operand in zip(letters, operands, strict=True):
        if any(d not in extents_of(operand) for d in (names.index(x) for x in nodes if x in names)):
            raise refuse(aten.einsum.default, " against one of static size")
        plain.append(filled(operand, 0))
    extents = {output.index(letter): n for letter, n in nodes.items() if letter in output}
    explicit = f"{','.join(letters)}->{output}"
    return isolated(attach(torch.einsum(explicit, *plain), extents))


def _letters(equation: str, operands: list[torch.Tensor]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with those that are left out.

    An ellipsis is the dims that have no letter, aligned from the right. Without an arrow the result
    has these, and the letters that are there once in the order of the alphabet.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    unused = [one for one in string.ascii_letters if one not in equation]
    rests = [
        operand.dim() - len(one.replace("...", "")) if "..." in one else 0
        for one, operand in zip(names, operands, strict=True)
    ]
    dims = "".join(unused[: max(rests)])
    if not arrow:
        output = "..." + "".join(
            sorted(one for one in {*inputs} - {*".,"} if inputs.count(one) == 1)
        )
    written = [
        one.replace("...", dims[len(dims) - rest :]) for one, rest in zip(names, rests, strict=True)
    ]
    return written, output.replace("...", dims)


def same_rows(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give keys and values of attention one physical size; check that their lengths agree."""
    at, to = key.dim() - 2, value.dim() - 2
    left, right = extents_of(key).get(at), extents_of(value).get(to)
    if left is None and right is None:
        return key, value
    left = left or node_of(bound_of(key, at))
    right = right or node_of(bound_of(value, to))
    require_equal(left, right, "key and value of attention have different lengths")
    size = min(bound_of(key, at), bound_of(value, to))
    node = (
        left
        if left.expr is not None and not left.expr.terms
        else right
        if not (right.expr and right.expr.terms)
        else left
    )
    made = []
    for tensor, dim in ((key, at), (value, to)):
        others = {d: n for d, n in extents_of(tensor).items() if d != dim}
        plain = resized(filled(tensor, 0), dim, size)
        made.append(attach(plain, {**others, dim: node}))
    return made[0], made[1]


def key_mask(key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the attention mask that also hides the padding keys."""
    node = extents_of(key).get(key.dim() - 2)
    if node is None:
        return strip(mask) if mask is not None else None
    size = bound_of(key, key.dim() - 2)
    real = valid(node, size)[None, :]
    if mask is None:
        return real
    plain = (
        resized(strip(mask), mask.dim() - 1, size)
        if bound_of(mask, mask.dim() - 1) != 1
        else strip(mask)
    )
    if mask.dtype is torch.bool:
        return plain & real
    return torch.where(real, plain, torch.full((), -math.inf, dtype=plain.dtype))
