"""Tables of rules made for a module from its structure, by the name of the strategy.

Each function takes a module (or a ported model) and a mesh (or its sizes), and returns a table that
can be printed, edited, and put after your own rules. A table holds decisions for this module on
this mesh.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.name_patterns import generalised, matches
from tpuport.sharding.constraints import Activations
from tpuport.sharding.layer_roles import LayerRole, Use, blocks_of, packed_weights, uses_of
from tpuport.sharding.leaves import Leaf, module_of, shapes_of
from tpuport.sharding.mesh import MeshAxis, sizes_of
from tpuport.sharding.rule_table import ShardingRules
from tpuport.sharding.spec_rule import SpecRule
from tpuport.sharding.specs import axes_of

# The mesh axes that a batch is sharded over.
BATCH = (str(MeshAxis.DATA), str(MeshAxis.FSDP))
# Parameters with fewer elements are replicated: gathering them would cost more than it saves.
MIN_SIZE = 2**14

Sizes = Mesh | Mapping[str, int]
_Choice = tuple[P, str, str]


def replicated(model: Any, mesh: Sizes) -> ShardingRules:
    """Replicate everything on every chip, also the inputs."""
    del model, mesh
    return ShardingRules([SpecRule("**", P(), "replicated")], name="replicated")


def ddp(model: Any, mesh: Sizes) -> ShardingRules:
    """Replicate parameters, and shard the batch over data and fsdp."""
    del mesh
    rules = [SpecRule("**", P(), "replicated")]
    return ShardingRules(
        rules, name="ddp", inputs={"**": P(BATCH)}, activations=_batch_activations(model)
    )


def fsdp(model: Any, mesh: Sizes, *, min_size: int = MIN_SIZE) -> ShardingRules:
    """Shard each parameter's largest dim that divides over fsdp, the batch over data and fsdp.

    Args:
        model: a module or a ported model.
        mesh: a mesh or its sizes.
        min_size: a parameter with fewer elements is replicated.
    """
    sizes = sizes_of(mesh)

    def choose(name: str, leaf: Leaf) -> _Choice:
        del name
        return *_with_fsdp(P(), leaf, sizes, min_size), ""

    return _preset("fsdp", model, choose)


def tensor_parallel(model: Any, mesh: Sizes) -> ShardingRules:
    """Shard pairs of layers by column and row over tensor, with one all-reduce a pair.

    That is Megatron-LM's scheme. The role of each layer is read from names and shapes
    (`sharding.layer_roles`). Attention projections are split between heads, never within one;
    projections whose heads the chips do not divide are replicated. So are layers outside any pair.
    """
    sizes, uses = sizes_of(mesh), uses_of(module_of(model))

    def choose(name: str, leaf: Leaf) -> _Choice:
        return _tensor_spec(uses.get(name), leaf, sizes)

    return _preset("tensor_parallel", model, choose)


def fsdp_tensor_parallel(model: Any, mesh: Sizes, *, min_size: int = MIN_SIZE) -> ShardingRules:
    """Shard as `tensor_parallel` does, and a remaining dim of each parameter over fsdp."""
    sizes, uses = sizes_of(mesh), uses_of(module_of(model))

    def choose(name: str, leaf: Leaf) -> _Choice:
        use = uses.get(name)
        spec, reason, cost = _tensor_spec(use, leaf, sizes)
        both = (MeshAxis.TENSOR.value, MeshAxis.FSDP.value)
        if use is not None and use.role is LayerRole.VOCABULARY and any(spec[:1]):
            # With both of its dims sharded, the rows that are looked up would be exchanged.
            num = math.prod(sizes.get(axis, 1) for axis in both)
            return (P(both, None) if leaf.shape[0] % num == 0 else spec), reason, cost
        spec, more = _with_fsdp(spec, leaf, sizes, min_size)
        return spec, "; ".join(filter(None, (reason, more))), cost

    return _preset("fsdp_tensor_parallel", model, choose)


def sequence_parallel(model: Any, mesh: Sizes, *, min_size: int = MIN_SIZE) -> ShardingRules:
    """Shard as `fsdp` does, and the tokens between repeated blocks (dim 1) over sequence."""
    made = fsdp(model, mesh, min_size=min_size).with_activations(sequence_activations(model))
    made.name = "sequence_parallel"
    return made


def expert_parallel(model: Any, mesh: Sizes, *, min_size: int = MIN_SIZE) -> ShardingRules:
    """Shard the experts of a mixture over expert, and everything else as in `fsdp`.

    Experts in one parameter (experts, in, out) are distributed, each complete on one chip. Experts
    of a list are parameters of their own, so each is split over expert and gathered for its use.
    """
    sizes, uses = sizes_of(mesh), uses_of(module_of(model))
    num = sizes.get(MeshAxis.EXPERT, 1)

    def choose(name: str, leaf: Leaf) -> _Choice:
        use, spec, reason = uses.get(name), P(), ""
        if use is not None and num > 1:
            if use.role is LayerRole.EXPERTS and leaf.shape[0] % num == 0:
                spec, reason = P(MeshAxis.EXPERT.value), use.reason
            elif use.one_expert:
                spec, reason = _along(MeshAxis.EXPERT, P(), leaf, num, min_size)
                reason = reason and "one expert of a list"
        spec, more = _with_fsdp(spec, leaf, sizes, min_size)
        return spec, "; ".join(filter(None, (reason, more))), ""

    return _preset("expert_parallel", model, choose)


def sequence_activations(model: Any) -> Activations:
    """Shard tokens (dim 1) over sequence where they leave each repeated block.

    They are sharded too where they enter its last projections: attention that exchanged tokens for
    heads gives tokens back there.

    Blocks with convolutions work on images, whose dim 1 is no sequence: they get no spec.
    """
    module = module_of(model)
    spec = P(BATCH, MeshAxis.SEQUENCE.value, None)
    entering = P(BATCH, MeshAxis.SEQUENCE.value, MeshAxis.TENSOR.value)
    table = {
        block: spec
        for block in blocks_of(module)
        if not any(
            isinstance(part, torch.nn.modules.conv._ConvNd) for part in _first(module, block)
        )
    }
    rows = (
        generalised(name.rpartition(".")[0])
        for name, use in uses_of(module).items()
        if use.role is LayerRole.ROW and name.endswith((".weight", ".codes"))
    )
    inputs = {row: entering for row in rows if any(matches(f"{block}.**", row) for block in table)}
    return Activations(table, inputs=inputs).optional()


def _first(module: torch.nn.Module, block: str) -> Iterator[torch.nn.Module]:
    """Return the modules in the first block that matches a pattern."""
    return next(m for name, m in module.named_modules() if matches(block, name)).modules()


PRESETS: dict[str, Callable[..., ShardingRules]] = {
    "replicated": replicated,
    "ddp": ddp,
    "fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
    "fsdp_tensor_parallel": fsdp_tensor_parallel,
    "sequence_parallel": sequence_parallel,
    "expert_parallel": expert_parallel,
}


def preset(name: str, model: Any, mesh: Sizes, **options: Any) -> ShardingRules:
    """Return the table of a strategy by its name.

    Raises:
        UsageError: the preset is unknown.
    """
    if name not in PRESETS:
        raise UsageError(f"There is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name](model, mesh, **options)


def _preset(name: str, model: Any, choose: Callable[[str, Leaf], _Choice]) -> ShardingRules:
    choices = {path: choose(path, leaf) for path, leaf in shapes_of(model).items()}
    packed = packed_weights(module_of(model))
    for path in dict(module_of(model).named_buffers()).keys() - packed:
        # Buffers such as position tables are used unsharded and have no optimizer state, so fsdp
        # would save little and cost a gather.
        if path in choices and MeshAxis.FSDP in str(choices[path][0]):
            choices[path] = (P(), "buffer", "")
    rules = _tabled(choices)
    activations = _batch_activations(model)
    return ShardingRules(rules, name=name, inputs={"**": P(BATCH)}, activations=activations)


def _batch_activations(model: Any) -> Activations:
    """Keep the batch sharded after each layer, so that weights are gathered, not activations.

    Outputs of blocks and modulations are unsharded along all other dims: a block's because a
    tensor-parallel pair ends there, a modulation's because the model splits it into parts that
    would not match the chips' shards.
    """
    module = module_of(model)
    table = dict.fromkeys(blocks_of(module), P(BATCH))
    free = P(BATCH, P.UNCONSTRAINED)
    for name, use in uses_of(module).items():
        owner = generalised(name.rpartition(".")[0])
        if use.role is LayerRole.MODULATION:
            table[owner] = P(BATCH)
        elif use.role is not LayerRole.NORM:
            table.setdefault(owner, free)
    table.pop("", None)
    return Activations(table).optional()


def _tabled(choices: Mapping[str, _Choice]) -> list[SpecRule]:
    """Return a rule for each group of parameters that differ only in numbers, if one fits all.

    Parameters that are replicated without a reason get no rule, so that large ones are reported.
    """
    groups: dict[str, list[str]] = {}
    for name in choices:
        groups.setdefault(generalised(name), []).append(name)
    rules: list[SpecRule] = []
    for pattern, names in groups.items():
        if len({choices[name][0] for name in names}) > 1:
            rules += [SpecRule(name, *_ruled(choices[name])) for name in names]
        elif any(choices[names[0]][0]) or choices[names[0]][1]:
            rules.append(SpecRule(pattern, *_ruled(choices[names[0]])))
    return rules


def _ruled(choice: _Choice) -> tuple[P, str, bool, str]:
    spec, reason, cost = choice
    return spec, reason, False, cost


def _tensor_spec(use: Use | None, leaf: Leaf, sizes: Mapping[str, int]) -> _Choice:
    """Return a parameter's spec over tensor, the reason, and the communication that it costs."""
    num = sizes.get(MeshAxis.TENSOR, 1)
    dim = None if use is None else _tensor_dim(use, leaf)
    if use is None or num == 1:
        return P(), "", ""
    if dim is None:
        meant = use.role in (LayerRole.NORM, LayerRole.ROW, LayerRole.VOCABULARY)
        return P(), use.reason if meant else "", ""
    if use.heads is not None and use.heads % num:
        return P(), f"{use.heads} heads are not divided by tensor={num}", ""
    if leaf.shape[dim] % num and use.role is LayerRole.VOCABULARY and len(leaf.shape) == 2:
        dim = 1
    if leaf.shape[dim] % num:
        return P(), "", ""
    return _cut(P(), dim, MeshAxis.TENSOR, len(leaf.shape)), use.reason, use.cost


