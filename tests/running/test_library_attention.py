"""Switches of transformers and diffusers that choose CUDA kernels for attention."""

from typing import Any

import pytest
import torch

import tpuport

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")


@pytest.fixture
def block():
    with tpuport.porting(port_modules=False), torch.no_grad():
        yield


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(tpuport.to_torch(ours), theirs, rtol=1e-4, atol=1e-5)


def llama(implementation: str, **changes: Any) -> Any:
    config = transformers.MistralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )
    torch.manual_seed(0)
    kind = transformers.MistralForCausalLM
    return kind._from_config(config, attn_implementation=implementation).eval()


MASKS = {
    "none": None,
    "full": torch.ones(2, 7, dtype=torch.long),
    "left": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]),
    "right": torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7]),
}


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(
    ("implementation", "window", "mask"),
    [
        ("flash_attention_2", None, "none"),
        ("flash_attention_2", None, "left"),
        ("flash_attention_2", 3, "right"),
        ("flash_attention_3", None, "left"),
        ("flash_attention_3", 3, "full"),
    ],
)
def test_transformers_flash_attention(implementation, window, mask, monkeypatch):
    from tpuport.compat.packages import _attention

    calls = []
    attend = _attention.attend
    for place in ("_attention", "flash_attn", "flash_attn_interface"):
        monkeypatch.setattr(
            f"tpuport.compat.packages.{place}.attend",
            lambda *a, **k: calls.append(1) or attend(*a, **k),
        )
    ids = torch.arange(14).view(2, 7)
    inputs = {"input_ids": ids, "attention_mask": MASKS[mask], "use_cache": False}
    kept = slice(None) if MASKS[mask] is None else MASKS[mask].bool()
    want = llama("eager", sliding_window=window)(**inputs).logits[kept]
    model = llama(implementation, sliding_window=window)
    assert model.config._attn_implementation == implementation
    close(model(**inputs).logits[kept], want)
    assert calls == [1]
    ported = tpuport.convert(model)
    close(tpuport.to_torch(ported(**inputs).logits)[kept], want)


@pytest.mark.usefixtures("block")
def test_transformers_generates_with_flash_attention():
    ids = torch.arange(6).view(2, 3)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = llama("sdpa").generate(ids, **options)
    assert torch.equal(llama("flash_attention_2").generate(ids, **options), want)


def test_transformers_forgets_it_afterwards():
    import transformers.modeling_flash_attention_utils as kept

    before = (kept._lazy_imports, kept._flash_fn, kept._loaded_implementation)
    with tpuport.porting():
        llama("flash_attention_2")
        assert kept._loaded_implementation == "flash_attention_2"
    assert before == (kept._lazy_imports, kept._flash_fn, kept._loaded_implementation)
    with pytest.raises((ImportError, ValueError)):
        llama("flash_attention_2")


@pytest.fixture(scope="module")
def wan() -> Any:
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    ).eval()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("backend", ["flash", "_flash_3", "sage", "xformers", "flash_varlen"])
def test_diffusers_backends(wan, backend):
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "return_dict": False,
    }
    wan.set_attention_backend("native")
    want = wan(**inputs)[0]
    wan.set_attention_backend(backend)
    try:
        close(wan(**inputs)[0], want)
        close(tpuport.convert(wan)(**inputs)[0], want)
    finally:
        wan.set_attention_backend("native")


def test_diffusers_backends_are_as_before_afterwards(wan):
    import diffusers.models.attention_dispatch as dispatch

    with tpuport.porting():
        assert dispatch._CAN_USE_FLASH_ATTN
    assert not dispatch._CAN_USE_FLASH_ATTN
    assert dispatch.flash_attn_func is None
    with pytest.raises(RuntimeError, match="missing package"):
        wan.set_attention_backend("flash")


@pytest.mark.usefixtures("block")
def test_diffusers_xformers_processor():
    import diffusers.models.attention_processor as processors

    torch.manual_seed(0)
    attention = processors.Attention(query_dim=16, heads=2, dim_head=8).eval()
    x, mask = torch.randn(2, 6, 16), torch.randn(4, 1, 6)
    want = attention(x, attention_mask=mask)
    attention.set_processor(processors.XFormersAttnProcessor())
    close(attention(x, attention_mask=mask), want)
    close(tpuport.convert(attention)(x, attention_mask=mask), want)
