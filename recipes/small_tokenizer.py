"""A small tokenizer of Qwen 2's kind, trained on a few texts."""

from collections.abc import Iterable
from typing import Any

# Qwen 2's split of a text before pairs are merged.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1000) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer`, which has a token for every byte.

    Args:
        texts: Texts to train on.
        vocab_size: Maximum number of tokens, without those of `SPECIAL`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(texts, trainer)
    return made
