"""How the denoiser lies over the chips of a slice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

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


def _modulation(axis: str) -> list[Rule]:
    """A third of the weights, each for one vector: stored spread."""
    return [
        Rule(f"**.{name}.linear.{leaf}", P(axis), "modulation")
        for name in ("norm1", "norm1_context", "img_mod", "txt_mod")
        for leaf in ("weight", "bias")
    ]


def _tokens_spread(model: Any) -> ShardingRules:
    return ShardingRules(
        [*_modulation("sequence"), Rule("**", P(), "replicated")],
        name="tokens spread",
        inputs={"**": P("data")},
        activations=sequence_activations(model),
    )


# By class, as diffusers and as upstream name the weights.
_TABLES = {
    "HunyuanVideo15Transformer3DModel": TABLES["hunyuan_video15"],
    "HunyuanVideo_1_5_DiffusionTransformer": TABLES["hyvideo15"],
}


def _columns_and_rows(model: Any) -> ShardingRules:
    """The table of a model; what it stores spread lies along the mesh's one axis of weights."""
    module = model.module if isinstance(model, PortedModel) else model
    table = _TABLES[type(module).__name__]
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
