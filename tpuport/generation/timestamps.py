"""The logits processor for Whisper's timestamps without Python lists of the tokens."""

import math
from typing import Any

import torch
from transformers import WhisperTimeStampLogitsProcessor


def without_lists(processors: Any) -> Any:
    """Return logits processors in which the one for timestamps can be traced."""
    return type(processors)(
        TracedTimestamps(one) if type(one) is WhisperTimeStampLogitsProcessor else one
        for one in processors
    )


class TracedTimestamps(WhisperTimeStampLogitsProcessor):
    """The rules of transformers' own: timestamps come in pairs, do not decrease, and begin early.

    Args:
        original: transformers' processor.
    """

    def __init__(self, original: WhisperTimeStampLogitsProcessor) -> None:
        vars(self).update(vars(original))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, with minus infinity for what may not follow the tokens."""
        begin, vocabulary = self.timestamp_begin, torch.arange(scores.shape[-1])
        is_time, is_text = vocabulary >= begin, vocabulary < self.eos_token_id
        count = torch.ones_like(input_ids[0]).sum()
        last, before_last, least = self._state(input_ids, count)
        forbidden = vocabulary == self.no_timestamps_token_id
        forbidden = forbidden | ((last & before_last)[:, None] & is_time)
        forbidden = forbidden | ((last & ~before_last)[:, None] & is_text)
        forbidden = forbidden | (is_time & (vocabulary < least[:, None]))
        allowed = is_time
        if self.max_initial_timestamp_index is not None:
            allowed = is_time & (vocabulary <= begin + self.max_initial_timestamp_index)
        forbidden = forbidden | ((count == self.begin_index) & ~allowed)
        scores = scores.masked_fill(forbidden, -math.inf)
        if self._detect_timestamp_from_logprob:
            shares = scores.float().log_softmax(-1)
            likely = shares[:, begin:].logsumexp(-1) > shares[:, :begin].max(-1).values
            scores = scores.masked_fill(likely[:, None] & ~is_time, -math.inf)
        return scores

    def _state(
        self, input_ids: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return whether the last two tokens are timestamps, and the smallest one that may follow.

        With fewer than two new tokens the last but one counts as a timestamp.
        """
        places = torch.arange(input_ids.shape[1])
        is_time = (input_ids >= self.timestamp_begin) & (places >= self.begin_index)
        last = (is_time & (places == count - 1)).any(1)
        before_last = (is_time & (places == count - 2)).any(1) | (count < self.begin_index + 2)
        latest = torch.where(is_time, places, -1).max(1).values
        token = torch.where(is_time & (places == latest[:, None]), input_ids, 0).sum(1)
        least = torch.where(last & ~before_last, token, token + 1)
        return last, before_last, torch.where(latest < 0, self.timestamp_begin, least)
