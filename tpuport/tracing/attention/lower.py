"""The kernel and the mask of a traced call of scaled dot product attention."""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.foundation.errors import UsageError
from tpuport.foundation.user_frames import user_line, user_site
from tpuport.kernels.attention import AttentionOptions, Mask, Shards, attend, flash
from tpuport.kernels.attention.dispatch import (
    ANY_MASK,
    CHOSEN,
    choose_kernel,
    dense_tiles,
    not_for_splash,
    usable_shards,
)
from tpuport.reports.records import AttentionCall
from tpuport.tracing.attention.masks.bands import Band
from tpuport.tracing.attention.masks.structure import Structure, arrays_left, read, to_mask
from tpuport.tracing.attention.options import choice, options_for, shards_for
from tpuport.tracing.core.context import Trace
from tpuport.tracing.lowerings.attention import attention


@dataclass(frozen=True)
class AttentionOperands:
    """The options of `F.scaled_dot_product_attention`, and more that some kernels take.

    Attributes:
        mask: `attn_mask` of the function, or None.
        is_causal: Whether a query sees no later keys, both counted from their first.
        scale: Factor of the scores; None for 1 / sqrt(size).
        enable_gqa: Whether several heads of queries share one of keys.
        dropout: Probability that a weight is dropped.
        key: The random key of the dropout.
        frozen: Whether no gradient flows into the mask.
        softcap: Scores s become softcap * tanh(s / softcap); None for s itself.
    """

    mask: Any = None
    is_causal: bool = False
    scale: Any = None
    enable_gqa: bool = False
    dropout: float = 0.0
    key: Any = None
    frozen: bool = True
    softcap: float | None = None


@dataclass(frozen=True)
class CallPlace:
    """The line of the user's code that computes attention, and the fqn of its module."""

    file: str
    line: int
    module: str


def attention_call(
    trace: Trace, query: jax.Array, key: jax.Array, value: jax.Array, call: AttentionOperands
) -> jax.Array:
    """Compute a traced call of attention, [..., heads, queries, size].

    Args:
        trace: The running trace.
        query: [..., heads, queries, size].
        key: [..., heads of keys, keys, size].
        value: [..., heads of keys, keys, size of values].
        call: The other arguments of the call.
    """
    options = options_for(trace.options.target)
    if options is None:
        if choice() is not None:
            note_call(trace, query, key, "full", "chosen")
        return _full(query, key, value, call)
    refused = _refused(query, key, value, call, options)
    if refused:
        if options.kernel == "splash" and query.size and key.size and value.size:
            raise _splash_refusal(trace, refused)
        note_call(trace, query, key, "full", refused)
        return _full(query, key, value, call)
    dims, (q, k, v) = _four(query, key, value)
    if options.kernel == "auto" and not options.interpret:
        if has_few_scores(q, k, v, shards_for(trace.options.mesh, q.shape[:3])):
            note_call(trace, q, k, "full", "the scores are few")
            return _full(query, key, value, call)
    shape = (*q.shape[:3], k.shape[2])
    found = _structure(trace, _four_mask(call.mask, dims[:-1], shape), shape, call.frozen)
    if drops_whole(trace, q, found, call, options):
        note_call(trace, q, k, "full", DROPS_WHOLE)
        return _full(query, key, value, call)
    out = structured_call(trace, (q, k, v), found, call, options)
    return out.reshape(*dims, *out.shape[-2:])


