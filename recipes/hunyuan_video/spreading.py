"""How the denoiser lies over the chips of a slice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

import tpuport
from tpuport.errors import UsageError
from tpuport.model.ported import PortedModel
from tpuport.sharding import TABLES, Rule, ShardingRules, make_mesh, sequence_activations


@dataclass(frozen=True)
class Spread:
    """One way to spread the denoiser.

    Attributes:
        mesh: sizes by axis of `make_mesh`, from the number of chips.
        rules: the table, from the model.
        sequence: how a sequence that is spread meets itself (`tpuport.attention_options`).
    """

    mesh: Callable[[int], dict[str, int]]
    rules: Callable[[Any], ShardingRules]
    sequence: Any = None

    def shard(self, ported: PortedModel, devices: Any = None) -> None:
        """Put a port on devices, by default all there are."""
        import jax

        devices = jax.devices() if devices is None else devices
        mesh = make_mesh(self.mesh(len(devices)), devices)
        tpuport.shard(ported, mesh, self.rules(ported))

    @contextmanager
    def attention(self) -> Iterator[None]:
        """What holds while the step is traced."""
        if self.sequence is None:
            yield
            return
        with tpuport.attention_options(sequence=self.sequence):
            yield


class _Names(NamedTuple):
    """How a class of denoiser names its weights.

    Attributes:
        table: the table of columns and rows.
        modulation: the modules of a block that make vectors for all of its tokens.
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
    # A third of the weights, each for one vector: stored spread.
    modulation = [
        Rule(f"**.{name}.linear.{leaf}", P("sequence"), "modulation")
        for name in _names_of(model).modulation
        for leaf in ("weight", "bias")
    ]
    return ShardingRules(
        [*modulation, Rule("**", P(), "replicated")],
        name="tokens spread",
        inputs={"**": P("data")},
        activations=sequence_activations(model),
    )


def _columns_and_rows(model: Any) -> ShardingRules:
    """The table of a model; what it stores spread lies along the mesh's one axis of weights."""
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


# "sequence": tokens, exchanged for heads around attention. "guidance": both halves of guidance on
# chips of their own, tokens over the chips of each. "tensor": columns and rows of weights.
# "mixed": tokens over half of the chips, columns and rows over pairs.
SPREADS: dict[str, Spread] = {
    "sequence": Spread(lambda chips: {"sequence": chips}, _tokens_spread, "heads"),
    "guidance": Spread(
        lambda chips: {"data": 2, "sequence": _half(chips)}, _tokens_spread, "heads"
    ),
    "tensor": Spread(lambda chips: {"tensor": chips}, _columns_and_rows),
    "mixed": Spread(lambda chips: {"sequence": _half(chips), "tensor": 2}, _both, "heads"),
}


def _half(chips: int) -> int:
    if chips % 2:
        raise UsageError(f"An even number of chips is needed, and there are {chips}")
    return chips // 2


def choose_spread(name: str, chips: int, guidance: float) -> str | None:
    """Which way "auto" is: the one with the shortest estimate for a step (docs/hunyuan_video.md).

    Args:
        name: a name of `SPREADS`, which is returned, or "auto".
        chips: how many there are.
        guidance: above 1 there are two halves.

    Returns:
        The name; None for one chip.
    """
    if name != "auto":
        return name
    if chips == 1:
        return None
    return "guidance" if guidance > 1 and chips % 2 == 0 else "sequence"


def spread_of(name: str) -> Spread:
    """A way by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in SPREADS:
        raise UsageError(f"spread={name!r}: expected one of {', '.join(SPREADS)}")
    return SPREADS[name]
