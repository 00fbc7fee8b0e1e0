"""Every ATen op on a traced tensor comes through here.

An op is first run on meta tensors, which gives torch's own shapes, dtypes, strides, aliasing and
errors; then its value comes from a lowering: ours (`lowerings/`), else torchax's, else torch's
decomposition. Tensors that do not depend on the program's inputs stay plain CPU tensors, are
computed by torch, and become constants when they meet a traced one.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpuport.errors import TpuportError
from tpuport.model import backend, bounded, meta, numbers
from tpuport.model.locate import port_error
from tpuport.model.tensor import Storage, TracedTensor, ViewStep, meta_of
from tpuport.model.trace import KeyStream, Trace, current
from tpuport.model.views import VIEWS, replace_value, strided_step

aten = torch.ops.aten


@dataclass(frozen=True)
class OpInfo:
    """What the schema of an op says about aliasing, and where its value comes from."""

    writes: tuple[tuple[int, str], ...]
    is_random: bool
    functional: Any
    view: Any
    special: Callable[..., Any] | None
    lower: Callable[..., Any] | None
    returns_self: bool
    inplace_view: bool
    aliases: bool


_RENAMED = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.normal_.default: aten.normal_functional.default,
    aten._index_put_impl_.default: aten.index_put.default,
    aten.transpose_.default: aten.transpose.int,
}


def _functional_of(func: Any) -> Any:
    """The op without side effects behind `add_.Tensor` or `add.out`, or None."""
    if func in _RENAMED:
        return _RENAMED[func]
    name = func._schema.name.split("::")[1]
    packet = getattr(torch.ops, func.namespace)
    if name.endswith("_") and not name.endswith("__"):
        target = getattr(packet, name[:-1], None)
    elif name.startswith("__i") and name.endswith("__"):
        target = getattr(packet, "__" + name[3:], None)
    else:
        target = getattr(packet, name)
    if target is None:
        return None
    # Overload names differ between the forms (pow_.Tensor, pow.Tensor_Tensor): the arguments do
    # not.
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    for overload in target.overloads():
        candidate = getattr(target, overload)
        arguments = candidate._schema.arguments
        mutable = any(a.alias_info and a.alias_info.is_write for a in arguments)
        if not mutable and [(a.name, str(a.type)) for a in arguments] == wanted:
            return candidate
    return None


@functools.cache
def op_info(func: Any) -> OpInfo:
    """Facts about an op, worked out once."""
    from tpuport.model.lowerings import find

    arguments = func._schema.arguments
    writes = tuple(
        (index, a.name)
        for index, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    special, lower = find(func)
    functional = _functional_of(func) if writes and special is None else None
    return OpInfo(
        writes=writes,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        functional=functional,
        view=VIEWS.get(func),
        special=special,
        lower=lower,
        returns_self=bool(writes),
        inplace_view=torch.Tag.inplace_view in func.tags,
        aliases=any(r.alias_info is not None for r in func._schema.returns),
    )


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen op of which at least one tensor is traced (or which draws random numbers in a
    trace).

    Raises:
        PortError: no lowering, or a form of the op that cannot be kept exact.
    """
    info = op_info(func)
    trace = current()
    if trace is not None and not info.writes and (trace.dynamic or func._opname in _SELECTIONS):
        if (func._opname in _SELECTIONS and _selects(func, args)) or bounded.involved(args, kwargs):
            result = bounded.dispatch(func, args, kwargs)
            if result is not NotImplemented:
                return result
    if info.special is not None:
        return info.special(*args, **kwargs)
    if info.inplace_view:
        return _inplace_view(func, args, kwargs)
    if info.writes:
        return _dispatch_write(func, info, args, kwargs)
    if info.view is not None:
        return _dispatch_view(func, info, args, kwargs)
    if func is aten.as_strided.default:
        return _as_strided(*args, **kwargs)
    return _dispatch_value(func, info, args, kwargs)


_SELECTIONS = {"nonzero", "masked_select", "index", "index_put", "masked_scatter", "bincount"}


