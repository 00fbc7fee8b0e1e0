"""The arguments of a call as arrays, and what the call changed in the caller's own objects."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError, TpuportError, UsageError
from tpuport.foundation.interop import backend, device_mark
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.storage import Storage
from tpuport.tracing.core.tensor import TracedTensor, flow_seen, meta_of, wrap


def flatten_call(value: Any) -> tuple[list[Any], pytree.TreeSpec, list[str]]:
    """Return the leaves, structure and paths of call arguments.

    Plain objects are flattened even if they hold no tensor: the call may put one there, and an
    attribute that changed since the last call needs a retrace.
    """
    return pytree.flatten_with_paths(value, objects=True)


def argument_name(path: str) -> str:
    """Return the name of an argument by its path in (args, kwargs): `args[0].x`, `mask`."""
    positional = re.sub(r"^\[0\](?=\[)", "args", path)
    return re.sub(r"^\[1\]\.?", "", positional)


def copies(value: Any) -> Any:
    """Copy call arguments: clone and detach the tensors, rebuild containers and objects."""
    leaves, spec, _ = flatten_call(value)
    made = [
        leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" else leaf
        for leaf in map(_detached, leaves)
    ]
    return pytree.unflatten(spec, made)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def meta_argument(leaf: Any, path: str) -> torch.Tensor:
    """Return a meta tensor with the shape and dtype of an argument.

    Raises:
        UsageError: the argument is not a tensor, array or shape.
    """
    if isinstance(leaf, TracedTensor):
        return meta_of(leaf, like=True)
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("meta").requires_grad_(leaf.requires_grad)
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return torch.empty(leaf.shape, dtype=backend.torch_dtype(leaf.dtype), device="meta")
    msg = f"{path} is a {type(leaf).__name__}: expected a tensor or array"
    raise UsageError(msg)


def _computed(meta: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the meta tensor as one that was computed, if `like` was, which may be written to."""
    if like.is_leaf or torch.is_inference_mode_enabled():
        return meta
    with torch.enable_grad():
        return meta.view_as(meta)


def long_integers(value: Any, error: Exception) -> Any:
    """Return call arguments with the int32 arrays of JAX as int64 tensors.

    JAX has no int64 by default, so where torch wants int64 these are what the caller could give.

    Args:
        value: the arguments.
        error: what torch raised for them.

    Returns:
        None if there are no such arrays, or that is not what the error says.
    """
    leaves, spec, _ = flatten_call(value)
    if not wants_int64(error):
        return None
    narrow = [isinstance(leaf, jax.Array) and leaf.dtype == jnp.int32 for leaf in leaves]
    if not any(narrow):
        return None
    made = [
        wrap(leaf, torch.int64) if is_narrow else leaf
        for leaf, is_narrow in zip(leaves, narrow, strict=True)
    ]
    return pytree.unflatten(spec, made)


def wants_int64(error: Exception) -> bool:
    """Return whether it is an error of torch's that asks for int64."""
    return not isinstance(error, TpuportError) and _WANTS_INT64.search(str(error)) is not None


_WANTS_INT64 = re.compile(r"[Ll]ong\b|LongTensor|int64")


def argument_arrays(leaves: list[Any], paths: list[str]) -> tuple[list[Any], list[Any]]:
    """Return the array and the meta tensor of each argument (of a generator a key and its class).

    Raises:
        UsageError: an argument has no value, or one that its dtype on the device cannot hold.
    """
    values: list[Any] = []
    metas: list[Any] = []
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, torch.Generator):
            seed = torch.empty((), dtype=torch.int64).random_(generator=leaf).item()
            values.append(backend.key_of(int(seed)))
            metas.append(type(leaf))
            continue
        if isinstance(leaf, jax.Array):
            values.append(leaf)
            metas.append(
                torch.empty(leaf.shape, dtype=backend.torch_dtype(leaf.dtype), device="meta")
            )
            continue
        if isinstance(leaf, backend.TorchaxTensor):
            values.append(leaf.jax())
        elif leaf.device.type == "meta":
            msg = (
                f"argument {path} is on the meta device: it has no value;"
                " use ported.eval_shape(...)"
            )
            raise UsageError(msg)
        elif leaf.layout is not torch.strided:
            msg = (
                f"argument {path} has the layout {leaf.layout}: expected a dense tensor; pass"
                " .to_dense(), or its indices and values"
            )
            raise UsageError(msg)
        else:
            try:
                # So that the value stays concrete under a `jax.jit` of the caller's own too.
                with jax.ensure_compile_time_eval():
                    values.append(backend.to_jax(leaf))
            except OverflowError as error:
                msg = f"argument {path}: {error}"
                raise UsageError(msg) from error
        meta = _computed(meta_of(leaf, like=True), leaf)
        metas.append(device_mark.tag(meta) if device_mark.is_tagged(leaf) else meta)
    return values, metas


