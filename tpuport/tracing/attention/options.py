"""The user's choice of attention kernel, made by `tpuport.attention_options`."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

import jax

from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention import AttentionOptions, BlockSizes, Shards
from tpuport.kernels.attention.dispatch import usable_shards
from tpuport.kernels.attention.options import Kernel, SequenceParallel

# The mesh axes (`tpuport.sharding.MeshAxis`) that shard each dim of queries and keys by default.
_AXES = {"batch": ("data", "fsdp"), "heads": ("tensor",), "sequence": ("sequence",)}


@dataclass(frozen=True)
class AttentionChoice:
    """The options of one `attention_options` block; part of a program's signature.

    Attributes:
        options: The kernel that is asked for, and its options.
        axes: Mesh axes of "batch", "heads" and "sequence" where the user named them.
    """

    options: AttentionOptions
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()


_CHOICE: ContextVar[AttentionChoice | None] = ContextVar("attention", default=None)


def choice() -> AttentionChoice | None:
    """Return the choice that is active now; None outside of every block."""
    return _CHOICE.get()


@contextlib.contextmanager
def attention_options(
    kernel: Kernel = "auto",
    *,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
    sequence_parallel: SequenceParallel = "all_gather",
    axes: dict[str, Sequence[str]] | None = None,
) -> Iterator[AttentionOptions]:
    """Choose how attention is computed by the programs that are traced and called in the block.

    Outside of every block, a program for a TPU uses the splash kernel, a faster one where every
    query sees the same keys, or a blockwise softmax where neither applies. A program for a CPU uses
    the matrix of scores. A program that was compiled with other options is compiled again.
    `ported.report.attention` says what each call uses.

    Args:
        kernel: "auto" chooses as on a TPU; "splash" is JAX's; "blockwise"; "full" is the matrix of
            scores.
        interpret: run splash in Pallas' interpreter, on any platform: slow, for tests.
        blocks: sizes of splash's tiles, `kernels.attention.BlockSizes`, instead of those from
            its table.
        sequence_parallel: strategy for a sharded sequence: "all_gather" keys and values, pass them
            round a "ring", or exchange the sequence for heads by all-to-all ("ulysses").
        axes: names of the mesh axes that shard "batch", "heads" and "sequence" of the queries.
            The default is `{"batch": ("data", "fsdp"), "heads": ("tensor",),
            "sequence": ("sequence",)}`, for each key that is left out.

    Raises:
        UsageError: `kernel`, `sequence_parallel` or a key of `axes` is unknown.
    """
    unknown = sorted({*(axes or {})} - {*_AXES})
    if unknown:
        known = ", ".join(map(repr, _AXES))
        raise UsageError(f"axes names {unknown[0]!r}: the dims of attention are {known}")
    given = tuple((name, tuple(names)) for name, names in sorted((axes or {}).items()))
    options = AttentionOptions(
        kernel=kernel,
        interpret=interpret,
        blocks=blocks,
        sequence_parallel=sequence_parallel,
    )
    token = _CHOICE.set(AttentionChoice(options, given))
    try:
        yield options
    finally:
        _CHOICE.reset(token)


@contextlib.contextmanager
def heads_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Let attention in the block shard its heads over these axes of the mesh, and no sequence."""
    chosen = _CHOICE.get()
    assert chosen is not None, "axes of attention without a choice of the user's"
    named = {**dict(chosen.axes), "heads": axes, "sequence": ()}
    token = _CHOICE.set(replace(chosen, axes=tuple(sorted(named.items()))))
    try:
        yield
    finally:
        _CHOICE.reset(token)


def options_for(target: str) -> AttentionOptions | None:
    """Return the options for a program on one platform; None to compute attention as eager does."""
    chosen = choice()
    if chosen is not None:
        return None if chosen.options.kernel == "full" else replace(chosen.options, platform=target)
    return AttentionOptions(platform=target) if target == "tpu" else None


def shards_for(mesh: jax.sharding.Mesh | None, sizes: tuple[int, ...]) -> Shards | None:
    """Return the mesh axes that shard an attention.

    Args:
        mesh: The program's mesh.
        sizes: Batch, heads and sequence of the queries. Axes that do not divide batch or heads are
            left out; a sequence can be padded.

    Returns:
        The axes of each dim; None without a mesh of several devices.

    Raises:
        UsageError: the user named an axis that the mesh does not have.

    Warns:
        AttentionWarning: once for each axis that does not divide a dim.
    """
    if mesh is None or mesh.size == 1:
        return None
    chosen = choice()
    named: dict[str, tuple[str, ...]] = dict(chosen.axes) if chosen is not None else {}
    found: dict[str, tuple[str, ...]] = {}
    for dim, usual in _AXES.items():
        axes = named[dim] if dim in named else usual
        missing = [axis for axis in axes if axis not in mesh.shape]
        if missing and dim in named:
            known = ", ".join(map(repr, mesh.shape))
            raise UsageError(
                f"attention_options(axes=...) puts {dim} over {missing[0]!r}, and the axes of the"
                f" mesh are {known}"
            )
        found[dim] = tuple(axis for axis in axes if axis in mesh.shape)
    return usable_shards(Shards(mesh, **found), sizes)
