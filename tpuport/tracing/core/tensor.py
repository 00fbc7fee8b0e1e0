"""The tensor that user code holds while its program is traced, and afterwards as a result.

A `TracedTensor` is a torch wrapper subclass around a `jax.Array` (a tracer during tracing). Its
torch metadata (dtype, sizes, strides, storage offset) are those of eager PyTorch, so code that
reads `.dtype`, `.stride()` or `is_contiguous()` takes the same path. All views of a tensor share a
`Storage` with its value, so an in-place write through one is seen by the others, as in PyTorch.
"""

import copy
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.foundation.interop.seen_device import seen_device
from tpuport.tracing.core import concretize, int64
from tpuport.tracing.core.as_subclass import AsSubclass
from tpuport.tracing.core.concretize import decide, identity_is_asked
from tpuport.tracing.core.errors import port_error, refuse_other_memory
from tpuport.tracing.core.graph_node import GraphNode
from tpuport.tracing.core.leaf_flags import set_flag
from tpuport.tracing.core.op_handler import handle
from tpuport.tracing.core.row_list import RowIterator, RowList
from tpuport.tracing.core.set_attributes import as_copy
from tpuport.tracing.core.storage import Flow, Storage, detaching, differentiable
from tpuport.tracing.core.sym_node import NumberNode, TracedText
from tpuport.tracing.core.sym_numbers import from_node, number
from tpuport.tracing.core.view_steps import (
    DETACH,
    Detach,
    Moving,
    ViewStep,
    apart,
    note_read,
    replace_value,
    was_read,
    written_through,
)

# How the text of a traced tensor begins.
SHOWN = "TracedTensor("


class SeriesRow(NamedTuple):
    """Which row of an array a tensor is, as long as its storage has this version.

    `region` is the part of the program where the array may be used.
    """

    value: jax.Array
    number: int
    storage: Storage
    version: int
    region: int


