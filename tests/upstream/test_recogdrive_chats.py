"""Stage 1's data and model are those of upstream's own code, to the token.

Waits for a checkout: TPUPORT_UPSTREAM_RECOGDRIVE=/path/to/recogdrive (zorrofox/recogdrive at
6b4663b); the model also for timm and peft.
"""

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tpuport
from recipes.recogdrive.chats import encode
from recipes.recogdrive.make_chats import make_tokenizer
from recipes.recogdrive.tiles import Tiling, cut, grid_of
from tests.recipes.recogdrive.chat_data import LENGTH, Small
from tests.upstream.recogdrive_checkout import (
    CHECKOUT,
    MODEL,
    needs,
    needs_checkout,
    old_checkpoint,
    old_timm,
)

pytestmark = [needs_checkout, old_timm, *old_checkpoint]
FOLDER = Path(CHECKOUT) / "internvl_chat"
ABSENT = ("cv2", "imageio", "torchvision", "decord", "petrel_client", "flash_attn", "deepspeed")
needs_model = needs(MODEL)


@pytest.fixture(scope="module")
def dataset() -> Any:
    """upstream's internvl.train.dataset."""
    sys.path.insert(0, str(FOLDER))
    try:
        with tpuport.porting("internvl", absent=ABSENT, port_modules=False):
            yield importlib.import_module("internvl.train.dataset")
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["What colour is the car ahead? The car ahead is blue."] * 3)


SIZES = [(192, 108), (108, 192), (448, 448), (28, 28), (300, 20), (7, 401), (134, 100)]


BOUNDS = [(fewest, most) for fewest in (1, 2, 4) for most in (1, 4, 6, 12, 16) if fewest <= most]


@pytest.mark.parametrize(("fewest", "most"), BOUNDS)
def test_grids_are_upstreams(dataset: Any, most: int, fewest: int, monkeypatch: pytest.MonkeyPatch):
    chosen, closest = [], dataset.find_closest_aspect_ratio

    def told(*given: Any) -> tuple[int, int]:
        chosen.append(closest(*given))
        return chosen[-1]

    monkeypatch.setattr(dataset, "find_closest_aspect_ratio", told)
    random = np.random.default_rng(most)
    sizes = [*SIZES, *(tuple(map(int, size)) for size in random.integers(5, 400, (50, 2)))]
    tiling = Tiling(14, fewest, most)
    for size in sizes:
        image = Image.new("RGB", size)
        tiles = dataset.dynamic_preprocess(image, fewest, most, 14, use_thumbnail=False)
        columns, rows = grid_of(size, tiling)
        assert chosen.pop() == (columns, rows), size
        assert len(tiles) == columns * rows, size


@pytest.mark.parametrize("size", [(96, 54), (54, 96), (40, 40), (160, 31)])
@pytest.mark.parametrize("thumbnail", [True, False])
def test_tiles_are_upstreams_to_the_bit(dataset: Any, size: tuple[int, int], thumbnail: bool):
    width, height = size
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(values)
    theirs = dataset.dynamic_preprocess(image, 1, 12, 28, use_thumbnail=thumbnail)
    ours = cut(image, Tiling(28, 1, 12, use_thumbnail=thumbnail))
    assert len(ours) == len(theirs) > 1 - (size == (40, 40))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


CHATS = {
    "one turn": [("human", "<image>\nWhat colour?"), ("gpt", "Blue.")],
    "turns": [
        *(("human", "<image>\nWhat colour?"), ("gpt", "Blue.")),
        *(("human", "And now? "), ("gpt", " Still blue!\n")),
    ],
    "system": [("system", "You drive."), ("human", "<image> <image>"), ("gpt", "Two <image>.")],
    "text": [("human", "Hi?"), ("gpt", "Yes.")],
    "answers first": [("gpt", "Hello."), ("human", "Hi <image>?"), ("gpt", "Übermäßig 自动.")],
}


@pytest.mark.parametrize("limit", [10_000, 70, 30])
@pytest.mark.parametrize("turns", CHATS.values(), ids=CHATS)
def test_tokens_and_labels_are_upstreams(dataset: Any, tokenizer: Any, turns: Any, limit: int):
    num_image = sum(text.count("<image>") for speaker, text in turns if speaker == "human")
    tokens = [3, 5][:num_image]
    tokenizer.model_max_length = limit
    theirs = dataset.preprocess_internvl2_5(
        "internvl2_5",
        [[{"from": speaker, "value": text} for speaker, text in turns]],
        tokenizer,
        tokens,
        text_only=not num_image,
        group_by_length=True,
        num_image=num_image or 1,
    )
    ours = encode(turns, tokenizer, tokens, max_seq_length=limit)
    assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist()
    assert ours.labels.tolist() == theirs["labels"][0].tolist()


