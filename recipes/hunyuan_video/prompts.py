"""Prompts as token ids: the chat for the language model, and the quoted text for byT5."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuport.foundation.errors import UsageError

# Maximum number of tokens of a prompt, without the chat's opening, and of its quoted text, as in
# training.
MAX_LENGTH = 1000
MAX_GLYPH_LENGTH = 256
# The hidden states that enter the text model's last two layers are used.
LAYER = -3
_USER = "<|im_start|>user\n"


@dataclass(frozen=True)
class Tokens:
    """Rows of token ids, padded to one length.

    Attributes:
        ids: int32 (prompts, length).
        mask: int32 (prompts, length), 1 where there is a token. A row of zeros has no text.
        opening: Number of tokens at the start of every row that are not part of the prompt.
    """

    ids: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    opening: int = 0


def system_message() -> str:
    """Return the message that precedes every prompt (diffusers, pipelines/hunyuan_video1_5)."""
    function = _pipeline().HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    return str(inspect.signature(function).parameters["system_message"].default)


def tokenize(tokenizer: Any, prompts: Sequence[str], max_length: int = MAX_LENGTH) -> Tokens:
    """Tokenize the chats of prompts.

    Args:
        tokenizer: Tokenizer of the folder, with a chat template.
        prompts: Texts. An empty one is replaced by a space, as upstream does.
        max_length: Maximum number of tokens of a prompt, with those that close the chat.

    Raises:
        UsageError: A prompt is longer, or the template has no such user's turn.
    """
    chats = _pipeline().format_text_input(list(prompts), system_message())

    def encoded(**how: Any) -> Any:
        return tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, return_dict=True, **how
        )

    rows = encoded()["input_ids"]
    opening = _opening(rows[0], tokenizer(_USER, add_special_tokens=False)["input_ids"])
    for prompt, row in zip(prompts, rows, strict=True):
        _check_length("prompt", prompt, len(row) - opening, max_length)
    padded = encoded(padding="max_length", max_length=max_length + opening, return_tensors="np")
    ids, mask = (np.asarray(padded[name], np.int32) for name in ("input_ids", "attention_mask"))
    return Tokens(ids, mask, opening)


def tokenize_glyphs(
    tokenizer: Any, prompts: Sequence[str], max_length: int = MAX_GLYPH_LENGTH
) -> Tokens:
    """Tokenize the quoted text in prompts. Rows without any are empty.

    Args:
        tokenizer: byT5's tokenizer.
        prompts: Texts.
        max_length: Maximum number of tokens (bytes) of a row.

    Raises:
        UsageError: A prompt quotes more.
    """
    ids = np.zeros((len(prompts), max_length), np.int32)
    mask = np.zeros_like(ids)
    for number, prompt in enumerate(prompts):
        text = _pipeline().extract_glyph_texts(prompt)
        if text is None:
            continue
        row = tokenizer(text)["input_ids"]
        _check_length("quoted text of the prompt", prompt, len(row), max_length)
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
        ids[number, len(row) :] = tokenizer.pad_token_id
    return Tokens(ids, mask)


def _opening(row: list[int], marker: list[int]) -> int:
    """Return the position at which the user's text begins in a row of ids."""
    for start in range(len(row) - len(marker) + 1):
        if row[start : start + len(marker)] == marker:
            return start + len(marker)
    raise UsageError(
        f"The tokenizer's chat template has no turn that begins with {_USER!r}, so where a prompt"
        " begins is not known. What to do: give the tokenizer of the published model"
    )


def _check_length(what: str, prompt: str, length: int, most: int) -> None:
    if length > most:
        raise UsageError(
            f"The {what} {prompt[:60]!r}... has {length} tokens, and the model reads {most}. What"
            " to do: shorten it"
        )


def _pipeline() -> Any:
    from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5

    return pipeline_hunyuan_video1_5