def _selects(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an indexing op picks elements by a mask whose values are not known."""
    from tpuport.model.selection import traced_mask

    if func._opname in ("nonzero", "bincount"):
        return True
    masks = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return any(traced_mask(m) for m in masks)


# -- arguments -------------------------------------------------------------------------------------


def _map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return [_map_tensors(fn, item) for item in value]
    if isinstance(value, numbers.SYMBOLIC):
        return fn(value)
    return value


def value_of(tensor: Any) -> jax.Array:
    """The jax value of any tensor: traced, promoted host tensor, or host constant.

    Raises:
        PortError: the tensor was left over by an earlier trace.
    """
    if isinstance(tensor, numbers.SYMBOLIC):
        return numbers.node_value(tensor)
    trace = current()
    if isinstance(tensor, TracedTensor):
        owner = tensor._storage.trace
        if owner is not None and owner is not trace and owner.closed:
            raise port_error(
                "a tensor computed in an earlier trace is used here;"
                " something outside the model kept it (a global,"
                " a functools.cache, a closure)",
                code="TPU402",
                remedy="keep it in a buffer of the module, or compute it from host values only",
            )
        if not torch.is_grad_enabled() and not tensor._frozen:
            return _stopped(tensor)
        return tensor._elem
    if isinstance(tensor, backend.TorchaxTensor):
        return tensor.jax()
    if trace is None:
        return backend.to_jax(tensor)
    alias = trace.alias(tensor)
    return trace.constant(tensor) if alias is None else alias._elem


def _stopped(tensor: TracedTensor) -> jax.Array:
    """The value cut off from gradients, for use under `torch.no_grad()`; made once per value."""
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return tensor._elem
    version = tensor._storage.version
    kept = tensor._stopped
    if kept is None or kept[0] != version or not tensor._is_alive(kept[1]):
        kept = (version, tensor._region(), jax.lax.stop_gradient(tensor._elem))
        tensor._stopped = kept
    return kept[2]


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map_tensors(found.append, [*args, *kwargs.values()])
    return found


def grad_frozen(tensors: list[torch.Tensor]) -> bool:
    """Whether no gradient flows into the result of an op on these operands."""
    if not torch.is_grad_enabled():
        return True
    return all(not isinstance(t, TracedTensor) or t._frozen for t in tensors)


# -- ops that only compute -------------------------------------------------------------------------


def _known_masks(indices: Any) -> list[Any]:
    """An index list with its host masks as positions: how many they select is known."""
    out: list[Any] = []
    for item in indices:
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            out += list(item.nonzero().unbind(1))
        else:
            out.append(item)
    return out


def _dispatch_value(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trace = current()
    if func._opname in ("index", "index_put", "_unsafe_index_put"):
        args = (args[0], _known_masks(args[1]), *args[2:])
    if info.lower is None:
        return _decompose(func, args, kwargs)
    tensors = _flat(args, kwargs)
    metas = meta.infer(func, args, kwargs)
    if info.is_random:
        kwargs = {k: v for k, v in kwargs.items() if k != "generator"} | {
            "key": _key(trace, kwargs)
        }
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
    jax_args = [_map_tensors(value_of, a) for a in args]
    jax_kwargs = {k: _map_tensors(value_of, v) for k, v in kwargs.items()}
    value = _lower(func, info.lower, jax_args, jax_kwargs)
    result = _wrap_result(func, value, metas, trace, grad_frozen(tensors))
    if func._opname in _MARKS:
        _mark(func, args, result)
    return result


_MARKS = {
    "sum",
    "bitwise_not",
    "logical_not",
    "topk",
    "argmax",
    "argmin",
    "argsort",
    "sort",
    "view",
    "clone",
    "_to_copy",
}


def _mark(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Keep what is known of a result: which mask it negates, the range of an index."""
    source, name = args[0], func._opname
    if name in ("bitwise_not", "logical_not"):
        if isinstance(source, TracedTensor) and source.dtype is torch.bool:
            result._negates = (source, source._elem)
    elif name == "sum":
        if (
            isinstance(source, TracedTensor)
            and result.dtype is torch.int64
            and torch.Tensor.numel(result)
        ):
            low, high = (0, 1) if source.dtype is torch.bool else source._bounds or (None, None)
            if low is not None and high is not None:
                count = torch.Tensor.numel(source) // torch.Tensor.numel(result)
                result._bounds = (min(low * count, 0), high * count)
    elif name in ("clone", "_to_copy"):
        if isinstance(source, TracedTensor):
            result._bounds = (0, 1) if source.dtype is torch.bool else source._bounds
    elif isinstance(source, torch.Tensor) and source.dim():
        dim = args[2 if name == "topk" else 1] if len(args) > (2 if name == "topk" else 1) else -1
        if isinstance(dim, int) and not isinstance(dim, bool):
            indices = result[1] if isinstance(result, tuple) else result
            indices._bounds = (0, torch.Tensor.size(source)[dim] - 1)


def _lower(func: Any, lower: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    trace = current()
    if trace is not None:
        name = str(func)
        trace.counters.ops[name] = trace.counters.ops.get(name, 0) + 1
    try:
        with jax.named_scope(func._opname):
            return lower(*args, **kwargs)
    except TpuportError:
        raise
    except Exception as error:
        raise port_error(
            f"the lowering of {func} to JAX failed: {type(error).__name__}:"
            f" {str(error).splitlines()[0] if str(error) else ''}",
            code="TPU105",
            remedy=(
                "this is a gap in tpuport or torchax: please report it with this line;"
                " until then use other operations"
            ),
            cause=error,
        ) from error


_STREAM: ContextVar[KeyStream | None] = ContextVar("stream", default=None)


@contextlib.contextmanager
def keyed(stream: KeyStream) -> Iterator[None]:
    """Random ops outside a trace take their keys from `stream` inside the block."""
    token = _STREAM.set(stream)
    try:
        yield
    finally:
        _STREAM.reset(token)


def _key(trace: Trace | None, kwargs: dict[str, Any]) -> jax.Array:
    generator = kwargs.get("generator")
    stream = _STREAM.get()
    if stream is not None:
        return stream.next()
    if trace is None:
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
        return jax.random.key(int(seed) % (1 << 63))
    return trace.next_key(generator)


def _wrap_result(func: Any, value: Any, meta: Any, trace: Trace | None, frozen: bool) -> Any:
    if isinstance(meta, torch.Tensor):
        return wrap_as(func, value, meta, trace, frozen)
    if isinstance(meta, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) < len(meta):
            msg = f"the lowering of {func} gave {type(value).__name__}, expected {len(meta)} values"
            raise AssertionError(msg)
        parts = [
            None if m is None else _wrap_result(func, v, m, trace, frozen)
            for v, m in zip(value, meta, strict=False)
        ]
        return type(meta)(parts) if type(meta) in (list, tuple) else tuple(parts)
    return value


def wrap_as(
    func: Any, value: jax.Array, meta: torch.Tensor, trace: Trace | None, frozen: bool
) -> TracedTensor:
    """Wrap a lowered value with torch's own metadata, and hold the lowering to it."""
    value = jnp.asarray(value)
    if value.shape != meta.shape:
        if value.size != meta.numel() or func not in _RESHAPED:
            msg = (
                f"the lowering of {func} gave shape {value.shape}, torch gives {tuple(meta.shape)}"
            )
            raise AssertionError(msg)
        value = value.reshape(meta.shape)
    dtype = backend.jax_dtype(meta.dtype)
    if value.dtype != dtype:
        value = value.astype(dtype)
    storage = Storage(value, trace)
    return TracedTensor(storage, (), meta, value, frozen or not meta.dtype.is_floating_point)


_RESHAPED: set[Any] = set()


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op without a lowering by torch's own decomposition."""
    from torch._decomp import decomposition_table

    trace = current()
    rule = decomposition_table.get(func)
    mode = trace.dispatch_mode if trace is not None else None
    try:
        if rule is not None:
            result = _within(mode, rule, args, kwargs)
        else:
            result = _within(mode, func.decompose, args, kwargs)
    except NotImplementedError as error:
        result, cause = NotImplemented, error
    else:
        cause = None
    if result is NotImplemented:
        raise port_error(
            f"{func} has no lowering to JAX",
            code="TPU105",
            remedy=(
                "register one with tpuport.model.lowerings.lowering, or rewrite this line with"
                " other torch operations"
            ),
            cause=cause,
        )
    return result


def _within(mode: Any, rule: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if mode is None:
        return rule(*args, **kwargs)
    with mode:
        return rule(*args, **kwargs)


# -- views -----------------------------------------------------------------------------------------


def _dispatch_view(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    trace = current()
    base = args[0]
    if not isinstance(base, TracedTensor):
        base = trace.alias(base) if trace is not None else None
        if base is None:
            return func(*args, **kwargs)
    meta_base = meta_of(base)
    meta = func(meta_base, *args[1:], **kwargs)
    steps = info.view(meta_base, meta, *args[1:], **kwargs)
    if isinstance(steps, ViewStep):
        return _view_of(base, steps, meta, frozen=base._frozen or func is aten.detach.default)
    views = [_view_of(base, s, m, base._frozen) for s, m in zip(steps, meta, strict=True)]
    return type(meta)(views) if isinstance(meta, tuple) else views


def _view_of(base: TracedTensor, step: ViewStep, meta: torch.Tensor, frozen: bool) -> TracedTensor:
    # Offsets of meta tensors start at zero for the base: add the base's own.
    start: Any = base.storage_offset()
    offset = start * base.itemsize // meta.itemsize + meta.storage_offset()
    if offset:
        meta = meta.as_strided(meta.size(), meta.stride(), offset)
    result = TracedTensor(base._storage, (*base._chain, step), meta, None, frozen)
    result._bounds = base._bounds
    result._keep(step.forward(base._elem))
    return result


def _as_strided(
    base: torch.Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> TracedTensor:
    """A window into the storage of `base`, as torch defines it (not into `base` itself)."""
    if not isinstance(base, TracedTensor):
        base = current().alias(base)  # type: ignore[union-attr, assignment]
    assert isinstance(base, TracedTensor)
    offset: Any = base.storage_offset() if storage_offset is None else storage_offset
    root = base._storage
    shape = root.value.shape
    whole = torch.empty(shape, dtype=base.dtype, device="meta")
    if root.stride != whole.stride() or root.value.dtype != backend.jax_dtype(base.dtype):
        raise port_error(
            "as_strided of a tensor that is not contiguous in memory",
            code="TPU203",
            remedy="call .contiguous() first, or index with ordinary slices",
        )
    step = strided_step(root.value.size, size, stride, offset)
    detached = base._frozen and base.dtype.is_floating_point
    window = ViewStep(
        lambda v: step.forward(v.reshape(-1)),
        lambda b, new: step.inverse(b.reshape(-1), new).reshape(shape),
    )
    chain: tuple[ViewStep, ...] = (window,)
    if detached:
        stop = VIEWS[aten.detach.default](whole, whole)
        assert isinstance(stop, ViewStep)
        chain = (window, stop)
    meta = whole.as_strided(size, stride, offset)
    return TracedTensor(root, chain, meta, None, base._frozen)


def _inplace_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """unsqueeze_, squeeze_, transpose_, t_: the same tensor object gets other sizes."""
    from torch.utils._mode_utils import no_dispatch

    target = args[0]
    twin = _functional_of(func)
    windows = twin is aten.as_strided.default
    if not isinstance(target, TracedTensor) or not (windows or op_info(twin).view is not None):
        raise port_error(
            f"{func} on a traced tensor",
            code="TPU201",
            remedy="use the form of the method without the underscore",
        )
    if windows:
        result = _as_strided(*args, **kwargs)
    else:
        result = _dispatch_view(twin, op_info(twin), args, kwargs)
    with no_dispatch():
        func(*args, **kwargs)
    target._chain = result._chain
    target._keep(result._elem)
    return target


# -- writes ----------------------------------------------------------------------------------------


def write(target: torch.Tensor, value: jax.Array, *, frozen: bool) -> torch.Tensor:
    """Write `value` into `target` (traced or host) and through it into every alias."""
    if not isinstance(target, TracedTensor):
        trace = current()
        if isinstance(target, torch.Tensor) and trace is not None:
            trace.promote(target).write(_fit(value, target))
            return target
        msg = (
            "an in-place write of a computed JAX value into a plain CPU tensor;"
            " use .copy_(y.cpu()) instead"
        )
        raise TypeError(msg)
    value = _fit(value, target)
    if target.dtype.is_floating_point and not torch.is_grad_enabled() and not target._frozen:
        value = replace_value(target._elem, value)
    elif frozen is False:
        target._frozen = False
    target.write(value)
    return target


def _fit(value: jax.Array, target: torch.Tensor) -> jax.Array:
    dtype = backend.jax_dtype(target.dtype)
    value = jnp.asarray(value)
    if value.dtype != dtype:
        if jnp.issubdtype(value.dtype, jnp.complexfloating) and not jnp.issubdtype(
            dtype, jnp.complexfloating
        ):
            value = value.real
        value = value.astype(dtype)
    if value.shape != torch.Tensor.size(target):
        value = jnp.broadcast_to(value, torch.Tensor.size(target))
    return value


def _dispatch_write(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if info.functional is None:
        raise port_error(
            f"{func} writes in place and has no form without side effects",
            code="TPU201",
            remedy="use an out-of-place operation",
        )
    targets: list[Any] = [args[i] if i < len(args) else kwargs.get(n) for i, n in info.writes]
    is_out = any(a.is_out for a in func._schema.arguments)
    if is_out:
        kwargs = {k: v for k, v in kwargs.items() if k not in [n for _, n in info.writes]}
    else:
        _check_write(func, args, kwargs)
    for target in targets:
        if isinstance(target, torch.Tensor):
            _refuse_overlap(func, target)
    if func in _RENAMED:
        positional = [a for a in func._schema.arguments if not a.kwarg_only]
        args = (*args, *(a.default_value for a in positional[len(args) :]))
    frozen = grad_frozen(_flat(args, kwargs))
    result = _call(info.functional, args, kwargs)
    results = result if isinstance(result, (list, tuple)) else [result]
    for target, new in zip(targets, results, strict=False):
        if isinstance(target, (list, tuple)):
            for one, value in zip(target, new, strict=True):
                _write_one(one, value, frozen)
        else:
            _write_one(target, new, frozen)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _refuse_overlap(func: Any, target: torch.Tensor) -> None:
    """What eager refuses, and meta tensors do not: a write to elements that share memory."""
    sizes = torch.Tensor.size(target)
    shared = any(s == 0 and n > 1 for s, n in zip(target.stride(), sizes, strict=True))
    if not shared or func._opname in ("fill_", "zero_"):
        return
    if func._opname in ("masked_fill_", "index_put_", "_index_put_impl_", "scatter_"):
        raise port_error(
            f"{func} writes to an expanded tensor, elements of which share memory",
            code="TPU202",
            remedy="call .clone() on it first",
        )
    msg = (
        "unsupported operation: more than one element of the written-to tensor refers to a"
        " single memory"
        " location. Please clone() the tensor before performing the operation."
    )
    raise RuntimeError(msg)


def _write_one(target: torch.Tensor, new: Any, frozen: bool) -> None:
    if torch.Tensor.size(target) != torch.Tensor.size(new) and torch.Tensor.numel(target) == 0:
        raise port_error(
            "an out= tensor that would be resized",
            code="TPU201",
            remedy="allocate it with the result's shape",
        )
    write(target, value_of(new), frozen=frozen)


def _check_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let torch refuse what it refuses in eager (shapes that do not broadcast, int += float)."""
    trace = current()
    if trace is not None and trace.dynamic and bounded.involved(args, kwargs):
        return
    if func._opname in ("index_put_", "masked_scatter_", "_index_put_impl_"):
        return  # with a mask the number of rows is not known
    meta.infer(func, args, kwargs)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op that may or may not be one we have to handle: host-only operands run in torch."""
    tensors = _flat(args, kwargs)
    trace = current()
    random = op_info(func).is_random
    if any(isinstance(t, (TracedTensor, *numbers.SYMBOLIC)) for t in tensors) or (
        trace is not None and (random or any(trace.alias(t) is not None for t in tensors))
    ):
        return dispatch(func, args, kwargs)
    return func(*args, **kwargs)


# -- modes -----------------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):
    """Sees every ATen op while a trace runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled by dynamo here, and guarding each op against it costs more than the
        # op.
        return False

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        if needs_dispatch(self.trace, func, types, args, kwargs):
            result = dispatch(func, args, kwargs)
            if not info.writes and not info.aliases:
                self.trace.note_made(result)
            return result
        if any(
            self.trace.is_foreign(args[i] if i < len(args) else kwargs.get(name))
            for i, name in info.writes
        ):
            # State outside the trace: the write happens in the program, not now.
            return dispatch(func, args, kwargs)
        result = func(*args, **kwargs)
        if not info.aliases or func is aten.lift_fresh.default:
            self.trace.note_made(result)
        return result


def needs_dispatch(
    trace: Trace, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an op concerns the traced program.

    A traced operand, a promoted one, or fresh randomness.
    """
    if any(issubclass(t, TracedTensor) for t in types):
        return True
    if torch.Tag.nondeterministic_seeded in func.tags:
        generator = kwargs.get("generator")
        if generator is None or generator._cdata in trace.generators:
            return True
    operands = _flat(args, kwargs)
    if any(isinstance(t, numbers.SYMBOLIC) for t in operands):
        return True
    return any(trace.alias(t) is not None for t in operands)


class FunctionMode(TorchFunctionMode):
    """Sees every call of the torch Python API while a trace runs.

    Handles the few that must not reach C++ as they are.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from tpuport.model.functions import FUNCTIONS

        handler = FUNCTIONS.get(func)
        if handler is not None:
            result = handler(self.trace, func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))