class TracedTensor(AsSubclass, backend.TorchaxTensor):
    """A torch tensor whose value is a jax array; see the module docstring."""

    # Libraries (opt_einsum, autoray) choose their functions by the module of an array's class.
    __module__ = "torch"

    is_traced = True
    # Sizes that depend on data, by dim. The physical size is an upper bound; elements past the size
    # are padding.
    _extents: dict[int, Any] | None = None
    # The storage and version that `_bounds` hold for, and the bounds.
    _bounds_of: "tuple[Storage, int, tuple[float, float] | None] | None" = None
    # The storage and version that hold ascending integers, as positions and distinct values are.
    _ascends_of: "tuple[Storage, int] | None" = None
    # Where it was made by joining tensors: see `loop_sites`.
    _joined_at: "list[Any] | None" = None
    # The boolean tensor that this one negates, and that tensor's value at the time.
    _negates: "tuple[TracedTensor, jax.Array] | None" = None
    _as_number: tuple[jax.Array, int, Any] | None = None
    # Whether eager has a Python number in its place on some path.
    _or_number = False
    # If it is a tensor of another dtype than that number would make: makes the error for an
    # operation that would give something else for the number (see `or_number`).
    _unlike_number: Any = None
    # Whether a branch under no_grad takes a tensor of before the call, with its graph, or another.
    _may_keep_graph = False
    # Which row it is of what a loop has made: see `series`.
    _row: SeriesRow | None = None
    # What it stands for in a list of as many rows as data says: see `counted_rows`.
    _run: Any = None
    # Whether it leaves the program as a list of its rows.
    _is_list = False
    # Whether it is state of the program or one of its arguments.
    _is_given: bool
    # Whether it is a view of a leaf that requires grad.
    _of_leaf = False
    # Why autograd refuses writes to this view, if a gradient would go through them.
    _unwritable: str | None = None
    # The name of its value in the program, if code inside made it a leaf.
    _leaf_name: str | None = None
    # What it was as a leaf that requires grad, until code inside ended that: see `leaf_flags`.
    _ended_leaf: Any = None
    # Whether its value is that of the tensor which it was made from: a clone, or a view of all.
    _repeats = False
    # What `backward()` inside the program gave it.
    _left_grad: "TracedTensor | None" = None

    @staticmethod
    def __new__(
        cls,
        storage: Storage,
        chain: tuple[ViewStep, ...],
        meta: torch.Tensor,
        value: jax.Array | None = None,
        flow: Flow = Flow.STOPPED,
        detached: bool = False,
    ) -> "TracedTensor":
        """Wrap `storage` read through `chain`; `meta` has the dtype, sizes, strides and offset."""
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device="cpu",  # pyright: ignore[reportArgumentType]  (torch takes a name)
            requires_grad=False,  # jax differentiates, so torch must record nothing
        )

    def __init__(
        self,
        storage: Storage,
        chain: tuple[ViewStep, ...],
        meta: torch.Tensor,
        value: jax.Array | None = None,
        flow: Flow = Flow.STOPPED,
        detached: bool = False,
    ) -> None:
        self._storage = storage
        if not chain and storage.stride is None:
            storage.stride = meta.stride()
        self._chain = chain
        self._cached = value
        self._cached_version = storage.version if value is not None else -1
        self._cached_region = self._region()
        # Writes through an alias reach the flow of all but those that were detached.
        flows = differentiable(meta.dtype)
        self._own_flow, self._detached = flow if flows else Flow.STOPPED, detached or not flows
        self._is_leaf = self._is_given = False
        self._stopped: tuple[int, int, jax.Array] | None = None
        self._env = None

    @property
    def __class__(self) -> type[torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  (nobody sets it)
        """Return the class that user code sees; `type` gives the real one."""
        return torch.nn.Parameter if getattr(self, "_is_param", False) else torch.Tensor

    # -- gradients ---------------------------------------------------------------------------------

    @property
    def _flow(self) -> Flow:
        """Return how derivatives pass through this tensor."""
        graph = self._graph if self._detached else self._storage
        return self._own_flow if graph is None else max(self._own_flow, graph.flow)

    @property
    def _graph(self) -> Storage | None:
        """Return what holds the gradient of the detached tensor that this is a view of."""
        return next((s.graph for s in reversed(self._chain) if isinstance(s, Detach)), None)

    @property
    def _frozen(self) -> bool:
        """Return whether no derivative passes through this tensor."""
        return self._flow is Flow.STOPPED

    def _carry(self, flow: Flow) -> None:
        """Note that a value with such a flow is written to this tensor.

        Raises:
            PortError: it would carry a gradient of which the tensor that it is a view of knows not.
        """
        if not differentiable(self.dtype):
            return
        graph = self._graph if self._detached else self._storage
        if graph is not None:
            graph.flow = max(graph.flow, flow)
        elif flow is not Flow.STOPPED and self._unwritable is None:
            raise port_error(
                "a value with a gradient is written through as_strided of a detached tensor",
                code="TPU203",
                remedy="write to the tensor itself, by an index or a slice",
            )

    # -- value -------------------------------------------------------------------------------------

    def _region(self) -> int:
        """Return the nested trace (region) that is running now."""
        trace = self._storage.trace
        return 0 if trace is None else trace.regions[-1]

    def _is_alive(self, region: int) -> bool:
        """Return whether a value cached in `region` may still be used."""
        trace = self._storage.trace
        return region == 0 or (trace is not None and region in trace.regions)

    def _keep(self, value: jax.Array) -> None:
        self._cached, self._cached_version = value, self._storage.version
        self._cached_region = self._region()

    @property
    def _held(self) -> jax.Array:
        """Return the current value, read again from the storage if another alias wrote to it.

        It has 64 bits if the storage is wide.
        """
        storage = self._storage
        if storage.trace is not None:
            note_read(storage.held)
        if self._cached_version == storage.version and self._is_alive(self._cached_region):
            return self._cached  # type: ignore[return-value]
        value = storage.held
        for step in self._chain:
            value = step.read(value)
        self._keep(value)
        return value

    @property
    def _elem(self) -> jax.Array:
        """Return the current value in the dtype that jax has for it."""
        storage, value = self._storage, self._held
        return storage.narrowed(value) if storage.wide and int64.is_wide(value) else value

    @_elem.setter
    def _elem(self, value: jax.Array) -> None:
        self.write(value)

    def write(self, value: jax.Array) -> None:
        """Set this tensor's value in its storage, so that every alias sees it."""
        if self._chain and (self._storage.wide or int64.is_wide(value)):
            with int64.scope():
                base = self._storage.held.astype(jnp.int64)
                written = self._written(value.astype(jnp.int64), base)
        else:
            written = self._written(value, self._storage.held)
        self._storage.set(written)
        if not self._chain:
            self._keep(value)

    def _written(self, value: jax.Array, base: jax.Array) -> jax.Array:
        bases = [base]
        for step in self._chain[:-1]:
            bases.append(step.forward(bases[-1]))
        if was_read(self._storage.held):
            for base in bases:
                note_read(base)
        written, graph = value, self._graph if self._detached else None
        size = value.size
        which = reversed(written_through(self._chain, bases, value))
        for base, step, some in zip(reversed(bases), reversed(self._chain), which, strict=False):
            if written.size != value.size:
                written = apart(written)
            size = written.size
            if graph is not None and isinstance(step, Detach) and step.graph is graph:
                if graph.version or not self._frozen:
                    graph.set(written)
                graph = None
            written = step.set(base, written, some)
        is_reshaped = written.size == size != value.size
        return apart(written) if is_reshaped else written

    @property
    def _bounds(self) -> tuple[float, float] | None:
        """Return the smallest and largest value that a tensor of integers or drawn floats can hold.

        None where no op guarantees them, or the tensor was written since.
        """
        known = self._bounds_of
        if known is None or known[0] is not self._storage or known[1] != self._storage.version:
            return self._storage_bounds()
        return known[2] or self._storage_bounds()

    def _storage_bounds(self) -> tuple[float, float] | None:
        known = self._storage.bounds
        if known is None or known[0] is not self._storage.held or known[1] != self.dtype:
            return None
        return known[2]

    @_bounds.setter
    def _bounds(self, bounds: tuple[float, float] | None) -> None:
        self._bounds_of = (self._storage, self._storage.version, bounds)

    @property
    def _ascends(self) -> bool:
        """Return whether the elements are known to be integers in ascending order, all distinct."""
        return self._ascends_of == (self._storage, self._storage.version)

    @_ascends.setter
    def _ascends(self, ascends: bool) -> None:
        self._ascends_of = (self._storage, self._storage.version) if ascends else None

    def jax(self) -> jax.Array:
        """Return the value as a jax array (a tracer while a program is traced)."""
        return self._elem

    @property
    def is_concrete(self) -> bool:
        """Return whether the value is concrete (not a tracer)."""
        return not isinstance(self._elem, jax.core.Tracer)

    # -- torch surface -----------------------------------------------------------------------------

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return handle(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Return the sizes, those that depend on data as traced integers."""
        return torch.Tensor.size(self) if self._extents is None else self._logical()

    def _logical(self) -> torch.Size:
        """Return the sizes with the data-dependent ones as traced integers."""
        sizes = list(torch.Tensor.size(self))
        for dim, node in (self._extents or {}).items():
            sizes[dim] = from_node(node)
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        """Return the sizes, or the size of one dim; a traced integer where it depends on data."""
        if self._extents is None:
            return torch.Tensor.size(self) if dim is None else torch.Tensor.size(self, dim)
        shape = self._logical()
        return shape if dim is None else shape[dim]

    def numel(self) -> Any:
        """Return the number of elements; a traced integer where a size depends on data."""
        if self._extents is None:
            return torch.Tensor.numel(self)
        total: Any = 1
        for size in self._logical():
            total = total * size
        return total

    nelement = numel

    def storage_offset(self) -> int:
        """Return where this begins in its storage; an argument may begin elsewhere in eager's."""
        self.refuse_moving()
        if self._storage.trace is not None:
            self._storage.trace.offsets_read.add(self._storage.serial)
        return int(torch.Tensor.storage_offset(self))

    def refuse_moving(self) -> None:
        """Raise if this begins at another place of its storage in each round of a loop."""
        for step in self._chain:
            if isinstance(step, Moving):
                step.refuse()

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """Expand to another tensor's sizes, of which C++ would see the padded ones.

        This is a method because torch's own Python functions call it where no mode sees it.
        """
        if self._extents is None and getattr(other, "_extents", None) is None:
            return torch.Tensor.expand_as(self, other)
        return self.expand(other.shape)

    def __iter__(self) -> Any:
        if self._extents and 0 in self._extents:
            return RowIterator(self)
        return torch.Tensor.__iter__(self)

    def __len__(self) -> int:
        if self._extents and 0 in self._extents:
            return int(self._logical()[0])
        return torch.Tensor.__len__(self)

    @property
    def bound_shape(self) -> torch.Size:
        """Return the physical sizes: `shape` with upper bounds where a size depends on data."""
        return torch.Tensor.size(self)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Return the number of dims."""
        return self.dim()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Return the dtype that eager PyTorch has (jax may store int64 as int32)."""
        return torch.Tensor.dtype.__get__(self)  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the CPU while a program is traced, as in eager; `jax:0` for a computed value.

        If an accelerator is emulated, return that in both cases.
        """
        where = "cpu" if self._storage.trace is not None else "jax:0"
        return seen_device() or torch.device(where)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Return what eager would: whether an operand of what made this tensor requires grad."""
        return self._flow >= Flow.MAYBE

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(  # pyright: ignore[reportIncompatibleMethodOverride]  (torch has this name)
        self, requires_grad: bool = True
    ) -> "TracedTensor":
        """Make this tensor a leaf with a gradient, or stop gradients through it from here on.

        Raises:
            RuntimeError: as in eager, the dtype has no gradients, or a computed tensor is to lose
                its own.
            PortError: data decides whether this happens to a parameter.
        """
        set_flag(self, requires_grad)
        return self

    @property
    def grad(self) -> "TracedTensor | None":
        """Return what a `backward()` inside the program left, None without one.

        jax returns gradients, it does not collect them on tensors.
        """
        return self._left_grad

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]  (torch's is one in C)
        self, value: "TracedTensor | None"
    ) -> None:
        self._left_grad = value

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Return None where eager does; otherwise a node that says that there is no graph here."""
        return None if self.is_leaf else GraphNode(self)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Return what eager does: whether this tensor was not computed from one with a gradient."""
        return self._is_parameter or not self.requires_grad

    @property
    def _is_parameter(self) -> bool:
        """Return whether this is a leaf that requires grad by itself, not by what is written."""
        return self._is_leaf and self._own_flow >= Flow.MAYBE

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return the tensor without its gradient; assignment keeps the gradient.

        Raises:
            PortError: A tensor of another shape or dtype is assigned.
        """
        return self.detach()

    @data.setter
    def data(  # pyright: ignore[reportIncompatibleMethodOverride]  (stubs name it otherwise)
        self, value: torch.Tensor
    ) -> None:
        old, value = self._elem, self._traced(value)
        # Autograd does not see the assignment: the gradient is still that of the old value.
        step = ViewStep(lambda v: replace_value(old, v), replace_value)
        if value.dtype != self.dtype or old.shape != value._elem.shape:
            raise port_error(
                f"`.data` of a tensor ({self.dtype}, {tuple(old.shape)}) gets another dtype or"
                f" shape ({value.dtype}, {tuple(value._elem.shape)})",
                code="TPU203",
                remedy="make a new tensor, or assign one of the same dtype and shape",
            )
        chain = (*value._chain, step) if differentiable(self.dtype) else value._chain
        self._rebind_here(value._storage, chain)

    def set_storage_of(self, value: torch.Tensor) -> None:
        """Become another alias of a tensor, of its shape."""
        value = self._traced(value)
        self._rebind_here(value._storage, value._chain)

    def _traced(self, value: torch.Tensor) -> "TracedTensor":
        """Return a tensor, or what stands for a tensor of the host, in the trace of this one."""
        if isinstance(value, TracedTensor):
            return value
        trace = self._storage.trace
        if trace is None:
            return wrap(backend.to_jax(value), value.dtype)
        # Its memory is shared from here on, and may already hold what the program wrote to it.
        return trace.promote(value)

    def _rebind_here(self, storage: Storage, chain: tuple[ViewStep, ...]) -> None:
        trace = self._storage.trace
        refuse_other_memory(trace, self)
        for effects in () if trace is None else trace.effects:
            effects.rebinding(self)
        self.rebind(storage, chain)

    def rebind(self, storage: Storage, chain: tuple[ViewStep, ...] = ()) -> None:
        """Read another storage from here on; other aliases of the old one do not."""
        self._storage, self._chain, self._cached_version = storage, chain, -1

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value on the host, in the torch dtype.

        Raises:
            PortError: The program is being traced (there is no value yet).
        """
        del force
        return to_cpu(self).numpy()

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def tolist(self) -> Any:
        """Return the value as nested lists of Python numbers (traced numbers while tracing)."""
        if self._storage.trace is not None:
            return tolist(self)
        return to_cpu(self).tolist()

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a plain CPU tensor or, while tracing, the tensor itself (it stays on device)."""
        del args, kwargs
        return self if self._storage.trace is not None else to_cpu(self)

    def __copy__(self) -> torch.Tensor:
        """Return a leaf on the same memory, as eager does: no gradient goes back."""
        return as_copy(self, torch.Tensor.detach(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a leaf on a copy of the memory, as eager does.

        Copies of tensors that share memory share theirs, and no gradient goes back to what was
        copied.

        Raises:
            RuntimeError: as in eager, the tensor was computed from one with a gradient.
        """
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy"
                " protocol at the moment."
            )
        if self._extents is not None:
            copied = self.detach().clone()
        else:
            stored = memo.get(id(self._storage))
            if stored is None:
                stored = Storage(jax.lax.stop_gradient(self._storage.held), self._storage.trace)
                stored.stride = self._storage.stride
                memo[id(self._storage)] = stored
            copied = TracedTensor(stored, self._chain, meta_of(self)).detach()
        memo[id(self)] = as_copy(self, copied, lambda value: copy.deepcopy(value, memo))
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        if self.is_concrete and self._storage.trace is None:
            return f"tpuport.Tensor({to_cpu(self)!r:.2000})"
        return TracedText(f"{SHOWN}shape={tuple(self.shape)}, dtype={self.dtype})")

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self.dim() == 0 and (self.is_concrete or concretize.text_is_looked_at()):
            return format((to_cpu(self) if self.is_concrete else self).item(), spec)
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return to_cpu(self).__reduce_ex__(protocol)

    # These are torch's own methods; torchax's class overrides them.
    type_as: Any = torch.Tensor.type_as
    flatten: Any = torch.Tensor.flatten
    detach: Any = torch.Tensor.detach
    __setitem__: Any = torch.Tensor.__setitem__

    def dim(self) -> int:
        """Return the number of dims."""
        return torch.Tensor.dim(self)

    def torch(self) -> torch.Tensor:
        """Return a plain CPU torch tensor with the same value and dtype."""
        return to_cpu(self)


