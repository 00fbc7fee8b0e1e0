"""Attention as the CUDA kernels define it, in plain PyTorch that also traces.

Legend of shapes: B batch, H heads, G heads of keys and values (H is a multiple of it), L queries,
S keys, D channels of a head.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tpuport.foundation.errors import UsageError
from tpuport.tracing.attention.torch_entry import attend_tensors, places
from tpuport.tracing.dynamic_shapes.extents import attach, extents_of, filled


@dataclass(frozen=True)
class MaskRule:
    """The keys that a query sees, and the changes of its scores before the softmax.

    Attributes:
        scale: Factor of the scores; None for 1/sqrt(D).
        causal: A query sees no key after its own position; positions are aligned at the last query
            and the last key (flash-attn >= 2.1).
        window: The keys before and after its own position that a query sees; -1 for all.
        softcap: If positive, scores s become softcap * tanh(s / softcap).
        slopes: ALiBi's, [H], [B, H] or [B, H, L]: a score loses slope * distance.
        dropout: Probability that a weight is dropped.
    """

    scale: float | None = None
    causal: bool = False
    window: tuple[Any, Any] = (-1, -1)
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    dropout: float = 0.0

    @property
    def is_local(self) -> bool:
        """Return whether the position of a key matters."""
        return self.causal or self.slopes is not None or tuple(self.window) != (-1, -1)

    def mask(self, distance: torch.Tensor) -> torch.Tensor | None:
        """Return which keys are seen, by the distance of each after the query's own position."""
        left, right = (-1 if side is None else side for side in self.window)
        if self.causal:
            right = 0
        seen = None
        if left >= 0:
            seen = distance >= -left
        if right >= 0:
            below = distance <= right
            seen = below if seen is None else seen & below
        return seen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: MaskRule,
    *,
    distance: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    with_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the attention of [B, H, L, D] queries over [B, G, S, D] keys.

    Args:
        query: The queries.
        key: The keys.
        value: The values, [B, G, S, Dv].
        rule: The mask, bias and scale of the scores.
        distance: The distance of each key after each query's own position, broadcastable to
            [B, H, L, S]; None for sequences that are aligned at their ends.
        seen: Keys that a query may see at all, broadcastable to [B, H, L, S].
        with_lse: Whether to return the logarithm of each query's softmax denominator too.

    Returns:
        [B, H, L, Dv], with zeros for a query that sees nothing; and [B, H, L] in float32 (inf for
        such a query, as the kernels give), or None.
    """
    _check(query, key, value)
    bias, mask = _bias_and_mask(query, key, rule, distance, seen)
    if not with_lse:
        softcap = rule.softcap if rule.softcap > 0 else None
        how = {"scale": rule.scale, "softcap": softcap, "dropout": rule.dropout}
        served = attend_tensors(query, key, value, mask=mask, bias=bias, **how)
        if served is not None:
            return served, None
    if bias is not None or rule.softcap > 0 or with_lse:
        out, lse = _attend_by_hand(query, key, value, rule, bias, mask)
        return out, lse if with_lse else None
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=rule.dropout,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out, None


def _bias_and_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    rule: MaskRule,
    distance: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what is added to the scores, and the keys that each query sees."""
    if not rule.is_local:
        return None, seen
    if distance is None:
        distance = _aligned_at_the_end(query.shape[2], key.shape[2], query.device)
    own = rule.mask(distance)
    mask = own if seen is None else seen if own is None else seen & own
    return None if rule.slopes is None else _alibi(rule.slopes, distance), mask