# -- changes to the caller's objects ---------------------------------------------------------------


def program_leaf(value: Any) -> bool:
    """Return whether a value leaves the program as an array: a tensor or traced Python number."""
    return isinstance(value, (torch.Tensor, jax.Array, *sym_numbers.SYMBOLIC))


@dataclass
class Changes:
    """The new contents of containers and objects that a call changed among its arguments.

    Attributes:
        contents: the node of each changed container after the call, by the container's number in
            the `Spec` of the arguments. Leaves numbered from `first` on are the program's, lower
            ones are arguments.
        first: the number of arguments.
        leaves: the program's own leaves.
    """

    contents: dict[int, Any]
    first: int
    leaves: list[Any]

    def write_back(self, spec: pytree.TreeSpec, arguments: list[Any], values: list[Any]) -> None:
        """Change the caller's objects as eager would have.

        Args:
            spec: the structure of this call's arguments, equal to that of the traced call.
            arguments: the leaves of this call's arguments.
            values: the program's results for `leaves`, as torch tensors and numbers.
        """
        held = dict(spec.containers)
        leaves = [*arguments, *values]
        for index, node in self.contents.items():
            if node[0] == "array":
                held[index][...] = node[2]
            else:
                content = node[2].map(lambda part: pytree.unflatten_node(part, leaves, held))
                pytree.refill(held[index], content)


class Watch:
    """A comparison of the containers among a traced call's arguments, before and after the call.

    Args:
        containers: the traced call's own copies, by number.
        leaves: the tensors of that call.
    """

    def __init__(self, containers: dict[int, Any], leaves: list[Any]) -> None:
        self.containers, self.leaves = dict(containers), list(leaves)
        self.before, _, reader = self._contents()
        self._kept = reader.leaves  # or another number may get the id of one

    def _contents(self) -> tuple[dict[int, Any], dict[int, Any], pytree.Flattener]:
        reader = pytree.Flattener(program_leaf, objects=True)
        reader.leaves = list(self.leaves)
        reader.paths = [""] * len(self.leaves)
        reader.containers = dict(self.containers)
        reader.seen = {id(leaf): ("leaf", i) for i, leaf in enumerate(self.leaves)}
        reader.seen |= {id(value): ("ref", i) for i, value in self.containers.items()}
        keys, nodes = {}, {}
        for index, value in self.containers.items():
            count = len(reader.leaves)
            nodes[index], key = reader.container(value, f"argument {index}", index)
            # Traced numbers are told apart by identity.
            keys[index] = key, tuple(map(id, reader.leaves[count:]))
        return keys, nodes, reader

    def changes(self) -> Changes | None:
        """Return what changed since this watch was made, or None."""
        keys, nodes, reader = self._contents()
        changed = {i: nodes[i] for i, key in keys.items() if key != self.before[i]}
        if not changed:
            return None
        first = len(self.leaves)
        return Changes(changed, first, reader.leaves[first:])


@dataclass(frozen=True)
class Unsized:
    """The meta of a result whose size depends on data: it comes padded, with its real sizes."""

    dtype: torch.dtype
    dims: tuple[int, ...]
    requires_grad: bool
    # Whether it is a list of the rows.
    is_list: bool = False

    def trimmed(self, value: tuple[jax.Array, list[Any]]) -> jax.Array:
        """Cut the padding off the array.

        Raises:
            PortError: the sizes are traced, inside a transformation of the caller's.
        """
        array, sizes = value
        if any(isinstance(size, (jax.core.Tracer, jax.ShapeDtypeStruct)) for size in sizes):
            raise unsized("an output of the call")
        for dim, size in zip(self.dims, sizes, strict=True):
            array = jax.lax.slice_in_dim(array, 0, int(size), axis=dim)
        return array


def unsized(what: str) -> PortError:
    """Return the error for a tensor that leaves a program with a data-dependent size."""
    return PortError(
        f"{what} has a size that depends on data; compiled programs have static sizes",
        code="TPU203",
        remedy=(
            "return it at full size together with the mask, or call the ported model itself"
            " (ported(...)), which trims its outputs"
        ),
    )


