"""Conversations about images: their meta and JSONL files, and their tokens and labels.

The format and the template `internvl2_5` are InternVL's (MIT licence). Words that weights were
trained on (special tokens, the system message) are unchanged.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpuport.foundation.errors import UsageError

IMAGE = "<image>"
IMG_START, IMG_CONTEXT, IMG_END = "<img>", "<IMG_CONTEXT>", "</img>"
# Tokens that stage 1 adds to a tokenizer. Their order determines their ids.
ADDED_TOKENS = (
    *(IMG_START, IMG_END, IMG_CONTEXT, "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"),
    *("<loc>", "</loc>", "<FRONT VIEW>", "<FRONT LEFT VIEW>", "<FRONT RIGHT VIEW>"),
    *("<BACK LEFT VIEW>", "<BACK RIGHT VIEW>", "<BACK VIEW>"),
)
# The template's message for conversations without a system message.
SYSTEM_MESSAGE = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的"  # noqa: RUF001
    "多模态大语言模型。"
)
IGNORED = -100  # the label of a token without a loss


@dataclass(frozen=True)
class Source:
    """One data set of a meta file.

    Attributes:
        name: Its key in the file.
        root: Folder that image paths are relative to.
        annotation: JSONL file of its conversations.
        data_augment: Whether its tiles are compressed at random.
        repeat_time: Repetitions per epoch; below 1 the fraction that is used.
        max_dynamic_patch: Maximum number of tiles of its images, if it has its own.
    """

    name: str
    root: Path
    annotation: Path
    data_augment: bool = False
    repeat_time: float = 1
    max_dynamic_patch: int | None = None


@dataclass(frozen=True)
class Sample:
    """One line of a JSONL file.

    Attributes:
        turns: Speaker ("system", "human" or "gpt") and text of each turn.
        images: Absolute paths of the images.
        where: File and line, for messages.
        source: The data set of the sample.
    """

    turns: list[tuple[str, str]]
    images: list[Path]
    where: str
    source: Source


@dataclass(frozen=True)
class Encoded:
    """A conversation in tokens.

    Attributes:
        input_ids: int32 (length,).
        labels: int32 (length,), `IGNORED` for all tokens that the assistant does not say.
        is_whole: False if a length limit cut off tokens of an image.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    is_whole: bool


def read_meta(path: str | Path) -> list[Source]:
    """Read the data sets of a meta file.

    Relative paths in it are relative to the working directory, as in upstream, or else to the
    file's own folder.

    Raises:
        UsageError: The file is missing, is not JSON, or lacks a key.
    """
    path = Path(path)
    found = _json(path.read_text(encoding="utf-8") if path.is_file() else None, str(path))
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise UsageError(
            f"{path}: expected an object of data sets, each an object with root, annotation,"
            " data_augment and repeat_time"
        )
    sources = []
    for name, one in found.items():
        missing = [key for key in ("root", "annotation") if not isinstance(one.get(key), str)]
        if missing:
            raise UsageError(f"{path}: {name!r} lacks {missing[0]!r}, a path")
        sources.append(
            Source(
                name,
                _located(one["root"], path.parent),
                _located(one["annotation"], path.parent),
                bool(one.get("data_augment", False)),
                one.get("repeat_time", 1),
                one.get("max_dynamic_patch"),
            )
        )
    return sources


def _located(given: str, folder: Path) -> Path:
    here = Path(given)
    return here if here.is_absolute() or here.exists() else folder / here


def read_lines(source: Source) -> list[tuple[int, str]]:
    """Return the lines of a data set's JSONL file in an epoch, each with its number from 1.

    Raises:
        UsageError: The file is missing, or `repeat_time` is neither below 1 nor an integer.
    """
    if not source.annotation.is_file():
        raise UsageError(
            f"{source.annotation}: there is no such file. What to do: correct {source.name!r} of"
            " the meta file"
        )
    with source.annotation.open(encoding="utf-8") as file:
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    times = source.repeat_time
    if times < 1:
        return lines[: int(len(lines) * times)]
    if times != int(times):
        raise UsageError(
            f"{source.name!r}: repeat_time={times}; expected a whole number, or one below 1"
        )
    return lines * int(times)


