"""Ways to spread the denoiser over the chips of a slice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.sharding import TABLES, ShardingRules, SpecRule, make_mesh, sequence_activations


@dataclass(frozen=True)
class Spread:
    """One way to spread the denoiser.

    Attributes:
        mesh: Returns the axis sizes for `make_mesh`, given the number of chips.
        rules: Returns the sharding rules, given the model.
        sequence_parallel: Sequence-parallel strategy of attention (`tpuport.attention_options`).
    """

    mesh: Callable[[int], dict[str, int]]
    rules: Callable[[Any], ShardingRules]
    sequence_parallel: Any = None

    def shard(self, ported: PortedModel, devices: Any = None) -> None:
        """Shard a port over devices, by default all available ones."""
        import jax

        devices = jax.devices() if devices is None else devices
        mesh = make_mesh(self.mesh(len(devices)), devices)
        tpuport.shard(ported, mesh, self.rules(ported))

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Set the attention options with which the step is traced."""
        if self.sequence_parallel is None:
            yield
            return
        with tpuport.attention_options(sequence_parallel=self.sequence_parallel):
            yield


class _Names(NamedTuple):
    """The names of weights in a class of denoiser.

    Attributes:
        table: Sharding rules for tensor parallelism.
        modulation: Modules of a block that make vectors for all of its tokens.
    """

    table: ShardingRules
    modulation: tuple[str, ...]


_NAMES = {
    "HunyuanVideo15Transformer3DModel": _Names(
        TABLES["hunyuan_video15"], ("norm1", "norm1_context")
    ),
    "HunyuanVideo_1_5_DiffusionTransformer": _Names(TABLES["hyvideo15"], ("img_mod", "txt_mod")),
}


def _names_of(model: Any) -> _Names:
    module = model.module if isinstance(model, PortedModel) else model
    return _NAMES[type(module).__name__]


def _tokens_spread(model: Any) -> ShardingRules:
    # These are a third of the weights, and each is applied to one vector, so that gathering is
    # cheap.
    modulation = [
        SpecRule(f"**.{name}.linear.{leaf}", P("sequence"), "modulation")
        for name in _names_of(model).modulation
        for leaf in ("weight", "bias")
    ]
    return ShardingRules(
        [*modulation, SpecRule("**", P(), "replicated")],
        name="tokens spread",
        inputs={"**": P("data")},
        activations=sequence_activations(model),
    )


def _columns_and_rows(model: Any) -> ShardingRules:
    """Return the rules of a model's table, with fsdp moved to the mesh's only weight axis."""
    table = _names_of(model).table
    rules = [
        replace(rule, spec=P("tensor")) if rule.spec == P("fsdp") else rule for rule in table.rules
    ]
    return ShardingRules(
        rules, name=table.name, inputs={"**": P("data")}, activations=table.activations
    )


def _both(model: Any) -> ShardingRules:
    table = _columns_and_rows(model)
    return ShardingRules(
        table.rules,
        name="columns, rows and tokens",
        inputs=table.inputs,
        activations=sequence_activations(model),
    )


# "sequence": tokens are sharded, and exchanged for heads around attention. "guidance": the two
# halves of guidance are on different chips, with the tokens sharded over the chips of each.
# "tensor": columns and rows of weights are sharded. "mixed": tokens over half of the chips, columns
# and rows over pairs.
SPREADS: dict[str, Spread] = {
    "sequence": Spread(lambda chips: {"sequence": chips}, _tokens_spread, "ulysses"),
    "guidance": Spread(
        lambda chips: {"data": 2, "sequence": _half(chips)}, _tokens_spread, "ulysses"
    ),
    "tensor": Spread(lambda chips: {"tensor": chips}, _columns_and_rows),
    "mixed": Spread(lambda chips: {"sequence": _half(chips), "tensor": 2}, _both, "ulysses"),
}


def _half(chips: int) -> int:
    if chips % 2:
        raise UsageError(f"An even number of chips is needed, and there are {chips}")
    return chips // 2


def choose_spread(name: str, chips: int, guidance: float) -> str | None:
    """Resolve "auto" to the spread with the shortest estimated step (docs/hunyuan_video.md).

    Args:
        name: A name of `SPREADS`, which is returned, or "auto".
        chips: Number of chips.
        guidance: Guidance scale. Above 1 there are two halves to spread.

    Returns:
        The name; None for one chip.
    """
    if name != "auto":
        return name
    if chips == 1:
        return None
    return "guidance" if guidance > 1 and chips % 2 == 0 else "sequence"


def spread_of(name: str) -> Spread:
    """Return a spread by its name.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in SPREADS:
        raise UsageError(f"spread={name!r}: expected one of {', '.join(SPREADS)}")
    return SPREADS[name]
