"""Conversion, printing and fitting of PartitionSpecs."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.sharding.mesh import MeshAxis, sizes_of


def as_spec(spec: Any, where: str) -> P:
    """Return a PartitionSpec of strings; None becomes P() and an axis name P(name).

    Raises:
        UsageError: `spec` is no spec, or names an axis twice.
    """
    if spec is None:
        return P()
    parts = (spec,) if isinstance(spec, str) else spec
    if not isinstance(parts, tuple | P):
        raise UsageError(
            f"{where}: expected a jax.sharding.PartitionSpec, an axis name or None, got {spec!r}"
        )
    made: list[Any] = []
    for part in parts:
        names = axes_of(part)
        if not all(isinstance(name, str) for name in names):
            raise UsageError(f"{where}: {part!r} in {spec} is no name of a mesh axis")
        named = tuple(map(str, names))
        free = P.UNCONSTRAINED if part is P.UNCONSTRAINED else None
        made.append(free if not named else named[0] if len(named) == 1 else named)
    used = [name for part in made for name in axes_of(part)]
    twice = sorted({name for name in used if used.count(name) > 1})
    if twice:
        raise UsageError(f"{where}: {shown(P(*made))} uses the axis {twice[0]!r} more than once")
    return P(*made)


def axes_of(part: Any) -> tuple[Any, ...]:
    """Return the mesh axes of one dim of a spec."""
    if part is None or part is P.UNCONSTRAINED:
        return ()
    return tuple(part) if isinstance(part, tuple | list) else (part,)


def shown(spec: P) -> str:
    """Return a spec as it is written in code: `P('fsdp', None)`."""
    parts = ("UNCONSTRAINED" if part is P.UNCONSTRAINED else repr(part) for part in spec)
    return f"P({', '.join(parts)})"


def fitted(spec: P, shape: Sequence[int], mesh: Any) -> tuple[P, list[tuple[int, tuple[str, ...]]]]:
    """Drop the axes of a spec that do not divide their dim; return both.

    An axis of `MeshAxis` that the mesh lacks counts as one of size 1. The axes of a dim are dropped
    from the last, until the others divide it.

    Args:
        spec: spec, at most as long as the shape.
        shape: shape of the array.
        mesh: a mesh or its sizes.

    Returns:
        The spec, and each dim with the axes that it lost.

    Raises:
        UsageError: the mesh has no such axis.
    """
    sizes = sizes_of(mesh)
    made: list[Any] = []
    lost: list[tuple[int, tuple[str, ...]]] = []
    for dim, part in enumerate(spec):
        axes = [name for name in axes_of(part) if axis_size(name, sizes) > 1]
        kept = list(axes)
        while kept and shape[dim] % math.prod(sizes[name] for name in kept):
            kept.pop()
        if len(kept) < len(axes):
            lost.append((dim, tuple(axes[len(kept) :])))
        free = P.UNCONSTRAINED if part is P.UNCONSTRAINED else None
        made.append(free if not kept else kept[0] if len(kept) == 1 else tuple(kept))
    while made and made[-1] is None:
        made.pop()
    return P(*made), lost


def axis_size(name: str, sizes: dict[str, int]) -> int:
    """Return the size of a mesh axis.

    Raises:
        UsageError: the axis is neither in the mesh nor in `MeshAxis`.
    """
    if name in sizes:
        return sizes[name]
    if name in set(MeshAxis):
        return 1
    raise UsageError(f"the mesh has no axis {name!r}; its axes are {', '.join(sizes)}")


def num_shards(spec: P, sizes: dict[str, int]) -> int:
    """Return the number of different shards into which a spec splits an array."""
    return math.prod(axis_size(name, sizes) for part in spec for name in axes_of(part))
