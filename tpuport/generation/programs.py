"""What the programs of a generation compute: the pass over the prompt, and the loop over tokens."""

import types
from typing import Any

import torch
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from tpuport.foundation import pytree
from tpuport.generation.cache import bounded_cache
from tpuport.generation.structures import put_together, taken_apart
from tpuport.tracing.control_flow.while_loop import traced_while

# Arguments that grow with each token, of which a step reads the last column.
_COLUMNS = ("position_ids", "decoder_position_ids", "token_type_ids", "mm_token_type_ids")


def encode(
    model: Any, inputs: torch.Tensor, given: dict[str, Any], name: str, returned: dict[str, Any]
) -> Any:
    """Run the encoder of an encoder-decoder model.

    Args:
        model: The model.
        inputs: What the encoder reads.
        given: The arguments of the model.
        name: The model's argument for `inputs`.
        returned: The settings of the generation that say what the encoder returns.
    """
    config = types.SimpleNamespace(**returned)
    prepare = type(model)._maybe_prepare_encoder_kwargs_for_generation
    return prepare(model, inputs, dict(given), name, config)["encoder_outputs"]


def whole(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model, as code around a generation does to choose what to ask for.

    Args:
        model: The model.
        args: The arguments of the call.
        kwargs: Its keywords.
    """
    return model(*args, **kwargs)


def prefill(
    model: Any, ids: torch.Tensor, given: dict[str, Any], cache_name: str, length: int
) -> tuple[torch.Tensor, list[Any], str]:
    """Run the model on the prompt.

    Args:
        model: The model.
        ids: The tokens of the prompt.
        given: The other arguments of the model.
        cache_name: The model's argument for its cache.
        length: How many positions the cache has.

    Returns:
        The logits of the first new token, and the arguments for the next step, taken apart.
    """
    given = {**given, cache_name: bounded_cache(model.config, length)}
    inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **given)
    outputs = model(**inputs, return_dict=True)
    after = _advanced(model, outputs, given)
    mask_name = _mask_name(model)
    mask = given.get(mask_name)
    if mask is not None:
        # What is after the current position is hidden by the causal mask.
        ones = mask.new_ones((mask.shape[0], length - mask.shape[1]))
        after[mask_name] = torch.cat([mask, ones], dim=1)
    for name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL:
        after.pop(name, None)
    return outputs.logits[:, -1].to(torch.float32), *taken_apart(after, "the cache")


def decode(
    model: Any,
    logits: torch.Tensor,
    ids: torch.Tensor,
    counts: tuple[torch.Tensor, torch.Tensor],
    arguments: tuple[list[Any], str],
    processing: tuple[list[Any], str],
    ends: tuple[torch.Tensor | None, torch.Tensor | None],
    do_sample: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens until all sequences have ended.

    Args:
        model: The model.
        logits: Those of the first new token.
        ids: The prompt, with room for the new tokens.
        counts: The length of the prompt, and the largest length of the result.
        arguments: The arguments of the model for the next step, taken apart.
        processing: The logits processors, taken apart.
        ends: The tokens that end a sequence, and the one that fills it up after that.
        do_sample: Whether tokens are drawn.

    Returns:
        The tokens, and how many of them there are.
    """
    count, limit = counts
    # Copies: the loop writes to the cache, and what it leaves there is no result.
    own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments[0]]
    given = put_together(own, arguments[1])
    choose = _Choice(put_together(*processing), ends, do_sample)
    unfinished = torch.ones_like(ids[:, 0])
    ids, count, unfinished = choose(logits, ids, count, unfinished)
    leaves, spec = pytree.flatten(given, objects=True)

    def goes_on(ids: Any, count: Any, unfinished: Any, leaves: Any) -> Any:
        del ids, leaves
        return (count < limit) & (unfinished.max() > 0)

    def step(ids: Any, count: Any, unfinished: Any, leaves: Any) -> Any:
        before = pytree.unflatten(spec, leaves)
        last = ids.gather(1, (count - 1).expand(ids.shape[0], 1))
        inputs = model.prepare_inputs_for_generation(last, next_sequence_length=1, **before)
        outputs = model(**inputs, return_dict=True)
        after = _advanced(model, outputs, before)
        scores = outputs.logits[:, -1].to(torch.float32)
        ids, count, unfinished = choose(scores, ids, count, unfinished)
        return ids, count, unfinished, pytree.flatten(after, objects=True)[0]

    ids, count, _, _ = traced_while(goes_on, step, (ids, count, unfinished, leaves))
    return ids, count


class _Choice:
    """The choice of the next token of each sequence."""

    def __init__(self, processors: Any, ends: tuple[Any, Any], do_sample: bool) -> None:
        self.processors, self.do_sample = processors, do_sample
        self.eos, self.pad = ends

    def __call__(
        self, scores: torch.Tensor, ids: torch.Tensor, count: torch.Tensor, unfinished: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tokens with one more, their count, and which sequences have not ended."""
        if self.processors:
            scores = self.processors(ids[:, : count.item()], scores)
        if self.do_sample:
            token = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        else:
            token = scores.argmax(dim=-1)
        if self.eos is not None:
            token = token * unfinished + self.pad * (1 - unfinished)
            unfinished = unfinished * (~torch.isin(token, self.eos)).to(unfinished.dtype)
        at = torch.arange(ids.shape[1]) == count
        return torch.where(at, token[:, None], ids), count + 1, unfinished


def _mask_name(model: Any) -> str:
    return "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"


def _advanced(model: Any, outputs: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the model's arguments for the step after this one, in shapes that stay the same."""
    name = _mask_name(model)
    mask = given.get(name)
    kept = {key: value for key, value in given.items() if key != name}
    is_encoder_decoder = model.config.is_encoder_decoder
    after = model._update_model_kwargs_for_generation(
        outputs, kept, is_encoder_decoder=is_encoder_decoder
    )
    for column in _COLUMNS:
        if after.get(column) is not None:
            after[column] = after[column][..., -1:]
    return after if mask is None else {**after, name: mask}
