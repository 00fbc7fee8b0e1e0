"""Small data in the real formats: pictures, conversations, scenes, a tokenizer, a config."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from recipes.recogdrive.chats import ADDED_TOKENS, IMG_CONTEXT, SYSTEM_MESSAGE
from recipes.recogdrive.loading import save_chat_model
from recipes.recogdrive.make_data import CURVATURES, Scene, make_scenes
from recipes.recogdrive.scenes import ASKED, COMMANDS
from recipes.recogdrive.scenes import SYSTEM_MESSAGE as SCENE_MESSAGE
from recipes.recogdrive.vlm import ChatModel, make_config, make_vlm
from recipes.small_tokenizer import SPECIAL, train_tokenizer

# Width and height of pictures in pixels, which give one, two, three, four or more tiles.
_SHAPES = ((112, 112), (224, 112), (160, 90), (112, 224), (336, 112))
_COLOURS = {"red": (200, 40, 40), "blue": (40, 60, 200), "white": (240, 240, 240)}


def make_chats(
    folder: str | Path, num_chats: int = 32, num_scenes: int = 16, seed: int = 0
) -> Path:
    """Write a small data set for stage 1 and caching, the same for the same seed.

        images/        pictures of roads, PNG and JPEG, of several shapes
        chats.jsonl    conversations about them; some have two pictures, some none
        meta.json      names that file
        scenes.jsonl   moments of drives, to be cached
        model/         a tokenizer like Qwen 2's, trained on those words, and a tiny model that
                       knows nothing yet

    Args:
        folder: Folder to write to, created if it is missing.
        num_chats: Number of conversations.
        num_scenes: Number of scenes.
        seed: Random seed of all data.

    Returns:
        The folder.
    """
    folder = Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    scenes = [
        _frame(folder, i, one, random) for i, one in enumerate(make_scenes(num_scenes, seed=seed))
    ]
    chats = [_chat(folder, i, random) for i in range(num_chats)]
    _write_lines(folder / "scenes.jsonl", scenes)
    _write_lines(folder / "chats.jsonl", chats)
    meta = {
        "small_driving_qa": {
            "root": "images",
            "annotation": "chats.jsonl",
            "data_augment": False,
            "repeat_time": 1,
            "length": len(chats),
        }
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    words = [turn["value"] for chat in chats for turn in chat["conversations"]]
    tokenizer = make_tokenizer(
        [*[SYSTEM_MESSAGE, SCENE_MESSAGE, ASKED] * 4, *words, *map(_say, scenes)]
    )
    config = make_config(
        "tiny",
        vocab_size=len(tokenizer),
        image_token=tokenizer.convert_tokens_to_ids(IMG_CONTEXT),
    )
    image_token = tokenizer.convert_tokens_to_ids(IMG_CONTEXT)
    model = ChatModel(make_vlm(config, seed), image_token)
    save_chat_model(model, tokenizer, folder / "model")
    return folder


def make_tokenizer(texts: list[str], vocab_size: int = 1000) -> Any:
    """Train a byte-level BPE tokenizer of Qwen 2's kind on texts, with InternVL's tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts, vocab_size),
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([*SPECIAL, *ADDED_TOKENS], special_tokens=True)
    return tokenizer


def _write_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)
    path.write_text(text, encoding="utf-8")


def _picture(path: Path, size: tuple[int, int], colour: str, lean: float) -> None:
    """Draw a road that leans to a side (-1 to 1), with a car of a colour on it."""
    width, height = size
    image = Image.new("RGB", size, (120, 170, 220))
    draw = ImageDraw.Draw(image)
    horizon = height // 2
    middle = width / 2
    end = middle + lean * width / 3
    draw.rectangle((0, horizon, width, height), fill=(80, 120, 60))
    draw.polygon(
        [(0, height), (width, height), (end + width / 20, horizon), (end - width / 20, horizon)],
        fill=(90, 90, 95),
    )
    near = (middle + end) / 2
    half, tall = width / 12, height / 6
    draw.rectangle((near - half, horizon, near + half, horizon + tall), fill=_COLOURS[colour])
    image.save(path)


def _chat(folder: Path, index: int, random: np.random.Generator) -> dict[str, Any]:
    """Make a conversation about no, one or two pictures, every fifth with a system message."""
    colour = str(random.choice(list(_COLOURS)))
    lean = int(random.integers(-1, 2))
    command = COMMANDS[lean + 1]
    num_images = (1, 1, 2, 1, 0)[index % 5]
    names = []
    for number in range(num_images):
        name = f"chat_{index:04}_{number}.{'png' if index % 2 else 'jpg'}"
        shape = _SHAPES[int(random.integers(len(_SHAPES)))]
        _picture(folder / "images" / name, shape, colour, lean)
        names.append(name)
    if not names:
        turns = [("human", "May the car go when the light is red?"), ("gpt", "No, it has to stop.")]
    else:
        asked = "<image>\n" * num_images + "What colour is the car ahead?"
        turns = [("human", asked), ("gpt", f"The car ahead is {colour}.")]
        turns += [("human", "What should the ego vehicle do?"), ("gpt", f"It should {command}.")]
    if index % 5 == 3:
        turns.insert(0, ("system", "You drive a car with care."))
    chat: dict[str, Any] = {"id": index}
    if names:
        chat["image"] = names if num_images > 1 else names[0]
    chat["conversations"] = [{"from": speaker, "value": text} for speaker, text in turns]
    return chat


def _frame(folder: Path, index: int, scene: Scene, random: np.random.Generator) -> dict[str, Any]:
    """Return a line of scenes.jsonl, and draw its picture, in which the road leans like the arc."""
    name = f"scene_{index:04}.jpg"
    lean = -scene.curvature / max(CURVATURES)
    _picture(folder / "images" / name, (224, 112), str(random.choice(list(_COLOURS))), lean)
    features = scene.features()
    return {
        "log": scene.log,
        "token": scene.token,
        "image": f"images/{name}",
        "history": features["history_trajectory"].tolist(),
        "command": features["high_command_one_hot"].tolist(),
        "velocity": features["status_feature"][4:6].tolist(),
        "acceleration": features["status_feature"][6:8].tolist(),
        "trajectory": scene.trajectory().tolist(),
    }


def _say(scene: dict[str, Any]) -> str:
    """Return numbers in the form of a prompt, to train a tokenizer on."""
    return " ".join(f"{value:+.2f}" for pose in scene["history"] for value in pose)
