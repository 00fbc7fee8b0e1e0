"""The kinds of mask that `xformers.ops` names."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch


class AttentionBias:
    """The base class of masks; `causal` says how a causal one is aligned."""

    causal: ClassVar[str | None] = None

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        """Return the bias for scores of the given shape [..., M, N]: 0 where seen, else -inf."""
        rows, columns = (torch.arange(n, device=device) for n in shape[-2:])
        shift = shape[-1] - shape[-2] if self.causal == "bottom right" else 0
        unseen = columns > rows[:, None] + shift
        if self.causal is None:
            unseen = torch.zeros_like(unseen)
        bias = torch.zeros(shape, dtype=dtype, device=device)
        return bias.masked_fill(unseen, float("-inf"))


class LowerTriangularMask(AttentionBias):
    """Causal, aligned at the first query and the first key."""

    causal = "top left"

    def __init__(self, *tensor_args: Any, **tensor_kwargs: Any) -> None:
        del tensor_args, tensor_kwargs


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, aligned at the last query and the last key."""

    causal = "bottom right"


class BlockDiagonalMask(AttentionBias):
    """Sequences laid end to end in a batch of one: each attends within itself.

    `q_starts` and `k_starts` are int64 tensors [N + 1].
    """

    def __init__(self, q_lengths: Sequence[int], k_lengths: Sequence[int]) -> None:
        self.q_lengths, self.k_lengths = list(q_lengths), list(k_lengths)
        self.q_starts, self.k_starts = (
            torch.tensor([0, *lengths]).cumsum(0) for lengths in (self.q_lengths, self.k_lengths)
        )
        self._batch_sizes: list[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Self:
        """Make it from the lengths of the sequences; the keys' are the queries' if left out."""
        del device
        return cls(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Self, torch.Tensor]:
        """Return the mask for tensors [B_i, M_i, ...], and them laid end to end: [1, sum, ...]."""
        lengths = [int(t.shape[1]) for t in tensors for _ in range(t.shape[0])]
        mask = cls.from_seqlens(lengths)
        mask._batch_sizes = [int(t.shape[0]) for t in tensors]
        return mask, torch.cat([t.flatten(0, 1) for t in tensors])[None]

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Split [1, sum, ...] into the sequences that `from_tensor_list` was given."""
        sizes = self._batch_sizes or [1] * len(self.q_lengths)
        out, at, row = [], 0, 0
        for count in sizes:
            length = self.q_lengths[at]
            rows = tensor[0, row : row + count * length]
            out.append(rows.unflatten(0, (count, length)))
            at, row = at + count, row + count * length
        return out

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """Return the mask that is causal in each sequence too."""
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        """Return the mask that is causal in each sequence too, aligned at its end."""
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def _as(self, kind: Any) -> Any:
        mask = kind(self.q_lengths, self.k_lengths)
        mask._batch_sizes = self._batch_sizes
        return mask

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        """Return the bias for scores of the given shape [..., M, N]: 0 where seen, else -inf."""
        bias = torch.full(shape, float("-inf"), dtype=dtype, device=device)
        for q, m, k, n in zip(
            self.q_starts[:-1], self.q_lengths, self.k_starts[:-1], self.k_lengths, strict=True
        ):
            kind = LowerTriangularFromBottomRightMask() if self.causal == "bottom right" else None
            if self.causal == "top left":
                kind = LowerTriangularMask()
            block = (kind or AttentionBias()).materialize((m, n), dtype, device)
            bias[..., q : q + m, k : k + n] = block
        return bias


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each sequence attends within itself, causally, aligned at its start."""

    causal = "top left"


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each sequence attends within itself, causally, aligned at its end."""

    causal = "bottom right"
