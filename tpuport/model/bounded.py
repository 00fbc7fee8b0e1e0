"""Tensors with a size that depends on data, held in arrays of a static bound.

`x[mask]`, `nonzero` and slices with traced ends give a tensor whose physical array has the largest
size possible and whose first `count` elements along a dim are the real ones. An op is allowed here
only if it keeps those exact: elementwise, rows independent of each other, reductions with the rest
masked out, and gathers, scatters and concatenations that move them. Everything else is refused.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.model import numbers
from tpuport.model.locate import port_error
from tpuport.model.number_node import Linear, NumberNode
from tpuport.model.tensor import TracedTensor, meta_of
from tpuport.model.trace import Trace, current

aten = torch.ops.aten
Extents = dict[int, NumberNode]
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for ATen ops by name (all overloads)."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


# -- sizes -----------------------------------------------------------------------------------------


def extents_of(tensor: Any) -> Extents:
    """The data-dependent sizes of a tensor, by dim."""
    return (tensor._extents or {}) if isinstance(tensor, TracedTensor) else {}


def strip(tensor: Any) -> Any:
    """The physical array as an ordinary tensor (sharing its storage)."""
    if not extents_of(tensor):
        return tensor
    return TracedTensor(
        tensor._storage, tensor._chain, meta_of(tensor), tensor._elem, tensor._frozen
    )


def attach(tensor: Any, extents: Extents) -> TracedTensor:
    """Give a physical tensor its data-dependent sizes; a size known after all trims the array."""
    kept: Extents = {}
    for dim, node in extents.items():
        physical = tensor.bound_shape[dim]
        if node.low == node.high and node.low <= physical:
            if node.low < physical:
                tensor = strip(tensor).narrow(dim, 0, int(node.low))
            continue
        kept[dim] = node
    if not kept:
        return tensor
    if tensor._extents is None:
        tensor._extents = kept
        return tensor
    made = strip(tensor)
    made._extents = kept
    return made


def node_of(size: Any) -> NumberNode:
    """A size (Python int or traced) as a node."""
    if isinstance(size, torch.SymInt):
        return size.node
    return NumberNode(int(size), int, int(size), int(size))


def count_node(value: Any, high: int, expr: Linear | None = None) -> NumberNode:
    """A fresh count between 0 and `high`."""
    return NumberNode(value, int, 0, high, expr)


def require_equal(a: NumberNode, b: NumberNode, message: str) -> None:
    """The program fails, as eager does, where two sizes differ."""
    if a.expr == b.expr:
        return
    from tpuport.model.decisions import raise_if

    raise_if(a.value != b.value, RuntimeError(message))


def valid(node: NumberNode, size: int) -> torch.Tensor:
    """bool[size]: which elements along a dim are real."""
    return wrap_now(jnp.arange(size) < node.value)


def wrap_now(value: jax.Array, dtype: torch.dtype | None = None) -> TracedTensor:
    """A fresh traced tensor in the running trace."""
    from tpuport.model.tensor import wrap

    return wrap(value, dtype, trace=current(), frozen=True)


def _column(mask: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return mask.reshape([-1 if d == dim else 1 for d in range(rank)])


def filled(tensor: Any, value: Any, dims: Sequence[int] | None = None) -> torch.Tensor:
    """The physical tensor with the elements past its sizes (along `dims`, default all) set to
    `value`.
    """
    plain = strip(tensor)
    for dim, node in extents_of(tensor).items():
        if dims is None or dim in dims:
            mask = _column(valid(node, plain.shape[dim]), dim, plain.dim())
            plain = torch.where(mask, plain, torch.full((), value, dtype=plain.dtype))
    return plain


def refuse(func: Any, why: str = "") -> Exception:
    """The error for an op that is not known to keep the real elements exact."""
    return port_error(
        f"{getattr(func, '_opname', func)} on a tensor whose size depends on data{why}",
        code="TPU203",
        remedy=(
            "keep the full size and select with torch.where, or reduce the selected elements with"
            " a mask"
        ),
    )


# -- entry -----------------------------------------------------------------------------------------


def involved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op has an operand of data-dependent size, or a traced size among its arguments."""
    return any(_involved(a) for a in args) or any(_involved(a) for a in kwargs.values())


