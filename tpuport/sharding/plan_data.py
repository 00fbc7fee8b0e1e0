"""The data of a sharding plan: one row for each parameter and buffer."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from tpuport.sharding import checks
from tpuport.sharding.specs import axes_of, shown


@dataclass(frozen=True)
class Row:
    """One parameter or buffer of a plan.

    Attributes:
        name: its fqn.
        shape: its shape on all chips together.
        dtype: its dtype.
        spec: its spec, fitted to shape and mesh.
        num_bytes: its size.
        bytes_a_chip: bytes of it that one chip holds.
        category: linear, embedding, convolution, norm, experts, buffer, other.
        rule: pattern of the rule that decided, or None.
        reason: reason that the rule gives.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: P
    num_bytes: int
    bytes_a_chip: int
    category: str
    rule: str | None
    reason: str

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes that it is sharded over."""
        return tuple(dict.fromkeys(str(name) for part in self.spec for name in axes_of(part)))


@dataclass(frozen=True)
class PlanData:
    """The fields of a `ShardingPlan`, which documents them, and what follows from them."""

    model: str
    rules: str
    mesh: dict[str, int]
    device: str
    rows: tuple[Row, ...]
    activations: tuple[str, ...]
    findings: tuple[checks.ShardingNote, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of all parameters and buffers."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def bytes_a_chip(self) -> int:
        """Return the bytes of parameters and buffers that one chip holds."""
        return sum(row.bytes_a_chip for row in self.rows)

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Return total bytes and bytes a chip of each category, the largest first."""
        totals: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            whole, chip = totals.get(row.category, (0, 0))
            totals[row.category] = (whole + row.num_bytes, chip + row.bytes_a_chip)
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def spec_text(row: Row) -> str:
    """Return a row's spec as text, "whole" if it is replicated."""
    return shown(row.spec) if any(row.spec) else "whole"
