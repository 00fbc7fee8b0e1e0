"""Sharding of a ported model over a mesh by a readable table of rules."""

from tpuport.cost.hlo.collectives import count_collectives
from tpuport.sharding.checks import NoteKind, ShardingNote
from tpuport.sharding.constraints import Activations
from tpuport.sharding.converters import from_logical_axes, from_parallelize_plan, from_tp_plan
from tpuport.sharding.mesh import MeshAxis, make_mesh
from tpuport.sharding.model_tables import TABLES
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.rule_table import ShardingRules
from tpuport.sharding.shard import ShardingWarning, shard
from tpuport.sharding.spec_rule import SpecRule
from tpuport.sharding.strategies import (
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
from tpuport.sharding.topology import TOPOLOGIES

__all__ = [
    "PRESETS",
    "TABLES",
    "TOPOLOGIES",
    "Activations",
    "MeshAxis",
    "NoteKind",
    "ShardingNote",
    "ShardingPlan",
    "ShardingRules",
    "ShardingWarning",
    "SpecRule",
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