def _involved(value: Any) -> bool:
    if isinstance(value, TracedTensor):
        return value._extents is not None
    if isinstance(value, (list, tuple)):
        return any(_involved(v) or isinstance(v, torch.SymInt) for v in value)
    return isinstance(value, torch.SymInt)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on tensors of data-dependent size, or NotImplemented where the ordinary way is
    right.

    Raises:
        PortError: the op is not known to keep the real elements exact.
    """
    handler = HANDLERS.get(func._opname)
    if handler is not None:
        return handler(func, args, kwargs)
    has_extents = any(extents_of(t) for t in _tensors(args, kwargs))
    if not has_extents:
        return NotImplemented
    if torch.Tag.pointwise in func.tags or func._opname in _POINTWISE:
        return pointwise(func, args, kwargs)
    if func._opname in _ROWWISE:
        return rowwise(func, args, kwargs)
    raise refuse(func)


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    from tpuport.model.dispatch import _flat

    return [t for t in _flat(tuple(args), kwargs) if isinstance(t, torch.Tensor)]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on physical arrays."""
    from tpuport.model.dispatch import _call, _map_tensors

    return _call(
        func,
        tuple(_map_tensors(strip, a) for a in args),
        {k: _map_tensors(strip, v) for k, v in kwargs.items()},
    )


_POINTWISE = {
    "floor_divide",
    "remainder",
    "fmod",
    "where",
    "clone",
    "_to_copy",
    "copy",
    "masked_fill",
    "fill",
    "zero",
    "zeros_like",
    "ones_like",
    "full_like",
}
_POINTWISE |= {
    "rand_like",
    "randn_like",
    "bernoulli",
    "native_dropout",
    "lift_fresh",
    "detach",
    "alias",
    "contiguous",
}
_ROWWISE = {
    "native_layer_norm", "_fused_rms_norm", "embedding", "cumsum", "cumprod", "_softmax",
    "_log_softmax", "mm", "bmm", "addmm", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "expand", "select", "unbind", "split", "split_with_sizes", "glu", "topk", "sort", "argsort",
    "gather", "stack", "flip", "tril", "triu", "one_hot", "repeat", "upsample_nearest1d",
    "view_as_real", "view_as_complex", "_conj",
}  # fmt: skip


# -- elementwise -----------------------------------------------------------------------------------


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elementwise ops: data-dependent sizes must agree.

    A static size that meets one must equal it at run time.
    """
    tensors = _tensors(args, kwargs)
    rank = max(t.dim() for t in tensors)
    found: Extents = {}
    replaced: dict[int, torch.Tensor] = {id(t): strip(t) for t in tensors}
    for out_dim in range(rank):
        users = [
            (t, out_dim - (rank - t.dim())) for t in tensors if out_dim - (rank - t.dim()) >= 0
        ]
        nodes = [(t, d, extents_of(t)[d]) for t, d in users if d in extents_of(t)]
        if not nodes:
            continue
        statics = [t for t, d in users if d not in extents_of(t) and _bound(t, d) != 1]
        node = (
            node_of(_bound(statics[0], out_dim - (rank - statics[0].dim())))
            if statics
            else nodes[0][2]
        )
        size = int(node.low) if statics else min(_bound(t, d) for t, d, _ in nodes)
        for t, d, other in nodes:
            message = (
                "The size of tensor a must match the size of tensor b at non-singleton dimension"
                f" {out_dim}"
            )
            require_equal(other, node, message)
            replaced[id(t)] = _resized(replaced[id(t)], d, size)
        if not statics:
            found[out_dim] = node
    from tpuport.model.dispatch import _map_tensors

    def swap(value: Any) -> Any:
        return replaced.get(id(value), value)

    result = run(
        func,
        tuple(_map_tensors(swap, a) for a in args),
        {k: _map_tensors(swap, v) for k, v in kwargs.items()},
    )
    if isinstance(result, (tuple, list)):
        return tuple(attach(r, dict(found)) for r in result)
    return attach(result, found)


def _bound(tensor: torch.Tensor, dim: int) -> int:
    return torch.Tensor.size(tensor)[dim]


def _resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Physical resize along a dim: trimmed, or padded with zeros past the real elements."""
    now = tensor.shape[dim]
    if now > size:
        return tensor.narrow(dim, 0, size)
    if now < size:
        shape = list(tensor.shape)
        shape[dim] = size - now
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensor


