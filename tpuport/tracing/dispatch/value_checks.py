"""Errors that eager raises for values: an index out of range, a division by 0, a singular matrix.

One function for each kind of check, registered for the ATen ops that make it. Eager looks at the
values when the op runs; a program reports the first check that failed after the call. What is known
while tracing costs nothing: values of host tensors, and bounds of traced ones (`_bounds`).
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpuport.foundation.interop.backend import to_numpy_array
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.lowering_registry import special
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import held_of, value_of
from tpuport.tracing.dynamic_shapes.extents import extents_of, filled, real_elements, strip
from tpuport.tracing.dynamic_shapes.handlers import tensors_of


class OutOfRangeError(IndexError, RuntimeError):
    """An index out of range, where eager raises one or the other by the layout in memory."""


@dataclass(frozen=True)
class Failure:
    """The values of an operand for which eager raises `error`: those where `where` holds."""

    of: Any
    where: Callable[[Any], Any]
    error: Exception


# The stubs of torch leave it out.
LinAlgError: type[RuntimeError] = getattr(torch.linalg, "LinAlgError")  # noqa: B009

Rule = Callable[[dict[str, Any]], Iterator[Failure]]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen ops by name. It gets their arguments by name."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def check_values(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what eager raises for the values of an op's operands, now or when the program runs."""
    arguments = func._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    for failure in RULES[func._opname](given):
        known = _known(trace, failure.of)
        if known is None:
            raise_if(lambda f=failure: _anywhere(f, tensors_of(args, kwargs)), failure.error)
            continue
        failed = failure.where(known).any()
        if isinstance(failed, jax.Array):
            raise_if(failed, failure.error)
        elif failed:
            trace.note_reads([failure.of])
            raise failure.error


def _known(trace: Trace, of: Any) -> Any:
    """Return the values of a host tensor or Python number; None for those of a traced one."""
    if isinstance(of, (TracedTensor, *sym_numbers.SYMBOLIC)):
        return None
    if not isinstance(of, torch.Tensor):
        return np.asarray(of)
    if trace.alias(of) is not None:
        return None
    value = to_numpy_array(of.detach())
    return value.astype(np.int64) if _is_whole(of) else value


def _anywhere(failure: Failure, operands: list[torch.Tensor]) -> Any:
    """Return whether an op fails at a real element: padding holds arbitrary values."""
    of = failure.of
    value = lax.stop_gradient(held_of(strip(of)))
    # A limit may be no number of a narrow dtype: -100 is no uint8.
    value = value.astype(jnp.int32) if value.dtype.itemsize < 4 and _is_whole(of) else value
    with int64.scope() if int64.is_wide(value) else contextlib.nullcontext():
        where = failure.where(value)
    if extents_of(of):
        where &= value_of(real_elements(extents_of(of), where.shape))
    failed = where.any()
    for node in (n for t in operands if t is not of for n in extents_of(t).values()):
        failed &= node.value > 0
    return failed


def _bounds(of: Any) -> tuple[float, float] | None:
    return of._bounds if isinstance(of, TracedTensor) else None


# -- indices ---------------------------------------------------------------------------------------


def _outside(
    of: Any, size: Any, error: type[Exception], *, what: str = "index", from_end: bool = False
) -> Iterator[Failure]:
    """Yield the failure of an index that must be at least 0 (or -size) and below `size`."""
    lowest, known = -size if from_end else 0, _bounds(of)
    if isinstance(size, int):
        if known is not None and lowest <= known[0] and known[1] < size:
            return
        text = f"{lowest} <= {what} < {size}"
    else:
        text = f"{what} within a size that depends on data"
    message = f"{what} is out of range: expected {text}"
    yield Failure(of, lambda v: (v < lowest) | (v >= size), error(message))


def _size(of: torch.Tensor, dim: int) -> Any:
    """Return the size of a dim: an array where it depends on data."""
    if not of.dim():
        return 1
    node = extents_of(of).get(dim % of.dim())
    return torch.Tensor.size(of)[dim] if node is None else node.value


@_rule("embedding")
def _embedding(given: dict[str, Any]) -> Iterator[Failure]:
    yield from _outside(given["indices"], _size(given["weight"], 0), IndexError)


@_rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(given: dict[str, Any]) -> Iterator[Failure]:
    indices, offsets = given["indices"], given["offsets"]
    yield from _outside(indices, _size(given["weight"], 0), RuntimeError)
    count, first = torch.Tensor.numel(indices), "offsets[0] has to be 0"
    yield Failure(offsets, lambda v: v[:1] != 0, RuntimeError(first))
    last = f"offsets[-1] can not be greater than input's length {count}"
    yield Failure(offsets, lambda v: v[-1:] > count, RuntimeError(last))
    order = "offsets must not decrease"
    yield Failure(offsets, lambda v: v[1:] < v[:-1], OutOfRangeError(order))