def read_sample(line: str, number: int, source: Source) -> Sample:
    """Parse a sample from its line.

    Raises:
        UsageError: It is not JSON, has no conversation or an unknown speaker, or is a video.
    """
    where = f"{source.annotation}:{number}"
    found = _json(line, where)
    if not isinstance(found, dict) or not isinstance(found.get("conversations"), list):
        raise UsageError(f"{where}: expected an object with conversations, a list of turns")
    turns = [(str(t.get("from")), str(t.get("value"))) for t in found["conversations"]]
    for index, (speaker, _) in enumerate(turns):
        if speaker not in ("system", "human", "gpt") or (speaker == "system" and index):
            raise UsageError(
                f"{where}: turn {index} is from {speaker!r}; expected human or gpt, and system at"
                " most once, first"
            )
    if not turns or (turns[0][0] == "system" and len(turns) == 1):
        raise UsageError(f"{where}: conversations has no turns of human or gpt")
    images = found.get("image") or []
    if found.get("video") and not images:
        raise UsageError(
            f"{where}: a video. What to do: take frames from it, and give their paths as image"
        )
    if isinstance(images, str):
        images = [images]
        # The first turn gets the word whoever speaks, as in upstream. A system message then keeps
        # it.
        speaker, text = turns[0]
        turns[0] = (speaker, text if IMAGE in text else f"{IMAGE}\n{text}")
    return Sample(turns, [source.root / image for image in images], where, source)


def _json(text: str | None, where: str) -> Any:
    if text is None:
        raise UsageError(f"{where}: there is no such file")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error


def expand_images(
    turns: Sequence[tuple[str, str]], tokens: Sequence[int], where: str = "the conversation"
) -> list[tuple[str, str]]:
    """Replace the word for each image by its number of tokens, between the tokens for its ends.

    Only human turns have images. Words beyond the number of images are kept.

    Args:
        turns: Speaker and text.
        tokens: Number of tokens of each image, in order.
        where: Source of the turns, for messages.

    Raises:
        UsageError: There are more images than words for them.
    """
    expanded, used = [], 0
    for speaker, text in turns:
        if speaker == "human":
            for _ in range(text.count(IMAGE)):
                if used == len(tokens):
                    break
                text = text.replace(IMAGE, IMG_START + IMG_CONTEXT * tokens[used] + IMG_END, 1)
                used += 1
        expanded.append((speaker, text))
    if used != len(tokens):
        raise UsageError(
            f"{where}: {len(tokens)} images and {used} times {IMAGE} in what the human says. What"
            f" to do: write {IMAGE} where each image belongs"
        )
    return expanded


def encode(
    turns: Sequence[tuple[str, str]],
    tokenizer: Any,
    tokens: Sequence[int] = (),
    *,
    max_seq_length: int | None = None,
    system_message: str | None = SYSTEM_MESSAGE,
    where: str = "the conversation",
) -> Encoded:
    """Tokenize a conversation by the template `internvl2_5`, with labels for the answers.

    Labels begin after the words that open an answer, and end with the token that closes it.

    Args:
        turns: Speaker and text, with `<image>` for images.
        tokenizer: A tokenizer of transformers.
        tokens: Number of tokens of each image.
        max_seq_length: Length at which the tokens are cut off.
        system_message: Message for a conversation that has none; None for no message.
        where: Source of the conversation, for messages.

    Raises:
        UsageError: Images and words for them do not match.
    """
    said = list(turns)
    if said[0][0] == "system":
        system_message = said.pop(0)[1]
    said = expand_images(said, tokens, where)
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    if system_message is not None:
        said.insert(0, ("system", system_message))
    texts = [f"<|im_start|>{names[s]}\n{text}<|im_end|>\n" for s, text in said]
    if getattr(tokenizer, "add_bos_token", False):
        texts[0] = tokenizer.bos_token + texts[0]
    pieces = tokenizer(texts, add_special_tokens=False).input_ids
    opening = len(tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids)
    ids, labels = [], []
    for (speaker, _), piece in zip(said, pieces, strict=True):
        ids += piece
        if speaker == "gpt":
            labels += [IGNORED] * opening + piece[opening:-1] + [IGNORED]
        else:
            labels += [IGNORED] * len(piece)
    input_ids = np.asarray(ids, np.int32)[:max_seq_length]
    end = tokenizer.convert_tokens_to_ids(IMG_END)
    return Encoded(
        input_ids,
        np.asarray(labels, np.int32)[:max_seq_length],
        not tokens or int((input_ids == end).sum()) == len(tokens),
    )
