"""Prompts as tokens, as openpi makes them for PaliGemma."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.openpi.config import Config
from recipes.small_tokenizer import train_tokenizer
from tpuport.foundation.errors import UsageError

NAME = "tokenizer.json"
_BEGIN = "<bos>"
_MOST_CHARACTERS = 100  # of a prompt for each token of the longest one
# The state of π0.5 is written as numbers of these bins.
_BINS = np.linspace(-1, 1, 257)[:-1]


class Prompts:
    """A tokenizer, and the form in which a policy reads a prompt."""

    def __init__(self, tokenizer: Any, config: Config) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.begin = tokenizer.token_to_id(_BEGIN)
        size = tokenizer.get_vocab_size()
        if self.begin is None or size > config.vocab_size:
            raise UsageError(
                f"{NAME} has {size} tokens, {_BEGIN} {'not ' if self.begin is None else ''}among"
                f" them, and the policy has {config.vocab_size}. What to do: give PaliGemma's"
            )

    def encode(self, prompt: str, state: NDArray[Any] | None = None) -> list[int]:
        """Return the tokens of a prompt, with the normalised state if the policy is a π0.5.

        Raises:
            UsageError: They are more than the policy takes.
        """
        if len(prompt) > _MOST_CHARACTERS * self.config.max_token_len:
            raise UsageError(f"a prompt of {len(prompt)} characters. What to do: a shorter prompt")
        text = prompt.strip().replace("_", " ").replace("\n", " ")
        if self.config.pi05:
            assert state is not None
            numbers = " ".join(str(n) for n in np.digitize(state, _BINS) - 1)
            found = self._ids(f"Task: {text}, State: {numbers};\nAction: ")
        else:
            found = self._ids(text) + self._ids("\n")
        tokens = [self.begin, *found]
        if len(tokens) > self.config.max_token_len:
            raise UsageError(
                f"a prompt of {len(tokens)} tokens, and the policy takes"
                f" {self.config.max_token_len}. What to do: a shorter prompt"
            )
        return tokens

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def read_prompts(folder: Path, config: Config) -> Prompts:
    """Read tokenizer.json of a folder.

    Raises:
        UsageError: It is not there, or is not a tokenizer of the policy.
    """
    from tokenizers import Tokenizer

    path = folder / NAME
    if not path.is_file():
        raise UsageError(
            f"{path} is not there. What to do: put tokenizer.json of google/paligemma-3b-pt-224"
            " there, which is what openpi's policies read"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the class that tokenizers raises is `Exception`
        raise UsageError(f"{path} is no tokenizer: {error}") from error
    return Prompts(tokenizer, config)


def write_small_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """Train a small tokenizer, which has a token for every byte, and write it to a folder."""
    made = train_tokenizer(texts, vocab_size - 1)
    made.add_special_tokens([_BEGIN])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / NAME))


def padded(tokens: list[int], length: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return tokens and their mask, (length,) each."""
    made = np.zeros(length, np.int32)
    made[: len(tokens)] = tokens
    return made, np.arange(length) < len(tokens)
