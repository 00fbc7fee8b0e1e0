"""Conversations become the tokens and labels of the template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.recogdrive.chats import (
    ADDED_TOKENS,
    IGNORED,
    encode,
    expand_images,
    read_lines,
    read_meta,
    read_sample,
)
from recipes.recogdrive.make_chats import make_tokenizer
from recipes.recogdrive.samples import check_tokens
from tpuport.foundation.errors import UsageError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["What colour is the car ahead? The car ahead is blue."] * 3)


def test_the_tokenizer_takes_any_text(tokenizer: Any):
    text = "<|im_start|>Übergrößen 42.5 m/s\n\n  <img><IMG_CONTEXT></img> 自动驾驶<|im_end|>\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer("<IMG_CONTEXT>").input_ids) == 1
    assert tokenizer.add_tokens([*ADDED_TOKENS], special_tokens=True) == 0
    check_tokens(tokenizer)


def test_a_tokenizer_without_the_tokens_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"<": 0, "|": 1}, merges=[]))
    )
    with pytest.raises(UsageError, match=r"tokens of <\|im_start\|>; expected one"):
        check_tokens(bare)


def labelled(tokenizer: Any, turns: list[tuple[str, str]], **more: Any) -> tuple[str, list[str]]:
    """The whole text, and the runs of it that a loss is computed for."""
    made = encode(turns, tokenizer, **more)
    kept = made.labels != IGNORED
    np.testing.assert_array_equal(made.labels[kept], made.input_ids[kept])
    runs, edges = [], np.flatnonzero(np.diff(np.concatenate([[0], kept.astype(int), [0]])))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        runs.append(tokenizer.decode(made.input_ids[start:stop]))
    return tokenizer.decode(made.input_ids), runs


def test_answers_are_learnt_with_what_closes_them(tokenizer: Any):
    turns = [("human", "<image>\nHi?"), ("gpt", "Yes."), ("human", "Go?"), ("gpt", "No!")]
    text, runs = labelled(tokenizer, turns, tokens=[2], system_message="Drive.")
    assert text == (
        "<|im_start|>system\nDrive.<|im_end|>\n"
        "<|im_start|>user\n<img><IMG_CONTEXT><IMG_CONTEXT></img>\nHi?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nGo?<|im_end|>\n"
        "<|im_start|>assistant\nNo!<|im_end|>\n"
    )
    assert runs == ["Yes.<|im_end|>", "No!<|im_end|>"]


def test_a_conversations_own_system_message_takes_the_templates_place(tokenizer: Any):
    text, _ = labelled(tokenizer, [("system", "Mine."), ("human", "Hi?"), ("gpt", "Yes.")])
    assert text.startswith("<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user")
    text, _ = labelled(tokenizer, [("human", "Hi?"), ("gpt", "Yes.")])
    assert "InternVL" in text


def test_an_image_that_is_cut_off_is_told(tokenizer: Any):
    turns = [("human", "<image>\nHi?"), ("gpt", "Yes.")]
    whole = encode(turns, tokenizer, [8], system_message=None)
    assert whole.is_whole
    cut = encode(turns, tokenizer, [8], system_message=None, max_seq_length=10)
    assert len(cut.input_ids) == len(cut.labels) == 10
    assert not cut.is_whole
    # Text that is cut is a sample all the same, as upstream.
    limit = len(whole.input_ids) - 2
    assert encode(turns, tokenizer, [8], system_message=None, max_seq_length=limit).is_whole


def test_images_go_to_what_the_human_says():
    turns = [("human", "<image> and <image>"), ("gpt", "<image>"), ("human", "<image>")]
    expanded = expand_images(turns, [1, 2, 1])
    assert expanded[0][1].count("<IMG_CONTEXT>") == 3
    assert expanded[1] == ("gpt", "<image>")
    assert expanded[2][1] == "<img><IMG_CONTEXT></img>"
    # Words beyond the images stay words.
    assert expand_images(turns, [1])[2] == ("human", "<image>")
    with pytest.raises(UsageError, match="4 images and 3 times <image>"):
        expand_images(turns, [1, 1, 1, 1])


# -- files -----------------------------------------------------------------------------------------


def write(folder: Path, lines: list[Any], **meta: Any) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = {"root": "pictures", "annotation": "a.jsonl", "data_augment": True, **meta}
    path = folder / "meta.json"
    path.write_text(json.dumps({"a": one}))
    return path


TALK = {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]}


def test_meta_and_lines_are_read(tmp_path: Path):
    path = write(tmp_path, [{**TALK, "image": "x.png"}, {**TALK, "image": ["y.png", "z.png"]}])
    (source,) = read_meta(path)
    assert source.data_augment
    assert source.root == tmp_path / "pictures"
    one, two = (read_sample(line, number, source) for number, line in read_lines(source))
    assert one.turns[0] == ("human", "<image>\nHi?")
    assert one.images == [tmp_path / "pictures" / "x.png"]
    assert one.where.endswith("a.jsonl:1")
    # Of several images the text has to say where they belong.
    assert two.turns[0] == ("human", "Hi?")
    assert len(two.images) == 2


@pytest.mark.parametrize(("times", "count"), [(3, 30), (0.25, 2), (1, 10), (0.99, 9)])
def test_data_sets_are_repeated(tmp_path: Path, times: float, count: int):
    (source,) = read_meta(write(tmp_path, [TALK] * 10, repeat_time=times))
    assert len(read_lines(source)) == count


def test_half_repetitions_are_refused(tmp_path: Path):
    (source,) = read_meta(write(tmp_path, [TALK], repeat_time=1.5))
    with pytest.raises(UsageError, match=r"repeat_time=1.5; expected a whole number"):
        read_lines(source)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a.jsonl:7: not JSON"),
        ("[]", "expected an object with conversations"),
        ('{"conversations": []}', "no turns of human or gpt"),
        ('{"conversations": [{"from": "system", "value": "x"}]}', "no turns of human or gpt"),
        ('{"conversations": [{"from": "user", "value": "x"}]}', "turn 0 is from 'user'"),
        ('{"conversations": [{"from": "gpt"}, {"from": "system"}]}', "turn 1 is from 'system'"),
        ('{"video": "a.mp4", "conversations": [{"from": "human"}]}', "a video. What to do"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str):
    (source,) = read_meta(write(tmp_path, []))
    with pytest.raises(UsageError, match=message):
        read_sample(line, 7, source)


def test_wrong_meta_files_are_named(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no such file"):
        read_meta(tmp_path / "none.json")
    path = write(tmp_path, [], root=None)
    with pytest.raises(UsageError, match="'a' lacks 'root'"):
        read_meta(path)
    path.write_text("[1]")
    with pytest.raises(UsageError, match="expected an object of data sets"):
        read_meta(path)
    (source,) = read_meta(write(tmp_path, [], annotation="b.jsonl"))
    with pytest.raises(UsageError, match=r"b.jsonl: there is no such file"):
        read_lines(source)
