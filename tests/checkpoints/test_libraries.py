"""Directories of transformers and diffusers: in, compared with their own loading, and out again."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from transformers import LlamaConfig, LlamaForCausalLM

import tpuport
from tpuport.weights.read import same_bits


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", ["20KB", "1GB"])
def test_a_llama_goes_in_and_out(tmp_path: Path, tied: bool, size: str):
    model = llama(tied=tied)
    source, target = tmp_path / "a", tmp_path / "b"
    model.save_pretrained(source, max_shard_size=size)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (size == "20KB")

    with torch.device("meta"):
        empty = llama(tied=tied)
    # What no checkpoint has is computed on the CPU.
    empty.model.rotary_emb = type(empty.model.rotary_emb)(empty.config)
    ported = tpuport.convert(empty)
    assert ported.load(source) == ([], [])
    ids = torch.randint(0, 64, (2, 7))
    out = ported(input_ids=ids)
    assert ported.report.verified
    logits = tpuport.to_torch(out).logits
    torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)

    tpuport.save_checkpoint(target, ported, like=source)
    assert files_of(target) == files_of(source)
    again = LlamaForCausalLM.from_pretrained(target)
    for name, tensor in model.state_dict().items():
        assert same_bits(again.state_dict()[name], tensor)


def test_a_changed_llama_is_what_transformers_loads(tmp_path: Path):
    source, target = tmp_path / "a", tmp_path / "b"
    llama().bfloat16().save_pretrained(source, max_shard_size="20KB")
    weights = tpuport.load_checkpoint(source, dtype={"norm": "float32"})
    assert weights["model.norm.weight"].dtype == np.float32
    weights["lm_head.weight"] = weights["lm_head.weight"] * 2
    tpuport.save_checkpoint(target, weights, like=source)
    before, after = (LlamaForCausalLM.from_pretrained(d).state_dict() for d in (source, target))
    for name, tensor in before.items():
        expected = tensor * 2 if name == "lm_head.weight" else tensor
        assert same_bits(after[name], expected)


def test_a_directory_of_our_own_is_loaded_by_transformers(tmp_path: Path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    tpuport.save_checkpoint(tmp_path, tpuport.convert(model), max_shard_size="20KB")
    assert len([n for n in os.listdir(tmp_path) if n.endswith(".safetensors")]) > 1
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert same_bits(again.state_dict()[name], tensor)


def test_the_meta_llamas_missing_tables_are_named(tmp_path: Path):
    llama().save_pretrained(tmp_path)
    with torch.device("meta"):
        ported = tpuport.convert(llama())
    with pytest.raises(tpuport.TpuportError, match=r"(?s)inv_freq.*LlamaRotaryEmbedding\(\.\.\.\)"):
        ported.load(tmp_path)


def test_a_diffusers_model_goes_in_and_out(tmp_path: Path):
    model = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=2,
        sample_size=8,
    ).eval()
    source, target = tmp_path / "pipe" / "vae", tmp_path / "b"
    model.save_pretrained(source, max_shard_size="30KB", variant="fp16")
    where = {"subfolder": "vae", "variant": "fp16"}
    ported = tpuport.convert(model, methods=("decode",))
    ported.load(tmp_path / "pipe", **where)
    z = torch.randn(1, 2, 4, 4)
    sample = tpuport.to_torch(ported.decode(z)).sample
    torch.testing.assert_close(sample, model.decode(z).sample, rtol=1e-4, atol=1e-4)

    tpuport.save_checkpoint(
        target, ported, like=tpuport.open_checkpoint(tmp_path / "pipe", **where)
    )
    weights = {n: b for n, b in files_of(target).items() if n != "config.json"}
    assert weights == {n: b for n, b in files_of(source).items() if n != "config.json"}
    again = AutoencoderKL.from_pretrained(source, variant="fp16").state_dict()
    for name, tensor in model.state_dict().items():
        assert same_bits(again[name], tensor)