def structured_call(
    trace: Trace,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    found: Structure,
    call: AttentionOperands,
    options: AttentionOptions,
    place: CallPlace | None = None,
) -> jax.Array:
    """Compute attention [batch, heads, queries, size] with a mask whose structure is known.

    Args:
        trace: The running trace.
        operands: Queries, keys and values, each [batch, heads, sequence, size].
        found: The mask; `call.mask` is not read.
        call: The other arguments of the call.
        options: The kernel that is asked for, and its options.
        place: Where the user's code computes it; None for the line that is running.
    """
    q, k, v = operands
    if call.is_causal:
        found = replace(found, band=found.band & Band(high=0))
    mask = to_mask(found)
    shards = shards_for(trace.options.mesh, q.shape[:3])
    kernel, reasons = choose_kernel(q.dtype, mask, call.dropout, options, shards, call.key)
    if options.kernel == "splash" and kernel != "splash":
        others = [one for one in reasons if one != CHOSEN]
        raise _splash_refusal(trace, _in_words((others[0],), found))
    if kernel == "splash":
        usable = usable_shards(shards, q.shape)
        if dense_tiles(*(q, k, v, mask), softcap=call.softcap, options=options, shards=usable):
            kernel = "dense"
    out = attend(
        q,
        k,
        v,
        mask,
        scale=call.scale,
        softcap=call.softcap,
        dropout=call.dropout,
        key=call.key,
        options=options,
        shards=shards,
    )
    words = described(mask, found), spread(shards)
    note_call(trace, q, k, kernel, _in_words(reasons, found), *words, place=place)
    return out


def serving_kernel(
    trace: Trace,
    q: jax.Array,
    found: Structure,
    call: AttentionOperands,
    options: AttentionOptions,
) -> str:
    """Return the kernel that `structured_call` would take: "splash", "flash" or "blockwise"."""
    shards = shards_for(trace.options.mesh, q.shape[:3])
    return choose_kernel(q.dtype, to_mask(found), call.dropout, options, shards, call.key)[0]


def described(mask: Mask, found: Structure) -> str:
    """Describe the structure of a mask in words."""
    low, high = mask.band()
    parts = []
    if low is not None:
        parts.append(f"window {low} to {'end' if high is None else high}")
    elif high is not None:
        parts.append("causal" if high == 0 else f"causal, shifted by {high}")
    if mask.q_segments is not None:
        parts.append("segments")
    if mask.key_valid is not None:
        parts.append("padded keys")
    if mask.query_valid is not None:
        parts.append("padded queries")
    if found.rest:
        parts.append("further conditions")
    if found.bias is not None:
        parts.append("bias")
    return ", ".join(parts) or "none"


def spread(shards: Shards | None) -> str:
    """Describe in words which mesh axes shard which dims of an attention."""
    if shards is None:
        return ""
    dims = {"batch": shards.batch, "heads": shards.heads, "sequence": shards.sequence}
    return ", ".join(f"{dim} over {' and '.join(axes)}" for dim, axes in dims.items() if axes)


# Up to so many weights, dropout acts on the matrix of scores where no kernel is faster.
_DROPPED_WHOLE = 1 << 26
# What the report says then, or where the kernel would be slower.
DROPS_WHOLE = "dropout of weights that are few"


def _refused(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    call: AttentionOperands,
    options: AttentionOptions,
) -> str:
    """Return why the matrix of scores is used after all; an empty string if it is not."""
    if not (query.size and key.size and value.size):
        return "no queries, or nothing to attend to"
    of_query, of_key, of_value = (1 if x.ndim < 3 else x.shape[-3] for x in (query, key, value))
    shared = max(of_key, of_value)
    if min(of_key, of_value) not in (1, shared) or (of_query > 1 and of_query % shared):
        return f"{of_query} heads of queries with {of_key} of keys and {of_value} of values"
    if call.scale is not None and not isinstance(call.scale, (int, float)):
        return "a scale that depends on data"
    return "dropout of all weights" if call.dropout >= 1 else ""


def drops_whole(
    trace: Trace,
    q: jax.Array,
    found: Structure,
    call: AttentionOperands,
    options: AttentionOptions,
) -> bool:
    """Return whether dropout acts on the matrix of scores, as is better for few of them."""
    if not call.dropout or options.kernel != "auto":
        return False
    if math.prod(found.shape) > _DROPPED_WHOLE:
        return False
    if serving_kernel(trace, q, found, call, options) == "flash":
        return not options.interpret and not flash.is_faster(*found.shape[2:])
    return True


def has_few_scores(q: Any, k: Any, v: Any, shards: Shards | None) -> bool:
    """Return whether float32 scores are no larger than queries and result, or keys and values.

    They are with a handful of queries or keys, where a kernel would fill its tiles with zeros.
    """
    scores = 4 * math.prod((*q.shape[:3], k.shape[2]))
    of_q, of_k, of_v = (math.prod(x.shape) * x.dtype.itemsize for x in (q, k, v))
    few = scores <= max(2 * of_q, of_k + of_v)
    return few and (shards is None or not shards.sequence)


