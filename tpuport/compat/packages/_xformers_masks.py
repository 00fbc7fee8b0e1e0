"""The kinds of mask that `xformers.ops` names."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch

from tpuport.foundation.errors import UsageError


class AttentionBias:
    """The base class of masks: which keys a query sees, by the distance of a key after its own.

    Attributes:
        aligned_at_end: The last query belongs to the last key; else the first to the first.
        window: The keys before and after its own that a query sees; None for all.
    """

    aligned_at_end: ClassVar[bool] = False
    window: tuple[int | None, int | None] = (None, None)

    def to(self, device: Any) -> Self:
        """Return this mask: tensors follow the queries' device when they are used."""
        del device
        return self

    def seen(self, distance: torch.Tensor) -> torch.Tensor:
        """Return whether a key at a distance after the query's own is seen."""
        left, right = self.window
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            seen = seen & (distance >= -left)
        return seen if right is None else seen & (distance <= right)

    def visible(self, queries: int, keys: int, device: Any) -> torch.Tensor:
        """Return which keys each query sees, [queries, keys]."""
        rows, columns = (torch.arange(n, device=device) for n in (queries, keys))
        return self.seen(columns - rows[:, None] - (keys - queries) * self.aligned_at_end)

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        """Return the bias for scores of the given shape [..., M, N]: 0 where seen, else -inf."""
        seen = self.visible(shape[-2], shape[-1], device)
        return torch.zeros(shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))


class LowerTriangularMask(AttentionBias):
    """Causal, aligned at the first query and the first key."""

    window = (None, 0)

    def __init__(self, *tensor_args: Any, **tensor_kwargs: Any) -> None:
        del tensor_args, tensor_kwargs

    def add_bias(self, bias: torch.Tensor) -> "LowerTriangularMaskWithTensorBias":
        """Return the mask that adds a bias to the scores that are seen."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Causal, with a bias that is added to the scores."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        """Return the bias, -inf where a key is not seen."""
        return super().materialize(shape, dtype, device) + self._bias.to(device)


class LocalAttentionFromBottomRightMask(AttentionBias):
    """A band around the query's own key, aligned at the last query and the last key."""

    aligned_at_end = True

    def __init__(self, window_left: int, window_right: int) -> None:
        if window_left < 0 or window_right < 0:
            raise ValueError(f"windows of {window_left} and {window_right}, expected at least 0")
        self.window = (window_left, window_right)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, aligned at the last query and the last key."""

    aligned_at_end = True
    window = (None, 0)

    def make_local_attention(
        self, window_size: int
    ) -> "LowerTriangularFromBottomRightLocalAttentionMask":
        """Return the mask with `window_size` keys for a query."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal within a window, aligned at the last query and the last key."""

    def __init__(self, _window_size: int) -> None:
        self.window = _window(_window_size)


def _window(size: int) -> tuple[int, int]:
    if size <= 0:
        raise ValueError(f"Expected `window_size > 0`, but window_size={size}")
    return (size - 1, 0)