@_rule("index_select")
def _index_select(given: dict[str, Any]) -> Iterator[Failure]:
    source, dim = given["self"], given["dim"]
    by_rows = dim == 0 and torch.Tensor.numel(source)
    error = IndexError if by_rows or source.dim() < 2 else OutOfRangeError
    yield from _outside(given["index"], _size(source, dim), error)


@_rule("index_add", "index_copy", "index_reduce", "index_fill")
def _index_write(given: dict[str, Any]) -> Iterator[Failure]:
    source, is_fill = given["self"], "value" in given
    by_rows = source.dim() > 1 and given["index"].dtype is torch.int64
    error = RuntimeError if "alpha" in given and by_rows else IndexError
    size = _size(source, given["dim"])
    yield from _outside(given["index"], size, error, from_end=is_fill)


@_rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _along(given: dict[str, Any]) -> Iterator[Failure]:
    yield from _outside(given["index"], _size(given["self"], given["dim"]), RuntimeError)


@_rule("take", "put")
def _flat(given: dict[str, Any]) -> Iterator[Failure]:
    size = torch.Tensor.numel(given["self"])
    yield from _outside(given["index"], size, IndexError, from_end=True)


@_rule("index", "index_put")
def _index(given: dict[str, Any]) -> Iterator[Failure]:
    source, dim = given["self"], 0
    for item in given["indices"]:
        if item is None:
            dim += 1
        elif item.dtype in (torch.bool, torch.uint8):
            _refuse_mask(source, dim, item)
            dim += item.dim()
        else:
            # `dynamic_shapes` checks those into a dim whose size depends on data.
            if dim not in extents_of(source):
                yield from _outside(item, _size(source, dim), IndexError, from_end=True)
            dim += 1


def _refuse_mask(source: Any, dim: int, mask: Any) -> None:
    """Refuse a mask of other sizes than the dims that it selects from, as eager does."""
    if extents_of(source) or extents_of(mask):
        return
    sizes, masked = torch.Tensor.size(source), torch.Tensor.size(mask)
    wrong = [d for d, n in enumerate(masked) if dim + d < len(sizes) and n != sizes[dim + d]]
    if wrong:
        raise IndexError(
            f"The shape of the mask {list(masked)} at index {wrong[0]} does not match the shape of"
            f" the indexed tensor {list(sizes)} at index {dim + wrong[0]}"
        )


@_rule("kthvalue")
def _kth_value(given: dict[str, Any]) -> Iterator[Failure]:
    if isinstance(given["k"], torch.SymInt):
        size = _size(given["self"], given["dim"])
        error = RuntimeError(f"kthvalue(): k is out of range: expected 1 <= k <= {size}")
        yield Failure(given["k"], lambda v: (v < 1) | (v > size), error)


@_rule("randint", "randint_like")
def _empty_range(given: dict[str, Any]) -> Iterator[Failure]:
    low, high = given.get("low", 0), given["high"]
    if isinstance(low, torch.SymInt) or isinstance(high, torch.SymInt):
        error = RuntimeError("random_ expects 'from' to be less than 'to'")
        first = value_of(low) if isinstance(low, torch.SymInt) else low
        yield Failure(high, lambda v: v <= first, error)


@_rule("one_hot")
def _one_hot(given: dict[str, Any]) -> Iterator[Failure]:
    if isinstance(given["num_classes"], int) and given["num_classes"] > 0:
        yield from _outside(given["self"], given["num_classes"], RuntimeError, what="class value")


@_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(given: dict[str, Any]) -> Iterator[Failure]:
    scores, ignored = given["self"], given["ignore_index"]
    size = _size(scores, 1 if scores.dim() > 1 else 0)
    error = IndexError(f"target is out of range: expected 0 <= target < {size}")
    yield Failure(given["target"], lambda v: ((v < 0) | (v >= size)) & (v != ignored), error)


@_rule("multi_margin_loss")
def _multi_margin_loss(given: dict[str, Any]) -> Iterator[Failure]:
    yield from _outside(given["target"], _size(given["self"], -1), RuntimeError, what="target")


@_rule("multilabel_margin_loss_forward")
def _multilabel_margin_loss(given: dict[str, Any]) -> Iterator[Failure]:
    size = _size(given["self"], -1)
    error = RuntimeError(f"target is out of range: expected -1 <= target < {size}")
    yield Failure(given["target"], lambda v: (v < -1) | (v >= size), error)


@_rule("max_unpool2d", "max_unpool3d")
def _max_unpool(given: dict[str, Any]) -> Iterator[Failure]:
    size = math.prod(given["output_size"])
    yield from _outside(given["indices"], size, RuntimeError, what="max index")


# -- arithmetic ------------------------------------------------------------------------------------


