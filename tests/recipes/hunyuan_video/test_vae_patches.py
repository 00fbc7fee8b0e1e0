"""Attention with a computed mask is the class's own function, and the class is restored."""

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from recipes.hunyuan_video.decode import decode_video, port_vae
from recipes.hunyuan_video.vae_patches import only_part, patched_vae
from tests.recipes.hunyuan_video.vae_models import normal, small_vae
from tpuport.foundation.errors import UsageError

FORWARD = HunyuanVideo15AttnBlock.forward


def block() -> Any:
    return small_vae().decoder.mid_block.attentions[0]


@pytest.mark.parametrize("frames", [1, 3])
def test_attention_with_a_computed_mask_is_the_classs_own(frames: int):
    attention = block()
    x = normal(1, 16, frames, 3, 2).requires_grad_()
    want = attention(x)
    (wanted,) = torch.autograd.grad(want.square().sum(), x)
    with patched_vae(attention):
        assert HunyuanVideo15AttnBlock.forward is not FORWARD
        got = attention(x)
    (gradient,) = torch.autograd.grad(got.square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
    assert HunyuanVideo15AttnBlock.forward is FORWARD


def test_a_part_of_a_tile_is_computed_as_if_it_were_alone():
    """In one batch with other parts."""
    model = small_vae()
    tiles = normal(3, 4, 2, 4, 3)
    sizes = [(2, 3), (4, 1), (4, 3)]
    extents = torch.tensor(sizes)
    alone = [
        model.decoder(tile[None, :, :, :height, :width])
        for tile, (height, width) in zip(tiles, sizes, strict=True)
    ]
    with patched_vae(model):
        with only_part(extents, (4, 3)):
            got = model.decoder(tiles)
    for one, whole in zip(alone, got, strict=True):
        height, width = one.shape[-2:]
        torch.testing.assert_close(whole[None, ..., :height, :width], one, rtol=1e-4, atol=1e-5)
    with patched_vae(model), only_part(None, (4, 3)):
        torch.testing.assert_close(model.decoder(tiles[2:]), alone[2], rtol=1e-4, atol=1e-5)
    model.decoder.conv_in.pad_mode = "reflect"
    with patched_vae(model), only_part(extents, (4, 3)):
        with pytest.raises(UsageError, match=r"pad_mode='reflect': expected convolutions"):
            model.decoder(tiles)


def test_the_classs_own_mask_is_not_made(monkeypatch: pytest.MonkeyPatch):
    make, made = HunyuanVideo15AttnBlock.prepare_causal_attention_mask, []

    def mask(frames: int, size: int, *args: Any, **more: Any) -> torch.Tensor:
        made.append((frames, size))
        return make(frames, size, *args, **more)

    monkeypatch.setattr(
        HunyuanVideo15AttnBlock, "prepare_causal_attention_mask", staticmethod(mask)
    )
    attention, x = block(), normal(1, 16, 2, 3, 2)
    with patched_vae(attention):
        attention(x)
    assert made == []
    attention(x)
    assert made == [(2, 6)]


def test_an_error_leaves_the_class_as_it_was():
    with pytest.raises(RuntimeError, match="of the user's"), patched_vae(small_vae()):
        raise RuntimeError("of the user's")
    assert HunyuanVideo15AttnBlock.forward is FORWARD
    with patched_vae(small_vae()):
        with patched_vae(small_vae()):
            pass
        assert HunyuanVideo15AttnBlock.forward is not FORWARD
    assert HunyuanVideo15AttnBlock.forward is FORWARD


def test_a_video_is_decoded_and_the_class_is_as_it_was():
    model = small_vae()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    vae = port_vae(model, "float32")
    decode_video(vae, normal(1, 4, 1, 1, 2).numpy())
    assert HunyuanVideo15AttnBlock.forward is FORWARD
    assert all(torch.equal(weights[n], w) for n, w in model.state_dict().items())
    assert all(weight.requires_grad for weight in model.parameters())