class SequenceLengths:
    """Sequences laid end to end, or each in a slot of `padding` rows.

    It holds numbers only: masks are kept in caches, which tensors of a trace must not reach.
    """

    def __init__(self, lengths: Sequence[int], padding: int | None = None) -> None:
        self.lengths = [int(n) for n in lengths]
        self.padding = padding
        self.seqstart_py = [0]
        for length in self.lengths:
            if padding is not None and length > padding:
                raise ValueError(f"a sequence of {length} rows in a slot of {padding}")
            self.seqstart_py.append(self.seqstart_py[-1] + (padding or length))
        self.max_seqlen = max(self.lengths, default=-1)
        self.min_seqlen = min(self.lengths, default=-1)

    @property
    def seqstart(self) -> torch.Tensor:
        """Return where sequences start, and where the last one ends: int32 [N + 1]."""
        return torch.tensor(self.seqstart_py, dtype=torch.int32)

    @property
    def seqlen(self) -> torch.Tensor:
        """Return the rows that count in each sequence: int32 [N]."""
        return torch.tensor(self.lengths, dtype=torch.int32)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each sequence, and the row after its last."""
        for start, length in zip(self.seqstart_py[:-1], self.lengths, strict=True):
            yield start, start + length

    def split(
        self, x: torch.Tensor, batch_sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Split [1, sum, ...] into batches [B_i, M_i, ...] of sequences of one length."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(
                f"Invalid `torch.Tensor` of shape {tuple(x.shape)}, expected format (B, M, *) with"
                f" B=1 and M={self.seqstart_py[-1]}"
            )
        rows, at = [], 0
        sizes = [1] * len(self.lengths) if batch_sizes is None else list(batch_sizes)
        for size in sizes:
            rows.append(self.seqstart_py[at + size] - self.seqstart_py[at])
            at += size
        parts = zip(sizes, x.split(rows, dim=1), strict=True)
        return [part.reshape(size, -1, *x.shape[2:]) for size, part in parts]


class BlockDiagonalMask(AttentionBias):
    """Sequences laid end to end in a batch of one: each attends within itself."""

    def __init__(
        self,
        q_seqinfo: SequenceLengths,
        k_seqinfo: SequenceLengths,
        _batch_sizes: Sequence[int] | None = None,
        _window_size: int | None = None,
    ) -> None:
        self.q_seqinfo, self.k_seqinfo = q_seqinfo, k_seqinfo
        self._batch_sizes = _batch_sizes
        if _window_size is not None:
            self.window = _window(_window_size)
        pairs = zip(q_seqinfo.lengths, k_seqinfo.lengths, strict=True)
        for i, (queries, keys) in enumerate(pairs):
            if self.aligned_at_end and k_seqinfo.padding is None and keys < queries:
                raise ValueError(
                    f"Block #{i} has num_keys={keys} and num_queries={queries}. Expected"
                    " `num_keys >= num_queries`"
                )

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Self:
        """Make it from the lengths of the sequences; the keys' are the queries' if left out."""
        del device
        queries = SequenceLengths(q_seqlen)
        return cls(queries, queries if kv_seqlen is None else SequenceLengths(kv_seqlen))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Self, torch.Tensor]:
        """Return the mask for tensors [B_i, M_i, ...], and them laid end to end: [1, sum, ...]."""
        mask, rows, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        mask.k_seqinfo = mask.q_seqinfo
        return mask, rows

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[torch.Tensor],
        tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Self, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the mask for lists of tensors [B_i, M_i, ...], and each list laid end to end."""
        queries, keys = (
            SequenceLengths([int(t.shape[1]) for t in tensors for _ in range(t.shape[0])])
            for tensors in (tensors_q, tensors_k)
        )
        mask = cls(queries, keys, [int(t.shape[0]) for t in tensors_q])
        values = None if tensors_v is None else _end_to_end(tensors_v)
        return mask, _end_to_end(tensors_q), _end_to_end(tensors_k), values

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split [1, sum, ...] into the queries' sequences."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split [1, sum, ...] into the keys' sequences."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split [1, sum, ...] into the sequences that `from_tensor_list` was given."""
        return self.split_queries(tensor)

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """Return the mask that is causal in each sequence too."""
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        """Return the mask that is causal in each sequence too, aligned at its end."""
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> "BlockDiagonalCausalLocalAttentionMask":
        """Return the mask that is causal within a window of each sequence."""
        return self._as(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> "BlockDiagonalCausalLocalAttentionFromBottomRightMask":
        """Return the mask that is causal within a window of each sequence, aligned at its end."""
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)

    def _as(self, kind: Any, window: int | None = None) -> Any:
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window)

    def visible(self, queries: int, keys: int, device: Any) -> torch.Tensor:
        """Return which keys each query sees, [queries, keys]."""
        expected = (self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1])
        if (queries, keys) != expected:
            raise UsageError(
                f"{type(self).__name__} for {expected[0]} queries and {expected[1]} keys, got"
                f" {queries} and {keys}. What to do: make it from the lengths of these sequences"
            )
        blocks = torch.zeros(queries, keys, dtype=torch.bool)
        spans = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (q, q_end), (k, k_end) in spans:
            block = super().visible(q_end - q, k_end - k, None)
            blocks[q:q_end, k:k_end] = block
        return blocks.to(device)


def _end_to_end(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(1, -1, *t.shape[2:]) for t in tensors], dim=1)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each sequence attends within itself, causally, aligned at its start."""

    window = (None, 0)


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each sequence attends within itself, causally, aligned at its end."""

    aligned_at_end = True
    window = (None, 0)


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Each sequence attends within itself, causally within a window, aligned at its start."""


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Each sequence attends within itself, causally within a window, aligned at its end."""


class BlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    """The keys of each sequence are in a slot of `kv_padding` rows, of which some count."""

    @classmethod
    def from_seqlens(  # pyright: ignore[reportIncompatibleMethodOverride]  # as upstream has it
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Any = None,
    ) -> Self:
        """Make it from the lengths of the sequences and the size of a slot."""
        del causal_diagonal, device
        return cls(SequenceLengths(q_seqlen), SequenceLengths(kv_seqlen, kv_padding))


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Keys in slots, causal, aligned at the last key that counts."""

    aligned_at_end = True
    window = (None, 0)


KINDS = (
    AttentionBias,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    BlockDiagonalMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalPaddedKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
)
