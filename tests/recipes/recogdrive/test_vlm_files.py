"""A VLM in a folder, by transformers' names and by OpenGVLab's."""

import json
from pathlib import Path

import pytest
import torch

from recipes.recogdrive.chats import ADDED_TOKENS
from recipes.recogdrive.loading import load_chat_model, save_chat_model, tile_of
from recipes.recogdrive.make_chats import make_tokenizer
from recipes.recogdrive.vlm import ChatModel, add_tokens, make_config, make_vlm
from recipes.recogdrive.vlm_weights import to_transformers, to_upstream
from tpuport.foundation.errors import UsageError


def made(folder: Path) -> ChatModel:
    tokenizer = make_tokenizer(["Drive on."])
    image_token = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = make_config("tiny", vocab_size=len(tokenizer), image_token=image_token)
    model = ChatModel(make_vlm(config), image_token)
    save_chat_model(model, tokenizer, folder)
    return model


def same(one: ChatModel, other: ChatModel) -> None:
    expected = one.state_dict()
    assert other.state_dict().keys() == expected.keys()
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_model_comes_back_as_it_was_saved(tmp_path: Path):
    model = made(tmp_path / "model")
    (tmp_path / "model" / "note.txt").write_text("kept")
    loaded, tokenizer = load_chat_model(
        tmp_path / "model", force_image_size=56, down_sample_ratio=0.5
    )
    same(model, loaded)
    assert tile_of(loaded) == (56, 4)
    assert loaded.image_token == tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    save_chat_model(loaded, tokenizer, tmp_path / "model", torch.bfloat16)
    assert (tmp_path / "model" / "note.txt").read_text() == "kept"
    half, _ = load_chat_model(tmp_path / "model")
    for name, value in half.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].bfloat16().float()), name


def test_opengvlabs_files_are_read(tmp_path: Path):
    """Their names and configuration, as InternVL3-2B has them."""
    import safetensors.torch

    model = made(tmp_path)
    config = model.vlm.config
    weights = to_upstream(model.vlm.state_dict())
    assert "vision_model.encoder.layers.1.attn.qkv.bias" in weights
    assert "language_model.model.layers.0.mlp.up_proj.weight" in weights
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    theirs = {
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "force_image_size": 56,
        "ps_version": "v2",
        "select_layer": -1,
        "llm_config": {**config.text_config.to_dict(), "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": {
            **{
                name: getattr(config.vision_config, name)
                for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
            },
            "intermediate_size": 64,
            "image_size": 448,
            "patch_size": 14,
            "norm_type": "layer_norm",
            "layer_norm_eps": 1e-6,
            "qkv_bias": True,
            "qk_normalization": False,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    loaded, _ = load_chat_model(tmp_path, force_image_size=56)
    same(model, loaded)
    theirs["llm_config"]["architectures"] = ["InternLM2ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(UsageError, match="a language model of InternLM2ForCausalLM; expected"):
        load_chat_model(tmp_path)


def test_names_go_there_and_back(tmp_path: Path):
    weights = made(tmp_path).vlm.state_dict()
    back = to_transformers(to_upstream(weights))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())
    with pytest.raises(UsageError, match=r"'language_model.model.tok_embeddings.weight|'x.y'"):
        to_transformers({"x.y": torch.zeros(1)})


def test_tokens_are_added_as_upstream_does(tmp_path: Path):
    tokenizer = make_tokenizer(["Drive on."])
    config = make_config("tiny", vocab_size=len(tokenizer), image_token=5)
    vlm = make_vlm(config)
    before = vlm.lm_head.weight.detach().clone()
    assert add_tokens(vlm, tokenizer, ADDED_TOKENS) == 0
    assert add_tokens(vlm, tokenizer, ("<new>", "<newer>")) == 2
    assert len(vlm.get_input_embeddings().weight) == len(tokenizer)
    torch.testing.assert_close(vlm.lm_head.weight[:-2], before)
    torch.testing.assert_close(vlm.lm_head.weight[-1], before.mean(dim=0))


def test_what_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"has no config.json. What to do: give a folder of an"):
        load_chat_model(tmp_path)
    made(tmp_path)
    with pytest.raises(UsageError, match=r"--force_image_size 448: .* has positions for 56"):
        load_chat_model(tmp_path, force_image_size=448)
    with pytest.raises(UsageError, match=r"--down_sample_ratio 0.25"):
        load_chat_model(tmp_path, down_sample_ratio=0.25)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UsageError, match="a model of type 'qwen2'; expected 'internvl'"):
        load_chat_model(tmp_path)