# -- ops whose rows do not see each other ----------------------------------------------------------


def rowwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops that keep elements along the data-dependent dim apart.

    Which dim it becomes is asked of torch itself.
    """
    args = tuple(_physical_sizes(a, args) for a in args)
    exprs = {node.expr: node for t in _tensors(args, kwargs) for node in extents_of(t).values()}
    _refuse_mixing(func, args, kwargs)
    args = _masked_contraction(func, args)
    result = run(func, args, kwargs)
    for expr, node in exprs.items():
        before = _meta_run(func, args, kwargs, expr, 0)
        after = _meta_run(func, args, kwargs, expr, _PERTURB)
        result = _attach_grown(func, result, before, after, node)
    return result


_PERTURB = 7


def _meta_run(func: Any, args: Any, kwargs: Any, expr: Linear | None, grow: int) -> list[Any]:
    from tpuport.model.dispatch import _map_tensors

    def meta(value: Any) -> Any:
        if isinstance(value, numbers.SYMBOLIC):
            return numbers.placeholder(value)
        sizes = list(torch.Tensor.size(value))
        for dim, node in extents_of(value).items():
            if node.expr == expr:
                sizes[dim] += grow
        return torch.empty(sizes, dtype=value.dtype, device="meta")

    def grown(value: Any) -> Any:
        # Sizes written out in the arguments grow with the tensor (see _physical_sizes).
        if isinstance(value, _Sized):
            return int(value) + (grow * value.factor if value.expr == expr else 0)
        return [grown(v) for v in value] if isinstance(value, (list, tuple)) else value

    given = [grown(_map_tensors(meta, a)) for a in args]
    try:
        out = func(*given, **{k: _map_tensors(meta, v) for k, v in kwargs.items()})
    except RuntimeError as error:
        raise refuse(func, f" ({str(error).splitlines()[0]})") from error
    return list(out) if isinstance(out, (list, tuple)) else [out]


class _Sized(int):
    """A physical size in an op's arguments that stands for a traced one."""

    expr: Linear | None
    factor: int


def _physical_sizes(value: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_physical_sizes(v, args) for v in value]
    if not isinstance(value, torch.SymInt):
        return value
    expr = value.node.expr
    for tensor in _tensors(args, {}):
        for dim, node in extents_of(tensor).items():
            for factor in (1, *{f for _, f in expr.terms}):
                if node.expr is not None and node.expr.times(factor) == expr:
                    made = _Sized(_bound(tensor, dim) * factor)
                    made.expr, made.factor = node.expr, factor
                    return made
    return value


def _attach_grown(
    func: Any, result: Any, before: list[Any], after: list[Any], node: NumberNode
) -> Any:
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    for index, (small, large) in enumerate(zip(before, after, strict=False)):
        if not isinstance(small, torch.Tensor):
            continue
        if small.dim() != large.dim() or len(before) != len(after):
            raise refuse(func)
        extents = dict(extents_of(parts[index]))
        for dim, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)):
            if a != b:
                factor, rest = divmod(b - a, _PERTURB)
                if rest or not _leads(a, b, factor):
                    raise refuse(func, ", merged with dims before it")
                scaled = node if factor == 1 else _scaled(node, factor)
                extents[dim] = scaled
        parts[index] = attach(parts[index], extents)
    if isinstance(result, (list, tuple)):
        return type(result)(parts) if type(result) in (list, tuple) else tuple(parts)
    return parts[0]


def _leads(small: int, large: int, factor: int) -> bool:
    """Whether the grown dim is the slowest of those merged into one.

    Then the real elements stay a prefix.
    """
    return factor > 0 and small % factor == 0 and large % factor == 0