def _is_whole(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not (value.dtype.is_floating_point or value.dtype.is_complex)
    return isinstance(value, (int, torch.SymInt, torch.SymBool))


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not torch.Tensor.numel(value)


@_rule("div")
def _rounded_division(given: dict[str, Any]) -> Iterator[Failure]:
    if given.get("rounding_mode") is not None:
        yield from _division(given)


@_rule("floor_divide", "remainder", "fmod")
def _division(given: dict[str, Any]) -> Iterator[Failure]:
    operands = (given["self"], given["other"])
    if all(map(_is_whole, operands)) and not any(map(_is_empty, operands)):
        known = _bounds(operands[1])
        if known is None or known[0] <= 0 <= known[1]:
            error = RuntimeError("ZeroDivisionError: integer division or remainder by 0")
            yield Failure(operands[1], lambda v: v == 0, error)


@_rule("pow")
def _power(given: dict[str, Any]) -> Iterator[Failure]:
    exponent = given["exponent"]
    if isinstance(exponent, torch.SymInt) and _is_whole(given["self"]):
        message = "Integers to negative integer powers are not allowed."
        yield Failure(exponent, lambda v: v < 0, RuntimeError(message))


# -- probabilities and other values ----------------------------------------------------------------


def _probability(of: Any, name: str) -> Iterator[Failure]:
    error = RuntimeError(f"all elements of {name} should be between 0 and 1")
    if isinstance(of, torch.Tensor):
        yield Failure(of, lambda v: ~((v >= 0) & (v <= 1)), error)


@_rule("bernoulli")
def _bernoulli(given: dict[str, Any]) -> Iterator[Failure]:
    yield from _probability(given.get("p", given["self"]), "the probabilities")


@_rule("binary_cross_entropy")
def _binary_cross_entropy(given: dict[str, Any]) -> Iterator[Failure]:
    yield from _probability(given["self"], "input")
    yield from _probability(given["target"], "target")


@_rule("multinomial")
def _multinomial(given: dict[str, Any]) -> Iterator[Failure]:
    # The padding of a row, which is arbitrary, is no part of its sum.
    weights = filled(given["self"], 0)
    message = "probability tensor contains either `inf`, `nan` or element < 0"
    yield Failure(weights, lambda v: ~((v >= 0) & (v < math.inf)), RuntimeError(message))
    message = "invalid multinomial distribution (sum of probabilities <= 0)"
    yield Failure(weights, lambda v: v.sum(-1) <= 0, RuntimeError(message))


_NEGATIVE = {
    "poisson": ("self", "invalid Poisson rate, expected rate to be non-negative"),
    "normal": ("std", "normal expects all elements of std >= 0.0"),
    "bincount": ("self", "bincount only supports 1-d non-negative integral inputs."),
}


def _natural(name: str, message: str) -> Rule:
    def rule(given: dict[str, Any]) -> Iterator[Failure]:
        if isinstance(given.get(name), torch.Tensor):
            yield Failure(given[name], lambda v: ~(v >= 0), RuntimeError(message))

    return rule


for _name, _rest in _NEGATIVE.items():
    RULES[_name] = _natural(*_rest)


@special(torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
def _asserted(*args: Any, **kwargs: Any) -> None:
    """Do nothing: its rule checks the value."""


@_rule("_assert_async")
def _assert_async(given: dict[str, Any]) -> Iterator[Failure]:
    message = given.get("assert_msg", "Expected Tensor with single nonzero value, but got zero")
    yield Failure(given["self"], lambda v: v == 0, RuntimeError(message))


# -- matrices --------------------------------------------------------------------------------------

_SINGULAR = {
    "cholesky": (
        "the factorization could not be completed because the input is not positive-definite"
    ),
    "inv": "the inversion could not be completed because the input matrix is singular",
    "solve": "the solver failed because the input matrix is singular",
}


@_rule("_linalg_check_errors")
def _matrix_status(given: dict[str, Any]) -> Iterator[Failure]:
    name = given["api_name"]
    why = next((text for part, text in _SINGULAR.items() if part in name), "the input is singular")
    error = LinAlgError(f"{name}: {why}")
    yield Failure(given["info"], lambda v: v != 0, error)


@_rule("_linalg_svd", "linalg_pinv")
def _svd(given: dict[str, Any]) -> Iterator[Failure]:
    if given.get("hermitian"):
        return
    message = "linalg.svd: the algorithm failed to converge because of non-finite values"
    error = LinAlgError(message)
    matrix = given["A"] if "A" in given else given["self"]
    yield Failure(matrix, lambda v: ~(abs(v) < math.inf), error)


@_rule("linalg_eig", "_linalg_eigvals")
def _eig(given: dict[str, Any]) -> Iterator[Failure]:
    error = RuntimeError("torch.linalg.eig: input tensor should not contain infs or NaNs.")
    yield Failure(given["self"], lambda v: ~(abs(v) < math.inf), error)


@_rule("cholesky_inverse")
def _cholesky_inverse(given: dict[str, Any]) -> Iterator[Failure]:
    error = LinAlgError(f"cholesky_inverse: {_SINGULAR['inv']}")
    yield Failure(given["self"], lambda v: v.diagonal(0, -2, -1) == 0, error)
