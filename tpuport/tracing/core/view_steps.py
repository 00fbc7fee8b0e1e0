"""View operations: how each reads from its base and writes back to it.

Every view op of ATen that returns an alias is here. If it has no simple inverse, the write-back
uses the flat indices of the view in its base, which torch itself computes on an integer tensor.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.core import Tracer

from tpuport.foundation.interop import backend
from tpuport.tracing.core import int64
from tpuport.tracing.core.active import innermost
from tpuport.tracing.core.errors import port_error


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view operation: how to read it from its base, and how to write it back into the base.

    `forward(base)` returns the view's value; `inverse(base, new)` returns the base's value after
    the view was set to `new`. `places` are those of the view's elements in the flat base where they
    are no slice of it, such as windows, which may overlap.
    """

    forward: Callable[[jax.Array], jax.Array]
    inverse: Callable[[jax.Array, jax.Array], jax.Array]
    places: np.ndarray | None = field(default=None, kw_only=True, compare=False)

    def set(self, base: jax.Array, new: jax.Array, which: jax.Array | None) -> jax.Array:
        """Return the base's value after the view was set, or some elements of it.

        Another element of the view may be the same one of the base, with its old value.
        """
        if which is None or self.places is None:
            return self.inverse(base, new)
        flat = base.reshape(-1)
        places = jnp.where(which, self.places, flat.size)
        return flat.at[places].set(new, mode="drop").reshape(base.shape)

    def overlaps(self) -> bool:
        """Return whether an element of the base is several of the view."""
        places = self.places
        return places is not None and np.unique(places).size < places.size

    def read(self, base: jax.Array) -> jax.Array:
        """Read from a base that may have 64 bits."""
        if not int64.is_wide(base):
            return self.forward(base)
        with int64.scope():
            return self.forward(base)


@dataclass(frozen=True, slots=True)
class OwnWindow(ViewStep):
    """The step to a window whose gradient goes to a part of it only, until its memory is written.

    torch gives it to the memory of the tensor that the window was taken of.
    """


@dataclass(frozen=True, slots=True)
class Detach(ViewStep):
    """The step to a tensor without the gradient of its base.

    Attributes:
        graph: The `Storage` with the gradient that it gets by writes; None if it can get none.
    """

    graph: Any = None


@dataclass(frozen=True, slots=True)
class Moving(ViewStep):
    """The step from a base to one of its parts, which each round of a loop chooses anew.

    Attributes:
        refuse: Raises, if code asks where in memory the part is.
    """

    refuse: Callable[[], NoReturn]


def written_through(
    steps: Sequence[ViewStep], bases: Sequence[jax.Array], value: jax.Array
) -> list[jax.Array | None]:
    """Return which elements of the view after each step a write to the last view sets.

    None stands for all that matter: the write goes through no windows that overlap.
    """
    found: list[jax.Array | None] = [None] * len(steps)
    within = [at for at, step in enumerate(steps[:-1]) if step.overlaps()]
    if not within:
        return found
    mark = jnp.ones_like(value)
    for at in range(len(steps) - 1, within[0], -1):
        mark = steps[at].set(jnp.zeros_like(bases[at]), mark, found[at])
        found[at - 1] = mark != 0
    return found


aten = torch.ops.aten
ViewBuilder = Callable[..., ViewStep | list[ViewStep]]
VIEWS: dict[Any, ViewBuilder] = {}
Builder = TypeVar("Builder", bound=ViewBuilder)


def view(*ops: Any) -> Callable[[Builder], Builder]:
    """Register the builder of one or more view ops.

    It is called as builder(base_meta, out_meta, *args, **kwargs).
    """

    def register(builder: Builder) -> Builder:
        for op in ops:
            VIEWS[op] = builder
        return builder

    return register


def _reshape_step(base: Sequence[int], out: Sequence[int]) -> ViewStep:
    base, out = tuple(base), tuple(out)
    return ViewStep(lambda v: lax.reshape(v, out), lambda _, new: lax.reshape(new, base))


@view(
    aten.view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten._unsafe_view.default,
)
def _reshape(base: torch.Tensor, out: torch.Tensor, *args: Any, **kwargs: Any) -> ViewStep:
    return _reshape_step(base.shape, out.shape)


def _permutation(dims: Sequence[int]) -> ViewStep:
    dims = tuple(dims)
    back = tuple(np.argsort(dims).tolist())
    return ViewStep(lambda v: lax.transpose(v, dims), lambda _, new: lax.transpose(new, back))