def flow_seen(requires_grad: bool) -> Flow:
    """Return the flow of a tensor that requires grad or does not."""
    return Flow.SEEN if requires_grad else Flow.STOPPED


def wrap(
    value: jax.Array,
    dtype: torch.dtype | None = None,
    *,
    trace: Any = None,
    flow: Flow = Flow.STOPPED,
) -> TracedTensor:
    """Return a fresh contiguous tensor around `value`.

    Pass `dtype` where torch's differs from jax's (int64 stored as int32).
    """
    torch_dtype = dtype or backend.torch_dtype(value.dtype)
    meta = torch.empty(value.shape, dtype=torch_dtype, device="meta")
    return TracedTensor(Storage(value, trace), (), meta, value, flow)


def meta_of(tensor: torch.Tensor, *, like: bool = False) -> torch.Tensor:
    """Return a meta tensor with the sizes, strides and dtype of `tensor`.

    Args:
        tensor: Any tensor.
        like: Whether it requires grad if `tensor` does.
    """
    return torch.empty_strided(
        torch.Tensor.size(tensor),
        tensor.stride(),
        dtype=tensor.dtype,
        device="meta",
        requires_grad=like and tensor.requires_grad,
    )


def to_cpu(tensor: TracedTensor) -> torch.Tensor:
    """Copy a computed tensor to a plain CPU tensor of its torch dtype.

    Raises:
        PortError: The value is a tracer.
    """
    value = tensor._held
    if isinstance(value, jax.core.Tracer):
        raise port_error(
            "a traced value was asked for on the host (.numpy(), np.asarray, .cpu().numpy())",
            code="TPU301",
            remedy="do this with torch operations, or after the ported call on its output",
        )
    return backend.to_torch(value, tensor.dtype)