def _full(query: jax.Array, key: jax.Array, value: jax.Array, call: AttentionOperands) -> jax.Array:
    return attention(
        query,
        key,
        value,
        call.mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
        dropout=call.dropout,
        dropout_key=call.key,
        softcap=call.softcap,
    )


def _splash_refusal(trace: Trace, reason: str) -> UsageError:
    """Return the error, at the user's line, for a call that asks for splash and cannot have it."""
    error = UsageError(f"{user_line()}: {not_for_splash(reason)}")
    # A bare `except` in the user's code must not turn the error into another path of the program.
    trace.recorder.refusal = trace.recorder.refusal or error
    return error


def _four(*operands: jax.Array) -> tuple[tuple[int, ...], list[jax.Array]]:
    """Reshape queries, keys and values to [batch, heads, sequence, size], joining leading dims.

    Dims that one operand lacks are broadcast, except heads of keys that several heads of queries
    share.

    Returns:
        The dims of the result that precede its sequence, and the operands.
    """
    whole = [x if x.ndim > 2 else x[None] for x in operands]
    lead = jnp.broadcast_shapes(*(x.shape[:-3] for x in whole))
    shared = max(x.shape[-3] for x in whole[1:])
    heads = [max(whole[0].shape[-3], shared), shared, shared]
    dims = () if max(x.ndim for x in operands) < 3 else (*lead, heads[0])
    return dims, [
        jnp.broadcast_to(x, (*lead, n, *x.shape[-2:])).reshape(-1, n, *x.shape[-2:])
        for x, n in zip(whole, heads, strict=True)
    ]


def _four_mask(mask: Any, lead: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    if mask is None or mask.ndim <= 3 or len(lead) <= 1:
        return mask
    return jnp.broadcast_to(mask, (*lead, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])


def _structure(trace: Trace, mask: Any, shape: tuple[int, ...], frozen: bool) -> Structure:
    """Return the structure of a mask; a mask that several layers share is read once."""
    if mask is None:
        return Structure(shape)
    key = (id(mask), shape, frozen)
    known = trace.masks.get(key)
    if known is None:
        # The mask is kept as well: its id must not be used again while it is a key.
        known = trace.masks[key] = (read(mask, shape, frozen=frozen), mask)
    return known[0]


def _in_words(reasons: tuple[str, ...], found: Structure) -> str:
    """Say why `choose_kernel` took a kernel."""
    if not reasons:
        return "it knows such masks"
    return "; ".join(_of_mask(found) if one == ANY_MASK else one for one in reasons)


def _of_mask(found: Structure) -> str:
    """Say which part of a mask splash does not support."""
    what = "a bias" if found.bias is not None else "more than bands and segments"
    left = arrays_left(found)
    tail = f", and needs arrays of the scores' size: {', '.join(left)}" if left else ""
    return f"the mask is {what}{tail}"


def note_call(
    trace: Trace,
    query: Any,
    key: Any,
    kernel: str,
    reason: str,
    mask: str = "",
    spread: str = "",
    place: CallPlace | None = None,
) -> None:
    """Note for the report what computes a call of attention, and why."""
    if place is None:
        site = user_site()
        place = CallPlace(*(("", 0) if site is None else site[:2]), _module(trace))
        if kernel == "full":
            trace.full_attention.add((place.file, place.line))
    trace.recorder.counters.attention.append(
        AttentionCall(
            place.file,
            place.line,
            module=place.module,
            kernel=kernel,
            reason=reason,
            mask=mask,
            spread=spread,
            query=tuple(query.shape),
            key=tuple(key.shape),
            calls=1,
        )
    )


def _module(trace: Trace) -> str:
    """Return the fqn of the innermost of the user's modules that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        fqn = trace.own_modules.get(id(frame.f_locals.get("self")))
        if fqn is not None:
            return fqn
        frame = frame.f_back
    return ""
