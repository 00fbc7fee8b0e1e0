"""Sharding of a ported model over a mesh by a readable table of rules."""

from tpuport.sharding.activations import Activations
from tpuport.sharding.collectives import count_collectives
from tpuport.sharding.converters import from_logical_axes, from_parallelize_plan, from_tp_plan
from tpuport.sharding.findings import Finding, Kind
from tpuport.sharding.mesh import MeshAxis, make_mesh
from tpuport.sharding.on_mesh import ShardingWarning, shard
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.presets import (
    PRESETS,
    ddp,
    expert_parallel,
    fsdp,
    fsdp_tensor_parallel,
    replicated,
    sequence_activations,
    sequence_parallel,
    tensor_parallel,
)
from tpuport.sharding.rules import Rule, ShardingRules
from tpuport.sharding.tables import TABLES
from tpuport.sharding.topology import TOPOLOGIES

__all__ = [
    "PRESETS",
    "TABLES",
    "TOPOLOGIES",
    "Activations",
    "Finding",
    "Kind",
    "MeshAxis",
    "Rule",
    "ShardingPlan",
    "ShardingRules",
    "ShardingWarning",
    "count_collectives",
    "ddp",
    "expert_parallel",
    "from_logical_axes",
    "from_parallelize_plan",
    "from_tp_plan",
    "fsdp",
    "fsdp_tensor_parallel",
    "make_mesh",
    "replicated",
    "sequence_activations",
    "sequence_parallel",
    "shard",
    "tensor_parallel",
]