_MADE_WITHOUT_GRAD = (
    "A view was created in no_grad mode and is being modified inplace with grad mode enabled."
)


def view_of(
    base: TracedTensor, step: ViewStep, meta: torch.Tensor, *, detach: bool = False
) -> TracedTensor:
    """Return a tensor that reads the storage of `base` through one more step."""
    # Offsets of meta tensors start at zero for the base: add the base's own.
    start: Any = torch.Tensor.storage_offset(base)
    offset = start * base.itemsize // meta.itemsize + meta.storage_offset()
    if offset:
        meta = meta.as_strided(meta.size(), meta.stride(), offset)
    value = step.read(base._held)
    if detach and differentiable(base.dtype):
        step = detaching(value, base._storage.trace)
    chain = (*base._chain, step)
    # Eager's views made under no_grad pass no gradient on, wherever they are used, although they
    # say that they require one.
    cut = not (detach or torch.is_grad_enabled() or base._frozen)
    if cut:
        chain, value = (*chain, DETACH), DETACH.read(value)
    flow = Flow.STOPPED if detach else base._flow if cut else base._own_flow
    result = TracedTensor(base._storage, chain, meta, None, flow, detach or cut or base._detached)
    result._is_leaf = cut
    if not detach:
        result._of_leaf = base._of_leaf or base._is_parameter
        result._unwritable = _MADE_WITHOUT_GRAD if cut else base._unwritable
    result._bounds, result._repeats = base._bounds, value is base._held
    if base._ascends and meta.dtype == base.dtype:
        result._ascends = meta.numel() == torch.Tensor.numel(base)
    result._keep(value)
    return result


