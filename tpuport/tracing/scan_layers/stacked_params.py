"""Stacked weights of repeated blocks: one array each, which a loop over the blocks reads.

A stack's name has the numbers of its blocks in the place of each weight's own one:
`layers[0:32].mlp.up_proj.weight` is `layers.0.mlp.up_proj.weight` to `layers.31.mlp...`. Blocks
that have names instead of numbers are all listed: `layers[first|second|third].weight`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.foundation.errors import UsageError
from tpuport.tracing.scan_layers.families import MIN_BLOCKS
from tpuport.tracing.scan_layers.unstack_p import parts_of
from tpuport.tracing.state.module_state import named_owners

_STACK = re.compile(r"\[(?:(\d+):(\d+)|([^\[\]|:<>\s]+(?:\|[^\[\]|:<>\s]+)+))\]")


def members_of(name: str) -> list[str]:
    """Return the fqns that are in a stack of this name, in order; empty for any other name."""
    found = _STACK.search(name)
    if found is None:
        return []
    before, after = name[: found.start()], name[found.end() :]
    blocks = found[3].split("|") if found[3] else map(str, range(int(found[1]), int(found[2])))
    return [f"{before}.{block}{after}".lstrip(".") for block in blocks]


def stack_names(module: torch.nn.Module) -> list[str]:
    """Return the names of the stacks that a model's parameters can be kept in.

    Args:
        module: The model. Neighbours in a list, sequence or dict of modules stack if they are of
            one class and their parameters have the same names, shapes, dtypes and `requires_grad`.
    """
    names: list[str] = []
    holders = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
    seen: set[int] = set()
    for prefix, owner in named_owners(module):
        children = [(n, m) for n, m in owner._modules.items() if m is not None]
        if not isinstance(owner, holders):
            continue
        for first, last, kinds in _runs([block for _, block in children]):
            blocks = children[first:last]
            parameters = {id(p) for _, block in blocks for p in torch.nn.Module.parameters(block)}
            start = prefix + _numbers([name for name, _ in blocks])
            own = [f"{prefix}.{name}".lstrip(".") for name, _ in blocks]
            if seen.isdisjoint(parameters) and members_of(start) == own:
                seen |= parameters
                names += [f"{start}.{name}" for name, *_ in kinds]
    return names


def _numbers(names: list[str]) -> str:
    """Return the part of a stack's name that lists its blocks."""
    first = int(names[0]) if names[0].isdecimal() else 0
    if names == [str(first + i) for i in range(len(names))]:
        return f"[{first}:{first + len(names)}]"
    return f"[{'|'.join(names)}]"


def _runs(blocks: list[torch.nn.Module]) -> Iterable[tuple[int, int, Any]]:
    """Yield runs of neighbours with the same parameters: from, to, the parameters' description."""
    kinds = [_kind(block) for block in blocks]
    first = 0
    for index in range(1, len(blocks) + 1):
        if index < len(blocks) and kinds[index] == kinds[first]:
            continue
        shared = len({id(p) for b in blocks[first:index] for p in torch.nn.Module.parameters(b)})
        parameters = kinds[first][1]
        alone = shared == (index - first) * len(parameters)
        if index - first >= MIN_BLOCKS and parameters and alone:
            yield first, index, parameters
        first = index


def _kind(block: torch.nn.Module) -> Any:
    parameters = torch.nn.Module.named_parameters(block)
    return type(block), tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in parameters)


def stack(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Stack some of the state.

    Args:
        values: Arrays or `jax.ShapeDtypeStruct` by fqn. Shardings stay; the new first dim has none.
        names: The stacks to make; those whose members are not in `values` are left out.

    Returns:
        The stacks by name, and everything else unchanged.
    """
    rest, made = dict(values), {}
    for name in names:
        members = members_of(name)
        if not members or any(member not in rest for member in members):
            continue
        made[name] = stacked_leaf([rest.pop(member) for member in members])
    return {**rest, **made}


def stacked_leaf(values: list[Any]) -> Any:
    """Return the arrays or shapes of one weight of every block as one, the block its first dim."""
    first = values[0]
    sharding = getattr(first, "sharding", None)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    else:
        sharding = None
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(values), *first.shape), first.dtype, sharding=sharding)
    if isinstance(first, jax.core.Tracer) or sharding is None:
        return jnp.stack(values)
    return jax.jit(lambda parts: jnp.stack(parts), out_shardings=sharding)(values)


def unstack(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state by fqn, each stack split (while tracing by one equation, see `parts_of`)."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        members = members_of(name)
        if not members:
            out[name] = value
        elif isinstance(value, jax.ShapeDtypeStruct):
            out.update(dict.fromkeys(members, _shape_of_part(value)))
        else:
            out.update(zip(members, parts_of(value), strict=True))
    return out


def _shape_of_part(value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = value.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(value.shape[1:], value.dtype, sharding=sharding)


def restack(changed: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes by fqn as changes of the stacks that contain those names.

    Args:
        changed: New values by fqn.
        values: The state before, with its stacks.
    """
    owners = {
        member: (name, index) for name in values for index, member in enumerate(members_of(name))
    }
    out: dict[str, Any] = {}
    for fqn, value in changed.items():
        if fqn not in owners:
            out[fqn] = value
            continue
        name, index = owners[fqn]
        out[name] = out.get(name, values[name]).at[index].set(value)
    return out


def refuse_stacks(values: Mapping[str, Any], what: str) -> None:
    """Refuse an operation that needs each weight by itself.

    Args:
        values: State by name.
        what: The operation, for the message.

    Raises:
        UsageError: Some of the state is stacked.
    """
    name = next((name for name in values if members_of(name)), None)
    if name is not None:
        raise UsageError(
            f"{what}: the model's blocks are stacked already ({name!r}). What to do:"
            " call tpuport.stack_blocks(ported) last"
        )