def _scaled(node: NumberNode, factor: int) -> NumberNode:
    assert node.expr is not None
    return NumberNode(
        node.value * factor, int, node.low * factor, node.high * factor, node.expr.times(factor)
    )


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: int = -1) -> int:
    value = args[position] if len(args) > position else kwargs.get("dim", default)
    return int(value) % max(args[0].dim(), 1)


_ALONG = {
    "_softmax": 1,
    "_log_softmax": 1,
    "gather": 1,
    "select": 1,
    "unbind": 1,
    "split": 2,
    "split_with_sizes": 2,
    "glu": 1,
}
_ALONG |= {"topk": 2, "sort": 1, "argsort": 1}


def _refuse_mixing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name, first = func._opname, args[0]
    if not isinstance(first, torch.Tensor):
        return
    extents = extents_of(first)
    if name in _ALONG and extents:
        default = 0 if name in ("unbind", "split", "split_with_sizes") else -1
        position = _ALONG[name]
        if name == "sort" and func._overloadname == "stable":
            position = 2
        dim = _dim(args, kwargs, position, default)
        if dim in extents:
            raise refuse(func, " along that dim")
    if name == "native_layer_norm" and any(d >= first.dim() - len(args[1]) for d in extents):
        raise refuse(func, " over that dim")
    if name in ("flip", "repeat") and extents:
        dims = [d % first.dim() for d in args[1]] if name == "flip" else []
        if any(d in extents for d in dims) or (
            name == "repeat" and any(args[1][len(args[1]) - first.dim() + d] != 1 for d in extents)
        ):
            raise refuse(func, " along that dim")


@handles("view", "_unsafe_view", "_reshape_alias")
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshapes: the data-dependent dim may merge with dims after it (or of size 1 before it)."""
    base = args[0]
    if func._overloadname == "dtype":
        return rowwise(func, args, kwargs)
    sizes = [int(_physical_sizes(s, args)) for s in args[1]]
    shape = list(torch.Tensor.size(base))
    out = list(torch.empty(shape, device="meta").reshape(sizes).shape)
    extents: Extents = {}
    for dim, node in extents_of(base).items():
        position, factor = _place(func, shape, out, dim)
        extents[position] = node if factor == 1 else _scaled(node, factor)
    return attach(run(aten.view.default, (strip(base), out), {}), extents)


def _place(func: Any, shape: list[int], out: list[int], dim: int) -> tuple[int, int]:
    """Where a dim goes in a reshape, and by how many elements of later dims each of its elements
    grew.
    """
    lead = math.prod(shape[:dim])
    running = 1
    candidates = []
    for position, size in enumerate(out):
        if running == lead and size % max(shape[dim], 1) == 0 and size >= shape[dim]:
            candidates.append((position, size // max(shape[dim], 1)))
        running *= size
    exact = [c for c in candidates if c[1] == 1]
    if not candidates:
        raise refuse(func, ", merged with dims before it or split")
    return min(exact or candidates, key=lambda c: abs(c[0] - dim))


def _masked_contraction(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Matrix products that sum over the data-dependent dim: zeros past the real elements."""
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
        size = _bound(a if left is None else b, inner_a if left is None else inner_b)
        require_equal(left or right, node_of(size), "mat1 and mat2 shapes cannot be multiplied")  # type: ignore[arg-type]
    else:
        require_equal(left, right, "mat1 and mat2 shapes cannot be multiplied")
        size = min(_bound(a, inner_a), _bound(b, inner_b))
    new_a = _keep(a, _resized(filled(a, 0, [inner_a]), inner_a, size), inner_a)
    new_b = _keep(b, _resized(filled(b, 0, [inner_b]), inner_b, size), inner_b)
    return True, new_a, new_b