def item(tensor: TracedTensor) -> Any:
    """Return `.item()` of a traced tensor: a traced Python number."""
    if tensor.numel() != 1:
        msg = f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar"
        raise RuntimeError(msg)
    trace = tensor._storage.trace
    assert trace is not None
    trace.has_numbers = True
    # A Python number has no gradient.
    value = jax.lax.stop_gradient(jax.lax.reshape(tensor._held, ()))
    if tensor.dtype is torch.bool:
        return decide(value) if identity_is_asked() else number(value, bool)
    if tensor.dtype.is_floating_point:
        return number(value, float, *(tensor._bounds or (-math.inf, math.inf)))
    if tensor.dtype.is_complex:
        raise port_error(
            ".item() of a traced complex tensor",
            code="TPU106",
            remedy="keep it a 0-d tensor: torch arithmetic takes it where it takes a number",
        )
    node = tensor._as_number
    if node is None or node[0] is not tensor._held or not tensor._is_alive(node[1]):
        low, high = tensor._bounds or (-math.inf, math.inf)
        made = NumberNode(value, int, low, high)
        node = tensor._as_number = (tensor._held, tensor._region(), made)
    return from_node(node[2])


def tolist(tensor: TracedTensor) -> Any:
    """Return `.tolist()` of a traced tensor: nested lists of traced numbers."""
    if tensor.dim() == 0:
        return item(tensor)
    if tensor._extents and 0 in tensor._extents:
        return RowList(tensor)
    return [tolist(part) for part in tensor.unbind(0)]  # type: ignore[arg-type]


def version(value: Any) -> int:
    """Return how often a tensor has been written to."""
    if isinstance(value, TracedTensor):
        return value._storage.version
    # A tensor made in inference mode counts none.
    counts = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if counts else 0
