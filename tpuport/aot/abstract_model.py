"""A ported model copied as shapes on a mesh, whose devices may only be described."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.model.stack_blocks import stack_blocks
from tpuport.sharding.mesh import MeshAxis, make_mesh
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.shard import ShardingWarning, shard
from tpuport.tracing.core.placement import NOWHERE
from tpuport.tracing.scan_layers import stacked_params

# The default mesh: all chips along fsdp.
_ALL_FSDP = {str(MeshAxis.FSDP): -1}


def as_mesh(
    mesh: Mesh | Mapping[str, int] | None, topology: str | None, dcn: Mapping[str, int] | None
) -> Mesh:
    """Return the mesh to compile for: the given one, or its sizes over the chips of a topology.

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


@dataclass(frozen=True)
class Spreading:
    """Options of sharding a model over a mesh, in addition to its rules.

    Attributes:
        input_specs: specs of the arguments, as `inputs=` of `tpuport.shard`.
        dcn: sizes across slices, as for `tpuport.sharding.make_mesh`.
        policy: called with the copy of the model that is compiled, before it is sharded: to set
            dtypes, or which values the backward pass keeps. It may return another model.
        strict: raise instead of warn if the rules look unintended.
        stack: stack repeated blocks as `tpuport.stack_blocks` does, so they compile as one loop.
    """

    input_specs: Any = None
    dcn: Mapping[str, int] | None = None
    policy: Callable[[PortedModel], Any] | None = None
    strict: bool = False
    stack: bool = True


def spread_out(
    ported: PortedModel, topology: str | None, mesh: Any, rules: Any, **options: Any
) -> tuple[PortedModel, ShardingPlan]:
    """Return a copy of a ported model as shapes, sharded over a mesh, and its plan.

    Args:
        ported: a ported model, with weights or without.
        topology: a slice, or None.
        mesh: a mesh, or its sizes.
        rules: as for `tpuport.shard`.
        **options: arguments of `Spreading`.

    Returns:
        The copy, and the sharding plan.

    Raises:
        UsageError: `ported` is no ported model, an argument is wrong, or a strict check failed.
        MissingExtraError: libtpu is not installed.
    """
    if not isinstance(ported, PortedModel):
        raise UsageError(
            f"Expected what tpuport.convert(model) gives, got a {type(ported).__name__}"
        )
    known = [field.name for field in dataclasses.fields(Spreading)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"compile_for has no argument {unknown[0]!r}; it has {', '.join(known)}")
    how = Spreading(**options)
    stacked_params.refuse_stacks(ported._values(), "compiling it for another mesh")
    devices = as_mesh(mesh, topology, how.dcn)
    params, buffers = (
        {name: shape_of(value) for name, value in part.items()}
        for part in (ported.params, ported.buffers)
    )
    made = ported._copy(params, buffers, placement=NOWHERE)
    made.report = copy.copy(ported.report)
    made.report.attention = []  # is filled by the trace of the copy
    changed = None if how.policy is None else how.policy(made)
    made = changed if isinstance(changed, PortedModel) else made
    with warnings.catch_warnings():
        # The same warnings are findings of the plan.
        warnings.simplefilter("ignore", ShardingWarning)
        plan = shard(made, devices, rules, inputs=how.input_specs, strict=how.strict)
    if how.stack and made._rolls:
        stack_blocks(made)
    return made, plan


def num_slices(mesh: Mesh) -> int:
    """Return how many slices the devices of a mesh belong to."""
    return len({getattr(device, "slice_index", None) for device in mesh.devices.flat})


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an array, without its sharding."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
