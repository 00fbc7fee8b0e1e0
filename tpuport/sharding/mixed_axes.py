"""Whether rules shard a dim over two axes such that XLA's partitioner may mix them up."""

from collections.abc import Iterable, Mapping

from jax.sharding import PartitionSpec as P

from tpuport.sharding.specs import axes_of, axis_size

_Entry = tuple[str, ...]


def mixes_axes(
    state: Iterable[P], arguments: Iterable[P], activations: Iterable[P], sizes: Mapping[str, int]
) -> bool:
    """Return whether a product may arise that the partitioner computes wrongly.

    It needs a result with one dim over two axes and another dim over a third one (see
    `tracing/patterns/products.py`). Where the two axes are those of a dim of the arguments, in
    every spec that has one of them, the operands of a product have them as well, and it is right.

    Args:
        state: specs of parameters and buffers.
        arguments: specs of a call's arguments.
        activations: specs of what modules get and return.
        sizes: sizes of the axes of the mesh.
    """
    if sum(size > 1 for size in sizes.values()) < 3:
        return False
    given = [_entries(spec, sizes) for spec in arguments]
    seen = [*given, *(_entries(spec, sizes) for spec in activations)]
    known = {entry for entries in given for entry in entries if len(entry) > 1}
    others = {entry for entries in seen for entry in entries} - known
    if any(not set(entry).isdisjoint(other) for entry in known for other in others):
        return True
    kept = [_entries(spec, sizes) for spec in state]
    return any(map(_is_mixed, kept)) or any(_is_mixed(entries, known) for entries in seen)


def _entries(spec: P, sizes: Mapping[str, int]) -> list[_Entry]:
    """Return the axes of several chips of each dim that has any."""
    dims = [
        tuple(axis for axis in axes_of(part) if axis_size(axis, dict(sizes)) > 1) for part in spec
    ]
    return [axes for axes in dims if axes]


def _is_mixed(entries: list[_Entry], known: Iterable[_Entry] = ()) -> bool:
    return len(entries) > 1 and any(len(entry) > 1 and entry not in known for entry in entries)