@view(aten.permute.default)
def _permute(base: torch.Tensor, out: torch.Tensor, dims: Sequence[int]) -> ViewStep:
    return _permutation([d % base.dim() if base.dim() else 0 for d in dims])


@view(aten.transpose.int)
def _transpose(base: torch.Tensor, out: torch.Tensor, dim0: int, dim1: int) -> ViewStep:
    dims = list(range(base.dim()))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permutation(dims)


@view(aten.t.default, aten.numpy_T.default)
def _t(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return _permutation(range(base.dim())[::-1])


@view(aten.mT.default, aten.adjoint.default)
def _mt(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return _transpose(base, out, -1, -2)


@view(aten.alias.default, aten.lift_fresh.default)
def _alias(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return ViewStep(lambda v: v, lambda _, new: new)


@jax.custom_jvp
def replace_value(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the value of `new` with the gradient of `old`.

    This is the effect of a write that autograd does not see.
    """
    del old
    return new


@replace_value.defjvp
def _replace_value_jvp(primals: Any, tangents: Any) -> Any:
    # By itself, so that a second derivative is that of `old` too.
    return replace_value(*primals), tangents[0]


@jax.custom_jvp
def tied(value: jax.Array, *operands: jax.Array) -> jax.Array:
    """Return a value on which operands have no influence, but for which eager gives them zeros."""
    del operands
    return value


@tied.defjvp
def _tied_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0]


def apart(value: jax.Array) -> jax.Array:
    """Return the value, computed before what uses it.

    XLA for the CPU (jax 0.10.2) computes an update inside an update in place, row 1 after row 0
    was written, though it reads the rows as they were; so it does with an update of an array that
    was updated in another shape. (`tests/exactness/test_writes.py` has the programs; this can go
    when XLA is right.)
    """
    return lax.optimization_barrier(value)


def note_read(value: jax.Array) -> None:
    """Note that an operation reads an array."""
    trace = innermost()
    if trace is not None and isinstance(value, Tracer):
        trace.read_arrays[id(value)] = value


def was_read(base: jax.Array) -> bool:
    """Return whether an array was read: what is written to a part of it may be a part of it.

    XLA for the CPU (jax 0.10.2) computes an update of a reshaped array in place though the update
    is a slice of that array: after `b = (x @ w).view(3, 4)`, `b[1:] = b[:-1].clone()` writes row 0
    to all rows. A select is right. (`tests/exactness/test_writes.py` has the program; this can go
    when XLA is right.)
    """
    trace = innermost()
    return trace is not None and trace.read_arrays.get(id(base)) is base


# A write through a detached alias changes the value of its base but no gradient.
DETACH = Detach(lax.stop_gradient, replace_value)


@view(aten.detach.default)
def _detach(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return DETACH


@view(aten.expand.default)
def _expand(base: torch.Tensor, out: torch.Tensor, *args: Any, **kwargs: Any) -> ViewStep:
    shape = tuple(out.shape)
    lead = len(shape) - base.dim()
    axes = tuple(range(lead, len(shape)))
    kept = tuple(base.shape)

    def inverse(_: jax.Array, new: jax.Array) -> jax.Array:
        # torch refuses writes where several elements share memory, so any of them is the value.
        index = (0,) * lead + tuple(slice(0, 1) if size == 1 else slice(None) for size in kept)
        return new[index]

    return ViewStep(lambda v: lax.broadcast_in_dim(v, shape, axes), inverse)


def _index_step(index: tuple[Any, ...], shape: Sequence[int]) -> ViewStep:
    """Return a basic index: contiguous ranges use lax.slice, which keeps the program small."""
    starts, limits, strides, dropped = [], [], [], []
    for dim, part in enumerate(index):
        if isinstance(part, int):
            start, stop, step = part, part + 1, 1
            dropped.append(dim)
        else:
            start, stop, step = part.indices(shape[dim])
        starts.append(start)
        limits.append(max(start, stop))
        strides.append(step)
    for size in shape[len(index) :]:
        starts.append(0)
        limits.append(size)
        strides.append(1)
    kept = tuple(
        -(-(stop - start) // step)
        for start, stop, step in zip(starts, limits, strides, strict=True)
    )
    out = tuple(size for dim, size in enumerate(kept) if dim not in dropped)

    def forward(v: jax.Array) -> jax.Array:
        v = lax.slice(v, starts, limits, strides)
        return lax.reshape(v, out) if dropped else v

    def inverse(base: jax.Array, new: jax.Array) -> jax.Array:
        new = lax.reshape(new, kept)
        if math.prod(kept) == 0:
            return base
        if kept == base.shape:
            return new
        if all(step == 1 for step in strides) and not was_read(base):
            return lax.dynamic_update_slice(base, new, [np.int32(s) for s in starts])
        return spaced_write(base, new, starts, strides)

    return ViewStep(forward, inverse)


def spaced_write(
    base: jax.Array, new: jax.Array, starts: Sequence[int], strides: Sequence[int]
) -> jax.Array:
    """Return `base` with `new` at every n-th position.

    This pads and selects instead of scattering: a scatter is slow on TPU, and the SPMD partitioner
    exchanges its complete operand if a dim is sharded.
    """
    config, places = [], jnp.ones((), jnp.bool_)
    for dim, (start, step) in enumerate(zip(starts, strides, strict=True)):
        end = start + (new.shape[dim] - 1) * step + 1
        config.append((start, base.shape[dim] - end, step - 1))
        if new.shape[dim] != base.shape[dim]:
            at = lax.broadcasted_iota(jnp.int32, base.shape, dim)
            places &= (at >= start) & (at < end) & ((at - start) % step == 0)
    spread = lax.pad(new, jnp.zeros((), new.dtype), config)
    return lax.select(jnp.broadcast_to(places, base.shape), spread, base)


def _at(dim: int, part: Any, base: torch.Tensor) -> ViewStep:
    dim %= base.dim()
    return _index_step((slice(None),) * dim + (part,), base.shape)


@view(aten.select.int)
def _select(base: torch.Tensor, out: torch.Tensor, dim: int, index: int) -> ViewStep:
    size = base.shape[dim]
    return _at(dim, index + size if index < 0 else index, base)


@view(aten.slice.Tensor)
def _slice(
    base: torch.Tensor,
    out: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> ViewStep:
    return _at(dim, slice(start, end, step), base)


@view(aten.split.Tensor, aten.split_with_sizes.default)
def _split(
    base: torch.Tensor, out: Sequence[torch.Tensor], sizes: Any, dim: int = 0
) -> list[ViewStep]:
    steps, start = [], 0
    for part in out:
        stop = start + part.shape[dim]
        steps.append(_at(dim, slice(start, stop), base))
        start = stop
    return steps


@view(aten.unbind.int)
def _unbind(base: torch.Tensor, out: Sequence[torch.Tensor], dim: int = 0) -> list[ViewStep]:
    return [_at(dim, index, base) for index in range(len(out))]


@view(aten.view_as_real.default)
def _view_as_real(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return ViewStep(
        lambda v: jnp.stack([v.real, v.imag], axis=-1),
        lambda _, new: lax.complex(new[..., 0], new[..., 1]),
    )


@view(aten.view_as_complex.default)
def _view_as_complex(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return ViewStep(
        lambda v: lax.complex(v[..., 0], v[..., 1]),
        lambda _, new: jnp.stack([new.real, new.imag], axis=-1),
    )


@view(aten._conj.default)
def _conj(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return ViewStep(jnp.conj, lambda _, new: jnp.conj(new))


@view(aten._neg_view.default)
def _neg_view(base: torch.Tensor, out: torch.Tensor) -> ViewStep:
    return ViewStep(lax.neg, lambda _, new: lax.neg(new))


@view(aten.view.dtype)
def _view_dtype(base: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> ViewStep:
    before, after = backend.jax_dtype(base.dtype), backend.jax_dtype(dtype)
    if base.dtype.itemsize != before.itemsize or dtype.itemsize != after.itemsize:
        raise port_error(
            f"a view of {base.dtype} as {dtype}, where a type of 64 bits is held in 32",
            code="TPU201",
            remedy="use a type of 32 bits, or take the bits apart by `//`, `%` and `>>`",
        )
    return ViewStep(lambda v: v.view(after), lambda _, new: new.view(before))


def retyping_steps(before: torch.dtype, after: torch.dtype) -> tuple[ViewStep, ...]:
    """Return the steps from a flat storage of one dtype to its bytes as another one."""
    if before is after:
        return ()
    flat = torch.empty(0, dtype=before)
    if before.is_complex and after is before.to_real():
        joined = ViewStep(lambda v: v.reshape(-1), lambda pairs, new: new.reshape(pairs.shape))
        return _view_as_real(flat, flat), joined
    if after.is_complex and before is after.to_real():
        paired = ViewStep(lambda v: v.reshape(-1, 2), lambda _, new: new.reshape(-1))
        return paired, _view_as_complex(flat, flat)
    return (_view_dtype(flat, flat, after),)


def sign_steps(tensor: torch.Tensor) -> tuple[ViewStep, ...]:
    """Return the steps of what a host tensor only notes: that it is conjugated or negated."""
    noted = ((tensor.is_conj(), _conj), (tensor.is_neg(), _neg_view))
    return tuple(build(tensor, tensor) for is_noted, build in noted if is_noted)


def is_signed(step: ViewStep) -> bool:
    """Return whether a step is what a host tensor only notes."""
    return step.forward in (jnp.conj, lax.neg)


def _by_index(op: Any) -> ViewBuilder:
    def build(base: torch.Tensor, out: torch.Tensor, *args: Any, **kwargs: Any) -> ViewStep:
        positions = torch.arange(base.numel()).reshape(base.shape)
        return _gather_step(op(positions, *args, **kwargs).contiguous().numpy())

    return build


for _op in (aten.diagonal.default, aten.unfold.default):
    VIEWS[_op] = _by_index(_op)


def _gather_step(flat: np.ndarray) -> ViewStep:
    flat = flat.astype(np.int32)

    def forward(v: jax.Array) -> jax.Array:
        if not flat.size:  # jnp.take would give one dim
            return jnp.zeros(flat.shape, v.dtype)
        # All indices are in range: "clip" only saves the masking of jnp.take's default mode.
        return jnp.take(v.reshape(-1), flat, mode="clip")

    def inverse(base: jax.Array, new: jax.Array) -> jax.Array:
        return base.reshape(-1).at[flat.reshape(-1)].set(new.reshape(-1)).reshape(base.shape)

    return ViewStep(forward, inverse, places=flat)


def _box_step(
    numel: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> ViewStep | None:
    """Return a strided window that is a box in the storage, seen with one dim for each stride.

    `x[..., 0::2]` of a contiguous x is one: index 0 of a last dim of size 2. None if it is no box.
    """
    order = sorted((d for d in range(len(size)) if size[d] != 1), key=lambda d: -stride[d])
    strides = [stride[d] for d in order]
    units = [numel, *strides, 1]
    if 0 in size or any(s < 1 for s in strides):
        return None
    if any(above % below for above, below in itertools.pairwise(units)):
        return None
    shape = [above // below for above, below in itertools.pairwise(units)]
    starts = [offset // below % n for below, n in zip(units[1:], shape, strict=True)]
    sizes = [size[d] for d in order]
    if any(a + b > n for a, b, n in zip(starts, sizes, shape, strict=False)):
        return None
    ranges = [slice(a, a + b) for a, b in zip(starts, sizes, strict=False)]
    part = _index_step((*ranges, starts[-1]), shape)
    back = tuple(np.argsort(order).tolist())

    def forward(v: jax.Array) -> jax.Array:
        return lax.reshape(lax.transpose(part.forward(lax.reshape(v, shape)), back), size)

    def inverse(base: jax.Array, new: jax.Array) -> jax.Array:
        kept = lax.reshape(new, [n for n in size if n != 1])
        ordered = lax.transpose(kept, np.argsort(back).tolist())
        return lax.reshape(part.inverse(lax.reshape(base, shape), ordered), base.shape)

    return ViewStep(forward, inverse)


def strided_step(numel: int, size: Sequence[int], stride: Sequence[int], offset: int) -> ViewStep:
    """Return a strided window into a flat storage of `numel` elements.

    Contiguous windows and permutations of them become slice, reshape and transpose; others become a
    gather.
    """
    size, stride = tuple(size), tuple(stride)
    count = math.prod(size)
    order = sorted(range(len(size)), key=lambda d: (-stride[d], -size[d]))
    expected = 1
    dense = True
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != expected:
            dense = False
        expected *= size[dim]
    if not dense:
        box = _box_step(numel, size, stride, offset)
        if box is not None:
            return box
        index = torch.arange(numel).as_strided(size, stride, offset)
        return _gather_step(index.contiguous().numpy())
    ordered = tuple(size[d] for d in order)
    back = tuple(np.argsort(order).tolist())

    def forward(v: jax.Array) -> jax.Array:
        flat = v if count == numel else lax.slice(v, (offset,), (offset + count,))
        shaped = lax.reshape(flat, ordered)
        return shaped if order == sorted(order) else lax.transpose(shaped, back)

    def inverse(base: jax.Array, new: jax.Array) -> jax.Array:
        if not count:
            return base
        shaped = new if order == sorted(order) else lax.transpose(new, tuple(order))
        flat = lax.reshape(shaped, (count,))
        return flat if count == numel else lax.dynamic_update_slice(base, flat, [np.int32(offset)])

    return ViewStep(forward, inverse)
