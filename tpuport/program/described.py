"""A ported model as shapes on a mesh that may only be described; the model stays as it is."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from tpuport.errors import UsageError
from tpuport.model.placing import NOWHERE
from tpuport.model.ported import PortedModel
from tpuport.sharding.mesh import MeshAxis, make_mesh
from tpuport.sharding.on_mesh import shard
from tpuport.sharding.plan import ShardingPlan

# What a mesh is when nothing is said of it.
_ALL_FSDP = {str(MeshAxis.FSDP): -1}


def as_mesh(
    mesh: Mesh | Mapping[str, int] | None, topology: str | None, dcn: Mapping[str, int] | None
) -> Mesh:
    """The mesh to compile for: itself, or sizes over the chips of a topology.

    Raises:
        UsageError: neither a mesh nor a topology is given, both are, or they do not fit.
        MissingExtraError: libtpu is not installed.
    """
    if isinstance(mesh, Mesh):
        if topology is not None or dcn:
            raise UsageError(
                "a mesh has devices already. What to do: leave topology= and dcn= out, or give"
                " sizes as mesh={'fsdp': 4, 'tensor': 2}"
            )
        return mesh
    if topology is None:
        raise UsageError("compile_for needs topology='v6e-8' (any slice), or a mesh with devices")
    return make_mesh(mesh or _ALL_FSDP, topology, dcn=dcn)


def on_mesh(
    ported: PortedModel,
    mesh: Mesh,
    rules: Any,
    *,
    policy: Callable[[PortedModel], Any] | None = None,
    inputs: Any = None,
    strict: bool = False,
) -> tuple[PortedModel, ShardingPlan]:
    """A copy of a ported model that has shapes for weights, spread over a mesh.

    Args:
        ported: what `tpuport.convert` gave, with weights or without.
        mesh: the mesh, of devices that may only be described.
        rules: as for `tpuport.shard`.
        policy: called with the copy before it is spread; it may return another model.
        inputs: specs of arguments, as for `tpuport.shard`.
        strict: as for `tpuport.shard`.

    Returns:
        The copy, and what the rules did.

    Raises:
        UsageError: a strict check failed.
    """
    made: Any = copy.copy(ported)
    made.params = {name: shape_of(value) for name, value in ported.params.items()}
    made.buffers = {name: shape_of(value) for name, value in ported.buffers.items()}
    made._cache = {}
    made._program = dataclasses.replace(ported._program, placement=NOWHERE)
    changed = None if policy is None else policy(made)
    made = changed if isinstance(changed, PortedModel) else made
    return made, shard(made, mesh, rules, inputs=inputs, strict=strict)


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, without where it is."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