@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_rows_and_weights_are_upstreams(tmp_path: Path, reduction: Any):
    """Its packed rows: positions that begin anew, and a weight for each label."""
    source = (FOLDER / "internvl" / "train" / "dataset_packed.py").read_text(encoding="utf-8")
    inside = source[source.index("    def get_cu_seqlens_and_indexes") :]
    inside = inside[: inside.index("\n\n\n")]
    names: dict[str, Any] = {"torch": torch, "IGNORE_TOKEN_ID": -100, "callable": object}
    exec("class P:\n    @staticmethod\n" + inside, names)
    small = Small(tmp_path)
    samples = small.samples(0, 4)
    weights = {"token": lambda x: 1, "sample": lambda x: 1 / x, "square": lambda x: 1 / x**0.5}
    lengths = [len(s["input_ids"]) for s in samples]
    joined = {n: np.concatenate([s[n] for s in samples]) for n in ("input_ids", "labels")}
    labels = torch.from_numpy(joined["labels"])
    bounds, positions, expected = names["P"].get_cu_seqlens_and_indexes(
        torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)),
        torch.from_numpy(joined["input_ids"]),
        labels,
        weights[reduction],
    )
    batch = small.batch([samples], reduction=reduction)
    total = sum(lengths)
    assert bounds == [0, lengths[0], total]
    assert batch["position_ids"][0, :total].tolist() == positions
    kept = torch.where(labels == -100, 0.0, expected)
    torch.testing.assert_close(batch["loss_weight"][0, :total], kept)


# -- its model -------------------------------------------------------------------------------------


def relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected - found).abs().max().detach() / expected.abs().max().detach())


@needs_model
def test_upstreams_model_has_the_same_outputs(tmp_path: Path):
    """Weights there and back, and upstream's own forward of single samples."""
    from recipes.recogdrive.upstream_vlm import back_to_transformers, upstream_chat_model

    small = Small(tmp_path)
    sample = small.samples(1)[0]
    batch = small.batch([[sample]])
    with upstream_chat_model(CHECKOUT) as make:
        theirs = make(small.model)
        expected = theirs.vlm(
            pixel_values=torch.from_numpy(sample["pixel_values"]),
            input_ids=torch.from_numpy(sample["input_ids"]).long()[None],
            attention_mask=torch.ones(1, len(sample["input_ids"]), dtype=torch.bool),
            image_flags=torch.ones(len(sample["pixel_values"]), 1),
            labels=torch.from_numpy(sample["labels"]).long()[None],
        ).loss
        for model in (theirs, small.model):
            loss, _ = model(**batch)
            assert relative(expected, loss) < 1e-5
        other = copy.deepcopy(small.model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        back_to_transformers(theirs, other)
        for name, value in small.model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


@needs_model
def test_the_same_weights_of_both_models_decay(tmp_path: Path):
    from recipes.recogdrive.finetune import FinetuneOptions, make_optimizer
    from recipes.recogdrive.upstream_vlm import upstream_chat_model

    small, counts = Small(tmp_path), []
    with upstream_chat_model(CHECKOUT) as make:
        theirs = make(small.model)
        for model in (theirs, small.model):
            groups = make_optimizer(model, FinetuneOptions("", "", "")).param_groups
            counts.append([sum(p.numel() for p in group["params"]) for group in groups])
            if model is theirs:
                names = {id(p): n for n, p in model.named_parameters()}
                without = {names[id(p)] for p in groups[1]["params"]}
    assert counts[0] == counts[1]
    assert {"vlm.mlp1.0.weight", "vlm.mlp1.0.bias", "vlm.mlp1.1.bias"} <= without
    assert "vlm.mlp1.1.weight" not in without


@needs_model
def test_upstreams_model_trains_as_a_program(tmp_path: Path):
    from recipes.recogdrive.finetune import FinetuneOptions, make_step
    from recipes.recogdrive.upstream_vlm import upstream_chat_model

    small = Small(tmp_path)
    options = FinetuneOptions("", "", "", learning_rate=1e-3, bf16=False, fsdp_devices=1)
    batch = small.batch([small.samples(0, 4), small.samples(1)], 2 * LENGTH)
    losses = []
    with upstream_chat_model(CHECKOUT) as make:
        for model in (small.model, make(small.model)):
            step = make_step(copy.deepcopy(model), options, steps=3)
            state = step.init()
            for _ in range(3):
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-4)
    assert losses[2] < losses[0]
