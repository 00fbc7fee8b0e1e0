"""Loading and saving of a VLM and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch

import tpuport
from recipes.quiet import quietly
from recipes.recogdrive.chats import ADDED_TOKENS, IMG_CONTEXT
from recipes.recogdrive.samples import check_tokens
from recipes.recogdrive.vlm import ChatModel, add_tokens, make_vlm
from recipes.recogdrive.vlm_weights import config_of, to_transformers
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_folder


def load_chat_model(
    path: str | Path,
    *,
    force_image_size: int | None = None,
    down_sample_ratio: float | None = None,
) -> tuple[ChatModel, Any]:
    """Load the model and the tokenizer of a folder, in float32 on the CPU.

    The folder has transformers' own format of InternVL (InternVL3-2B-hf), or that of OpenGVLab and
    ReCogDrive (internvl_chat with a Qwen 2), whose weights are renamed.

    Tokens of stage 1 that the tokenizer lacks are added, with embeddings in the model.

    Args:
        path: Folder with config.json, weights in safetensors and the tokenizer's files.
        force_image_size: Size of the caller's tiles, which has to be the model's.
        down_sample_ratio: Downsampling of the caller's tiles, which has to be the model's.

    Raises:
        UsageError: It is missing, is a different model, or has other tiles.
    """
    from transformers import AutoTokenizer

    path = Path(path)
    if not (path / "config.json").is_file():
        raise UsageError(
            f"{path} has no config.json. What to do: give a folder of an InternVL of transformers,"
            " such as a download of OpenGVLab/InternVL3-2B-hf, or what make-data wrote"
        )
    with quietly():
        vlm = _vlm_of(path)
    _check_tiles(vlm.config, path, force_image_size, down_sample_ratio)
    tokenizer = AutoTokenizer.from_pretrained(path)
    add_tokens(vlm, tokenizer, ADDED_TOKENS)
    check_tokens(tokenizer)
    image_token = tokenizer.convert_tokens_to_ids(IMG_CONTEXT)
    vlm.config.image_token_id = image_token
    return ChatModel(vlm, image_token), tokenizer


def _vlm_of(path: Path) -> Any:
    from transformers import InternVLForConditionalGeneration

    kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind == "internvl":
        return InternVLForConditionalGeneration.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        )
    if kind != "internvl_chat":
        raise UsageError(
            f"{path} has a model of type {kind!r}; expected 'internvl' (transformers' own) or"
            " 'internvl_chat' (OpenGVLab's)"
        )
    vlm = make_vlm(config_of(path / "config.json"))
    opened = tpuport.open_checkpoint(path)
    weights = to_transformers({name: opened.read(name).float() for name in opened})
    vlm.load_state_dict(weights)
    return vlm


def _check_tiles(config: Any, path: Path, size: int | None, ratio: float | None) -> None:
    has = config.vision_config.image_size
    has = has[0] if isinstance(has, (list, tuple)) else has
    if size is not None and size != has:
        raise UsageError(
            f"--force_image_size {size}: {path} has positions for {has}. What to do: leave the flag"
            f" at {has}"
        )
    if ratio is not None and ratio != config.downsample_ratio:
        raise UsageError(
            f"--down_sample_ratio {ratio}: {path} was trained with {config.downsample_ratio}"
        )


def tile_of(model: ChatModel) -> tuple[int, int]:
    """Return the side of a tile in pixels, and its number of tokens."""
    config = model.vlm.config
    size = config.vision_config.image_size
    return (size[0] if isinstance(size, (list, tuple)) else size), config.image_seq_length


def save_chat_model(
    model: ChatModel, tokenizer: Any, folder: str | Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a model and its tokenizer atomically, as `load_chat_model` reads them.

    Other files in the folder are kept.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    vlm = model.vlm.to(dtype)
    with replacing_folder(folder, keep=lambda name: True) as temporary:
        for file in temporary.glob("*.safetensors*"):
            file.unlink()
        with quietly():
            vlm.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
