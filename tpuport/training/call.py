"""The arguments of a step, flattened and placed where its program reads them."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import backend
from tpuport.model.ported_model import PortedModel
from tpuport.model.program_cache import CallArguments, flattened
from tpuport.tracing.core import arguments
from tpuport.training.input.sources import HostShard


@dataclass(frozen=True)
class PlacedArguments(CallArguments):
    """The arguments of one call on the devices, as `TrainStep.place` returns them."""

    @property
    def rows(self) -> int:
        """Return the length of the first dim of the first array with dims: the global batch."""
        return next((int(value.shape[0]) for value in self.values if value.ndim), 0)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the argument `input_ids`; 0 without one."""
        return next(
            (v.size for v, p in zip(self.values, self.paths, strict=True) if "input_ids" in p), 0
        )


def placed(ported: PortedModel, given: Any) -> PlacedArguments:
    """Place the arguments of a call, which are equal on all processes.

    Args:
        ported: the model, whose mesh the arguments are placed on.
        given: (args, kwargs).
    """
    _, call = flattened(given, ported._placement)
    return PlacedArguments(call.values, call.metas, call.paths, call.spec)


def placed_part(ported: PortedModel, given: Any, share: HostShard) -> PlacedArguments:
    """Place the arguments of a call of which this process has only its own rows.

    Args:
        ported: the model, sharded over a mesh.
        given: (args, kwargs) of tensors on the host.
        share: the part of the batch that these rows are.

    Raises:
        UsageError: the mesh would have other rows here.
    """
    leaves, spec, paths = arguments.flatten_call(given)
    placement: Any = ported._placement
    values: list[Any] = []
    metas: list[torch.Tensor] = []
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, backend.TorchaxTensor):
            raise UsageError(
                f"argument {path} is a {type(leaf).__name__}: expected a torch tensor on the host,"
                " of which each process has its rows"
            )
        whole: tuple[int, ...] = tuple(leaf.shape)
        if whole:
            whole = (whole[0] * share.count, *whole[1:])
        where = NamedSharding(placement.mesh, placement.input_spec(path, whole))
        if whole and process_share(where, whole[0]) != share:
            raise UsageError(
                f"argument {path}: a batch of {whole[0]} rows is not spread over the processes as"
                f" it was read ({where.spec} over {dict(placement.mesh.shape)}). What to do: give a"
                " batch_size that the mesh's axes of data divide, or put what is not of one"
                " example into the model"
            )
        array = backend.to_numpy_array(leaf)
        target = backend.jax_dtype(leaf.dtype)
        try:
            backend.check_fits(array, target)
        except OverflowError as error:
            raise UsageError(f"argument {path}: {error}") from error
        # A copy: jax may alias a numpy buffer that torch later writes to.
        local = np.array(array, dtype=target)
        values.append(jax.make_array_from_process_local_data(where, local, whole))
        metas.append(torch.empty(whole, dtype=leaf.dtype, device="meta"))
    return PlacedArguments(values, metas, paths, spec)


def share_of(ported: PortedModel) -> HostShard:
    """Return which rows of a batch this process's devices hold.

    Raises:
        UsageError: there are several processes and no mesh over them, or their rows overlap.
    """
    if jax.process_count() == 1:
        return HostShard()
    placement: Any = ported._placement
    if placement.mesh is None:
        raise UsageError(
            f"there are {jax.process_count()} processes, and each would train a model of its own."
            " What to do: tpuport.shard(ported, make_mesh({'fsdp': -1})) before make_train_step"
        )
    rules = placement.rules.inputs
    rows = rules[0].spec[:1] if rules else ()
    sizes = placement.mesh.shape
    axes = [rows[0]] if rows and isinstance(rows[0], str) else list((rows and rows[0]) or ())
    size = int(np.prod([sizes[axis] for axis in axes]))
    return process_share(NamedSharding(placement.mesh, PartitionSpec(*rows)), size)


def process_share(where: NamedSharding, size: int) -> HostShard:
    """Return which part of `size` rows this process's devices hold under a sharding.

    Raises:
        UsageError: processes have rows in common, but not all.
    """
    if jax.process_count() == 1:
        return HostShard()
    held: dict[int, set[int]] = {}
    first = NamedSharding(where.mesh, PartitionSpec(*where.spec[:1]))
    for device, index in first.devices_indices_map((size,)).items():
        held.setdefault(device.process_index, set()).update(range(size)[index[0]])
    groups = sorted({tuple(sorted(rows)) for rows in held.values()})
    mine = tuple(sorted(held.get(jax.process_index(), ())))
    part = size // len(groups)
    if groups != [tuple(range(i * part, (i + 1) * part)) for i in range(len(groups))]:
        raise UsageError(
            f"the chips of a process do not hold a run of rows of its own under {where.spec} over"
            f" {dict(where.mesh.shape)}. What to do: make the axes of data the outermost ones of"
            " the mesh"
        )
    return HostShard(groups.index(mine), len(groups))