def weights_of(
    query: torch.Tensor, key: torch.Tensor, rule: MaskRule, lse: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Return the weights [B, H, L, S] of keys for given denominators, for a backward.

    Returns:
        The weights, and the derivative of each score with respect to the product of its query and
        key.
    """
    bias, mask = _bias_and_mask(query, key, rule)
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores, slope = (query @ key.transpose(-1, -2)) * scale, scale
    if rule.softcap > 0:
        capped = torch.tanh(scores / rule.softcap)
        scores, slope = rule.softcap * capped, (1 - capped.square()) * scale
    if bias is not None:
        scores = scores + bias
    weights = torch.exp(scores - lse[..., None])
    return weights if mask is None else weights.masked_fill(~mask, 0.0), slope


def heads_last(out: torch.Tensor) -> torch.Tensor:
    """Return [B, H, L, D] as a dense [B, L, H, D], which is how the kernels write it."""
    return out.transpose(1, 2).contiguous()


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise UsageError(
            f"attention of {query.shape[1]} heads over {key.shape[1]} heads of keys and"
            f" {value.shape[1]} of values. What to do: make the heads of keys and values equal, and"
            " the heads of queries a multiple of them"
        )
    if not (query.dtype == key.dtype == value.dtype):
        raise UsageError(
            f"attention of {query.dtype} queries over {key.dtype} keys and {value.dtype} values."
            " What to do: cast them to one dtype"
        )


def _aligned_at_the_end(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    own = places(queries, device) + (keys - queries)
    return places(keys, device)[None, :] - own[:, None]


def _alibi(slopes: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Return the ALiBi bias, [B or 1, H, L, S] in float32."""
    slopes = slopes.float()
    if slopes.dim() == 1:
        slopes = slopes[None]
    if slopes.dim() == 2:
        slopes = slopes[:, :, None]
    return -slopes[..., None] * distance.abs().float()


def _attend_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: MaskRule,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with the softmax written out in float32, as the kernels keep it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if rule.softcap > 0:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if bias is not None:
        scores = scores + bias
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=query.device)
    some = mask.any(-1, keepdim=True)
    # A row without keys would be nan, as would its gradient: compute it as if it saw all keys.
    scores = scores.masked_fill(~(mask | ~some), float("-inf"))
    weights = torch.softmax(scores, -1) * some
    weights = torch.nn.functional.dropout(weights, rule.dropout, rule.dropout > 0)
    out = weights.to(query.dtype) @ value
    lse = torch.logsumexp(scores, -1).masked_fill(~some.squeeze(-1), float("inf"))
    return out, lse


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end: the sequence of each row, and its position in that sequence.

    Attributes:
        sequence: [T], the number of sequences for rows after the last one.
        position: [T], counted from the start of the sequence.
        lengths: [N + 1], of each sequence; 0 for the rows after the last.
    """

    sequence: torch.Tensor
    position: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, rows: int) -> "Packed":
        """Make it from `cu_seqlens` [N + 1]; its values may be traced, its length may not."""
        starts = starts.to(torch.int64)
        at = places(rows, starts.device)
        # Not searchsorted, whose result a program with a dynamic number of rows would bake in.
        sequence = (at[:, None] >= starts[1:]).sum(-1)
        lengths = torch.cat([starts[1:] - starts[:-1], torch.zeros_like(starts[:1])])
        return cls(sequence, at - starts[sequence], lengths)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    rule: MaskRule,
    *,
    with_lse: bool = False,
    used: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention within each of N sequences that are laid end to end.

    One call over all rows with a mask, so that nothing depends on where sequences end: the memory
    of the mask is the square of the number of rows.

    Args:
        query: [T, H, D].
        key: [U, G, D].
        value: [U, G, Dv].
        starts: `cu_seqlens` of the queries and of the keys, [N + 1] each.
        rule: The mask, bias and scale of the scores.
        with_lse: Whether to return the logarithm of each query's softmax denominator too, [H, T].
        used: The number of keys of each sequence that count, [N]; None for all.

    Returns:
        [T, H, Dv], zeros for rows after the last sequence, and what `with_lse` asks for.
    """
    # Pad to the maximal number of rows: the padding is past the last sequence.
    counts = extents_of(query)
    query, key, value = (filled(x, 0) for x in (query, key, value))
    rows, columns = (Packed.of(s, x.shape[0]) for s, x in zip(starts, (query, key), strict=True))
    lengths = columns.lengths
    if used is not None:
        lengths = torch.cat([used.to(torch.int64), lengths[-1:]])
    inside = columns.position < lengths[columns.sequence]
    real = rows.sequence < rows.lengths.shape[0] - 1
    seen = (rows.sequence[:, None] == columns.sequence) & inside & real[:, None]
    own = rows.position + lengths[rows.sequence] - rows.lengths[rows.sequence]
    distance = columns.position - own[:, None]
    if starts[0] is starts[1] and used is None and query.shape[0] == key.shape[0]:
        # The same distances within a sequence, and static when the program is traced.
        distance = _aligned_at_the_end(query.shape[0], key.shape[0], query.device)
    if rule.slopes is not None and rule.slopes.dim() == 2:
        last = rule.slopes.shape[0] - 1
        by_row = rule.slopes[rows.sequence.clamp(max=last)].transpose(0, 1)
        rule = dataclasses.replace(rule, slopes=by_row[None])
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, lse = attend(q, k, v, rule, distance=distance, seen=seen, with_lse=with_lse)
    packed = heads_last(out)[0]
    lse = None if lse is None else lse[0]
    if 0 in counts:
        packed = attach(packed, {0: counts[0]})
        lse = None if lse is None else attach(lse, {1: counts[0]})
    return packed, lse
