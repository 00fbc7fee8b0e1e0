"""Options of attention for its callers, and the mesh axes that its arrays are sharded over."""

from dataclasses import dataclass
from typing import Any, Literal

from tpuport.foundation.errors import UsageError

Kernel = Literal["auto", "splash", "blockwise", "full"]
SequenceParallel = Literal["all_gather", "ring", "ulysses"]


@dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of the splash kernel, in rows of queries and of keys.

    Args:
        q: queries of one grid step.
        kv: keys brought into fast memory at a time.
        kv_compute: keys of one multiplication; divides `kv`.
    """

    q: int
    kv: int
    kv_compute: int


@dataclass(frozen=True)
class AttentionOptions:
    """Settings of how attention is computed.

    Args:
        kernel: "auto" takes splash on TPU where it can serve, the kernel of `dense.py` where that
            is faster, and "blockwise" otherwise; "full" builds the matrix of scores, as a
            reference.
        interpret: run splash in Pallas' interpreter, on any platform: slow, for tests.
        blocks: tile sizes instead of those of the table.
        sequence_parallel: "all_gather" keys and values on every chip, pass them round a "ring"
            (Ring Attention), or exchange the sequence for heads by all-to-all ("ulysses", as in
            DeepSpeed-Ulysses).
        platform: where the program will run ("tpu", "cpu"); by default that of the mesh's devices,
            or of jax's default backend.
        chip: kind of TPU that block sizes are chosen for, such as "v6e"; by default the mesh's.

    Raises:
        UsageError: the kernel or the sequence strategy is unknown.
    """

    kernel: Kernel = "auto"
    interpret: bool = False
    blocks: BlockSizes | None = None
    sequence_parallel: SequenceParallel = "all_gather"
    platform: str | None = None
    chip: str | None = None

    def __post_init__(self) -> None:
        _check("kernel", self.kernel, Kernel)
        _check("sequence_parallel", self.sequence_parallel, SequenceParallel)


@dataclass(frozen=True)
class Shards:
    """A mesh and the axes that each dimension of queries, keys and values is sharded over.

    Args:
        mesh: a `jax.sharding.Mesh`.
        batch: mesh axes of the batch.
        heads: mesh axes of the heads. If they do not divide the key heads, each chip holds the key
            heads that its query heads need.
        sequence: mesh axes of the sequence.
    """

    mesh: Any
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()


def _check(name: str, value: str, literal: Any) -> None:
    if value not in literal.__args__:
        known = ", ".join(repr(a) for a in literal.__args__)
        raise UsageError(f"There is no {name} {value!r}. What to do: choose one of {known}")