def static_leaves(values: list[Any], metas: list[Any]) -> list[Any]:
    """Return results as arrays of static size.

    Raises:
        PortError: the size of one depends on a traced value.
    """
    pairs = zip(values, metas, strict=True)
    return [m.trimmed(v) if isinstance(m, Unsized) else v for v, m in pairs]


def from_program(value: Any, meta: Any) -> Any:
    """Convert a result of a program to the torch tensor or Python number that `meta` describes."""
    if isinstance(meta, Unsized):
        made = wrap(meta.trimmed(value), meta.dtype, flow=flow_seen(meta.requires_grad))
        return [row.clone() for row in made.unbind(0)] if meta.is_list else made
    if isinstance(meta, type):
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[meta]
        return kind(value)
    flow = flow_seen(meta.requires_grad)
    made = TracedTensor(Storage(value, None), (), result_meta(meta), value, flow)
    made._or_number = getattr(meta, "_or_number", False)
    return made


def result_meta(meta: torch.Tensor) -> torch.Tensor:
    """Return the meta tensor of a result: of eager's strides, if its elements fill the memory.

    A result with gaps or with elements that share memory is a contiguous copy.
    """
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(meta)
    stride = meta.stride() if dense else torch.empty(meta.shape, device="meta").stride()
    like = {"dtype": meta.dtype, "device": "meta", "requires_grad": meta.requires_grad}
    return torch.empty_strided(meta.shape, stride, **like)


# -- arguments over the same memory ----------------------------------------------------------------


def write_leaves(leaves: list[Any], mutated: Mapping[int, jax.Array | torch.Tensor]) -> None:
    """Write the new values of arguments that the program changed in place.

    Tensors are values with a graph.
    """
    for index, value in mutated.items():
        leaf = leaves[int(index)]
        if isinstance(value, torch.Tensor):
            with torch.enable_grad():  # its graph goes on from there
                leaf.copy_(value)
        elif isinstance(leaf, TracedTensor):
            leaf.write(value)
        elif isinstance(leaf, torch.Tensor):
            with torch.no_grad():
                leaf.copy_(backend.to_torch(value, leaf.dtype))


def refuse_offsets(leaves: list[Any], paths: list[str], placed: list[int]) -> None:
    """Refuse arguments that begin inside of their storage, if the code asked where they begin.

    Raises:
        PortError: there is one. The program has only the elements of an argument.
    """
    for index in placed:
        leaf = leaves[index]
        if isinstance(leaf, torch.Tensor) and torch.Tensor.storage_offset(leaf):
            raise PortError(
                f"{argument_name(paths[index])} is a view that begins inside of its storage, and"
                " the code reads its storage_offset() or gives as_strided a place in it",
                code="TPU203",
                remedy="pass a .clone(), or cut it with ordinary slices",
            )


def refuse_shared_memory(leaves: list[Any], paths: list[str], mutated: Mapping[int, Any]) -> None:
    """Refuse a write to one of two arguments that share memory.

    Eager changes both, which the program cannot do.

    Raises:
        UsageError: the call made such a write.
    """
    for index in map(int, mutated):
        for other, leaf in enumerate(leaves):
            if other != index and _overlap(leaves[index], leaf):
                mine, theirs = argument_name(paths[index]), argument_name(paths[other])
                msg = (
                    f"the call writes to argument {mine}, which shares memory with argument"
                    f" {theirs}; pass {theirs} as a .clone()"
                )
                raise UsageError(msg)


def _overlap(a: Any, b: Any) -> bool:
    """Return whether two arguments may share an element."""
    if isinstance(a, TracedTensor) or isinstance(b, TracedTensor):
        return getattr(a, "_storage", 0) is getattr(b, "_storage", 1)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not (a.numel() and b.numel()):
        return False
    last = [
        t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for t in (a, b)
    ]
    if a.storage_offset() > last[1] or b.storage_offset() > last[0]:
        return False
    if max(last) > _MOST_PLACES:
        return True
    # Columns of one matrix lie between each other.
    written = np.zeros(max(last) + 1, bool)
    _places(written, a)[...] = True
    return bool(_places(written, b).any())


# In larger memory (a byte for each element is set and read here) the two count as overlapping.
_MOST_PLACES = 1 << 26


def _places(memory: np.ndarray, tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a storage, one byte each, that a tensor has."""
    start = memory[tensor.storage_offset() :]
    return np.lib.stride_tricks.as_strided(start, tensor.shape, tensor.stride())