def _keep(source: Any, physical: Any, without: int) -> Any:
    extents = {d: n for d, n in extents_of(source).items() if d != without}
    return attach(physical, extents) if extents and isinstance(physical, TracedTensor) else physical


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` of at least two dims each.

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
    return attach(torch.matmul(strip(left), strip(right)), extents)


def einsum(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """`torch.einsum` with explicit letters; a summed letter may depend on data."""
    inputs, arrow, output = equation.partition("->")
    if "." in equation or not arrow:
        raise refuse(aten.einsum.default, " with an ellipsis or without an explicit output")
    letters = inputs.split(",")
    nodes: dict[str, NumberNode] = {}
    for names, operand in zip(letters, operands, strict=True):
        for d, n in extents_of(operand).items():
            require_equal(nodes.setdefault(names[d], n), n, f"einsum: sizes of {names[d]!r} differ")
    plain = []
    for names, operand in zip(letters, operands, strict=True):
        fill = [d for d, letter in enumerate(names) if letter in nodes and letter not in output]
        if any(d not in extents_of(operand) for d in (names.index(x) for x in nodes if x in names)):
            raise refuse(aten.einsum.default, " against one of static size")
        plain.append(strip(filled(operand, 0, fill)))
    extents = {output.index(letter): n for letter, n in nodes.items() if letter in output}
    return attach(torch.einsum(equation, *plain), extents)


def same_rows(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of attention with one physical size, checked to have as many rows."""
    at, to = key.dim() - 2, value.dim() - 2
    left, right = extents_of(key).get(at), extents_of(value).get(to)
    if left is None and right is None:
        return key, value
    left = left or node_of(_bound(key, at))
    right = right or node_of(_bound(value, to))
    require_equal(left, right, "key and value of attention have different lengths")
    size = min(_bound(key, at), _bound(value, to))
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
        plain = _resized(strip(tensor), dim, size)
        made.append(attach(plain, {**others, dim: node}))
    return made[0], made[1]


@handles("split_with_sizes")
def _split_with_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, sizes = args[0], args[1]
    dim = _dim(args, kwargs, 2, 0)
    if dim not in extents_of(base) and not any(isinstance(s, torch.SymInt) for s in sizes):
        return rowwise(func, args, kwargs)
    total = node_of(0)
    parts, start = [], node_of(0)
    for size in sizes:
        end = start.add(node_of(size))  # type: ignore[attr-defined]
        parts.append(
            _slice(
                aten.slice.Tensor, (base, dim, numbers.from_node(start), numbers.from_node(end)), {}
            )
        )
        start = total = end
    size = extents_of(base).get(dim, node_of(_bound(base, dim)))
    require_equal(
        total, size, "split_with_sizes expects split_sizes to sum exactly to the tensor's size"
    )
    return parts


def key_mask(key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The attention mask that also hides keys past their number."""
    node = extents_of(key).get(key.dim() - 2)
    if node is None:
        return strip(mask) if mask is not None else None
    size = _bound(key, key.dim() - 2)
    real = valid(node, size)[None, :]
    if mask is None:
        return real
    plain = (
        _resized(strip(mask), mask.dim() - 1, size)
        if _bound(mask, mask.dim() - 1) != 1
        else strip(mask)
    )
    if mask.dtype is torch.bool:
        return plain & real
    return torch.where(real, plain, torch.full((), -math.inf, dtype=plain.dtype))


@handles("_softmax", "_log_softmax")
def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dim = args[0], args[1] % max(args[0].dim(), 1)
    if dim not in extents_of(source):
        return rowwise(func, args, kwargs)
    masked = filled(source, torch.finfo(source.dtype).min, [dim])
    return attach(run(func, (masked, *args[1:]), kwargs), dict(extents_of(source)))


# -- reductions ------------------------------------------------------------------------------------


def _reduced_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    source = args[0]
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(given, bool) or given is None or given == []:
        return list(range(source.dim()))
    return [
        d % max(source.dim(), 1) for d in (given if isinstance(given, (list, tuple)) else [given])
    ]


def _least(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _greatest(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return (
        math.inf
        if dtype.is_floating_point
        else torch.iinfo(torch.int32 if dtype is torch.int64 else dtype).max
    )


_IDENTITY: dict[str, Callable[[torch.dtype], Any]] = {
    "sum": lambda _: 0, "prod": lambda _: 1, "any": lambda _: False, "all": lambda _: True,
    "count_nonzero": lambda _: 0, "linalg_vector_norm": lambda _: 0, "nansum": lambda _: 0,
    "amax": _least, "max": _least, "argmax": _least, "amin": _greatest, "min": _greatest,
    "argmin": _greatest, "logsumexp": _least,
}  # fmt: skip


@handles(*_IDENTITY)
def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    dims = _reduced_dims(args, kwargs)
    if func._opname in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return pointwise(func, args, kwargs)
    masked = filled(source, _IDENTITY[func._opname](source.dtype), dims)
    return _after_reduction(source, dims, run(func, (masked, *args[1:]), kwargs))


def _after_reduction(source: Any, dims: list[int], result: Any) -> Any:
    left = {d: n for d, n in extents_of(source).items() if d not in dims}
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    for index, part in enumerate(parts):
        kept_rank = part.dim() == source.dim()
        moved = {
            d if kept_rank else d - sum(1 for r in set(dims) if r < d): n for d, n in left.items()
        }
        parts[index] = attach(part, moved) if moved else part
    return tuple(parts) if isinstance(result, (tuple, list)) else parts[0]


@handles("mean", "var", "std", "var_mean", "std_mean")
def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, dims = args[0], _reduced_dims(args, kwargs)
    dynamic = [d for d in extents_of(source) if d in dims]
    if not dynamic:
        return _after_reduction(source, dims, run(func, args, kwargs))
    if func._opname != "mean":
        raise refuse(func, " over that dim")
    keep = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    count: Any = math.prod(source.bound_shape[d] for d in dims if d not in dynamic)
    for d in dynamic:
        count = count * extents_of(source)[d].value
    dtype = kwargs.get("dtype") or source.dtype
    total = filled(source, 0, dims).sum(dims, keepdim=keep, dtype=dtype)
    return _after_reduction(
        source, dims, total / wrap_now(jnp.asarray(count, jnp.float32)).to(dtype)
    )


# -- moving rows -----------------------------------------------------------------------------------


def compacted(keep: jax.Array, bound: int) -> jax.Array:
    """int32[bound]: positions of the True elements of `keep` (flat) in order; past them, zero."""
    flat = keep.reshape(-1)
    target = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, bound)
    return (
        jnp.zeros(bound, jnp.int32)
        .at[target]
        .set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")
    )


@handles("cat")
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in args[0] if not (t.dim() == 1 and not extents_of(t) and t.shape[0] == 0)]
    dim = _dim((tensors[0], *args[1:]), kwargs, 1, 0)
    others: Extents = {}
    for tensor in tensors:
        for d, node in extents_of(tensor).items():
            if d != dim:
                require_equal(
                    others.setdefault(d, node),
                    node,
                    f"Sizes of tensors must match except in dimension {dim}",
                )
    aligned = [strip(t) for t in tensors]
    for d in others:
        if any(d not in extents_of(t) for t in tensors):
            raise refuse(func, " with one of static size")
        size = min(t.shape[d] for t in aligned)
        aligned = [_resized(t, d, size) for t in aligned]
    joined = torch.cat(aligned, dim)
    if not any(dim in extents_of(t) for t in tensors):
        return attach(joined, others) if others else joined
    sizes = [extents_of(t).get(dim, node_of(_bound(t, dim))) for t in tensors]
    keep = jnp.concatenate(
        [jnp.arange(_bound(t, dim)) < n.value for t, n in zip(tensors, sizes, strict=True)]
    )
    total = sizes[0]
    for node in sizes[1:]:
        total = total.add(node)  # type: ignore[attr-defined]
    bound = int(total.low) if total.low == total.high else min(int(total.high), joined.shape[dim])
    order = wrap_now(compacted(keep, bound), torch.int64)
    return attach(joined.index_select(dim, order), {**others, dim: total})


def _clamped(start: Any, size: NumberNode, default: int | NumberNode) -> NumberNode:
    """A slice end as Python clamps it: negative counts from the end, then into [0, size]."""
    if start is None:
        return default if isinstance(default, NumberNode) else node_of(default)
    if isinstance(start, int):
        start = max(min(start, 2**31 - 1), -(2**31) + 1)
    node = node_of(start)
    if node.high == 0 and node.low < 0:
        # `x[:-n]` with n = 0 is empty in Python, not all of x: no code means that, so it fails
        # instead of going two ways.
        from tpuport.model.decisions import raise_if

        message = (
            "a slice x[:-n] or x[-n:] whose n depends on data has n = 0, which selects nothing or"
            " everything"
        )
        raise_if(node.value == 0, IndexError(message))
        node = NumberNode(node.value, int, node.low, -1, node.expr)
    if node.high < 0:
        node = node.add(size)  # type: ignore[attr-defined]
    elif node.low < 0:
        wrapped = jnp.where(node.value < 0, node.value + size.value, node.value)
        node = NumberNode(wrapped, int, 0, size.high)
    zero = node_of(0)
    if node.low < 0:
        node = node.sym_max(zero)  # type: ignore[attr-defined]
    decided = _at_most(node, size)
    if decided is not None:
        return node if decided else size
    return node.sym_min(size)  # type: ignore[attr-defined]


def _at_most(a: NumberNode, b: NumberNode) -> bool | None:
    if a.expr == b.expr or a.high <= b.low:
        return True
    if a.low >= b.high:
        return False
    difference = b.expr.plus(a.expr, -1)  # type: ignore[union-attr, arg-type]
    if not difference.terms:
        return difference.const >= 0
    # b - a is a count by construction (a sum that contains a): counts are never negative.
    if difference.const >= 0 and all(f > 0 for _, f in difference.terms):
        return True
    return None


@handles("slice")
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from tpuport.model.dispatch import _view_of
    from tpuport.model.tensor import ViewStep

    names = ("self", "dim", "start", "end", "step")
    given = dict(zip(names, args, strict=False)) | kwargs
    base, dim = given["self"], given.get("dim", 0)
    trace = current()
    if not isinstance(base, TracedTensor):
        assert trace is not None
        base = trace.promote(base)
    dim %= base.dim()
    extents = dict(extents_of(base))
    physical = _bound(base, dim)
    start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
    if dim not in extents and not any(isinstance(v, torch.SymInt) for v in (start, end, step)):
        result = run(func, (strip(base), dim, start, end, step), {})
        return attach(result, extents)
    if step != 1:
        raise refuse(func, " with a step")
    size = extents.get(dim, node_of(physical))
    low, high = _clamped(start, size, 0), _clamped(end, size, size)
    at_most = _at_most(low, high)
    length = high.sub(low)  # type: ignore[attr-defined]
    if not at_most:
        length = length.sym_max(node_of(0))  # type: ignore[attr-defined]
    bound = int(min(physical, max(length.high, 0)))
    length = NumberNode(length.value, int, 0, bound, length.expr)
    first = low.value.astype(jnp.int32)
    count = length.value

    def forward(value: jax.Array) -> jax.Array:
        if low.low == low.high == 0:
            return jax.lax.slice_in_dim(value, 0, bound, axis=dim)
        return jnp.take(value, jnp.clip(first + jnp.arange(bound), 0, physical - 1), axis=dim)

    def inverse(old: jax.Array, new: jax.Array) -> jax.Array:
        where = jnp.arange(physical) - first
        inside = (where >= 0) & (where < count)
        moved = jnp.take(new, jnp.clip(where, 0, max(bound - 1, 0)), axis=dim)
        shape = [-1 if d == dim else 1 for d in range(old.ndim)]
        return jnp.where(inside.reshape(shape), moved, old)

    sizes = list(torch.Tensor.size(base))
    sizes[dim] = bound
    meta = torch.empty(sizes, dtype=base.dtype, device="meta")
    view = _view_of(strip(base), ViewStep(forward, inverse), meta, base._frozen)
    extents[dim] = length
    return attach(view, extents)


@handles("select")
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, dim, index = args
    dim %= base.dim()
    if dim not in extents_of(base) and not isinstance(index, torch.SymInt):
        return rowwise(func, args, kwargs)
    from tpuport.model.dispatch import _view_of
    from tpuport.model.tensor import ViewStep

    if not isinstance(base, TracedTensor):
        trace = current()
        assert trace is not None
        base = trace.promote(base)
    physical = _bound(base, dim)
    size = extents_of(base).get(dim, node_of(physical))
    node = node_of(index)
    position = jnp.where(node.value < 0, node.value + size.value, node.value).astype(jnp.int32)
    _check_range(position, size)
    position = jnp.clip(position, 0, max(physical - 1, 0))

    def forward(value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(value, position, dim, keepdims=False)

    def inverse(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(old, new, position, dim)

    sizes = [s for d, s in enumerate(torch.Tensor.size(base)) if d != dim]
    meta = torch.empty(sizes, dtype=base.dtype, device="meta")
    view = _view_of(strip(base), ViewStep(forward, inverse), meta, base._frozen)
    left = {d - (d > dim): n for d, n in extents_of(base).items() if d != dim}
    return attach(view, left) if left else view


def _check_range(position: jax.Array, size: NumberNode) -> None:
    from tpuport.model.decisions import raise_if

    failed = (position < 0) | (position >= size.value)
    raise_if(failed, IndexError("index out of range for a tensor whose size depends on data"))


@handles("constant_pad_nd")
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, pads = args[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    result: Any = base
    for pair in range(len(pads) // 2):
        before, after = pads[2 * pair], pads[2 * pair + 1]
        dim = result.dim() - 1 - pair
        parts = [_block(result, dim, before, value), result, _block(result, dim, after, value)]
        parts = [p for p in parts if p is not None]
        if len(parts) > 1:
            result = (
                torch.ops.aten.cat.default(parts, dim)
                if not involved((parts,), {})
                else _cat(aten.cat.default, (parts, dim), {})
            )
    return result


def _block(base: Any, dim: int, size: Any, value: Any) -> Any:
    if isinstance(size, int) and size == 0:
        return None
    node = node_of(size)
    if node.low < 0 and node.high <= 0:
        raise refuse(aten.constant_pad_nd.default, " by a negative amount")
    sizes = list(torch.Tensor.size(base))
    sizes[dim] = int(min(node.high, 1 << 24)) if node.high != math.inf else -1
    if sizes[dim] < 0:
        raise refuse(aten.constant_pad_nd.default, " by an amount without an upper bound")
    made = wrap_now(jnp.full(sizes, value, _jax_dtype(base.dtype)), base.dtype)
    extents = {d: n for d, n in extents_of(base).items() if d != dim}
    return attach(made, {**extents, dim: node})


def _jax_dtype(dtype: torch.dtype) -> Any:
    from tpuport.model import backend

    return backend.jax_dtype(dtype)


# -- creation with traced sizes --------------------------------------------------------------------


@handles(
    "zeros",
    "ones",
    "full",
    "empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "rand",
    "randn",
)
def _create(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_new = func._opname.startswith("new_")
    at = 1 if is_new else 0
    sizes = args[at]
    if not any(isinstance(s, torch.SymInt) for s in sizes):
        return NotImplemented
    nodes = [node_of(s) for s in sizes]
    if any(n.high == math.inf for n in nodes):
        raise refuse(func, " without an upper bound")
    physical = [int(n.high) for n in nodes]
    head = (strip(args[0]),) if is_new else ()
    made = run(func, (*head, physical, *args[at + 1 :]), kwargs)
    if not isinstance(made, TracedTensor):
        from tpuport.model.dispatch import value_of

        made = wrap_now(value_of(made), made.dtype)
    return attach(made, {d: n for d, n in enumerate(nodes) if n.low != n.high})


@handles("arange")
def _arange(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if isinstance(step, torch.SymInt) or not isinstance(step, int):
        raise refuse(func, " with a traced step")
    low, high = node_of(start), node_of(end)
    span = high.sub(low)  # type: ignore[attr-defined]
    if step != 1:
        value = jnp.maximum((span.value + step - 1) // step, 0)
        span = NumberNode(value, int, 0, max(-(-span.high // step), 0))
    if span.high == math.inf:
        raise refuse(func, " without an upper bound")
    bound = int(span.high)
    values = low.value + step * jnp.arange(bound, dtype=jnp.int32)
    dtype = kwargs.get("dtype") or torch.int64
    made = wrap_now(values.astype(_jax_dtype(dtype)), dtype)
    return attach(made, {0: NumberNode(span.value, int, 0, bound, span.expr)})


def note_dynamic(trace: Trace | None) -> None:
    """From here on ops of this trace are asked whether they involve data-dependent sizes."""
    if trace is not None:
        trace.dynamic = True