def _tensor_dim(use: Use, leaf: Leaf) -> int | None:
    """Return the dim of a parameter that is sharded over tensor, if any."""
    if use.role in (
        LayerRole.COLUMN,
        LayerRole.FUSED,
        LayerRole.MODULATION,
        LayerRole.VOCABULARY,
        LayerRole.EXPERTS,
    ):
        return use.out_dim if len(leaf.shape) > 1 else 0
    if use.role is LayerRole.ROW and len(leaf.shape) > 1:
        return use.in_dim
    return None


def _with_fsdp(spec: P, leaf: Leaf, sizes: Mapping[str, int], min_size: int) -> tuple[P, str]:
    """Add fsdp to a spec, if the parameter is large enough and a dim divides."""
    return _along(MeshAxis.FSDP, spec, leaf, sizes.get(MeshAxis.FSDP, 1), min_size)


def _along(axis: MeshAxis, spec: P, leaf: Leaf, num: int, min_size: int) -> tuple[P, str]:
    """Add an axis to a spec at the largest free dim that it divides; return the spec and why."""
    if num == 1:
        return spec, ""
    size = leaf.num_bytes // max(leaf.itemsize, 1)
    if size < min_size:
        return spec, f"small: {size:,} elements"
    taken = [bool(axes_of(part)) for part in spec]
    free = [d for d in range(len(leaf.shape)) if d >= len(taken) or not taken[d]]
    fitting = [d for d in free if leaf.shape[d] % num == 0 and leaf.shape[d] >= num]
    if not fitting:
        return spec, ""
    dim = max(fitting, key=lambda d: leaf.shape[d])
    return _cut(spec, dim, axis, len(leaf.shape)), f"dim {dim} along {axis}"


def _cut(spec: P, dim: int, axis: MeshAxis, rank: int) -> P:
    """Return a spec with one more dim sharded over an axis."""
    parts = [*spec, *[None] * (rank - len(spec))]
    parts[dim] = axis.value
    return P(*parts)
