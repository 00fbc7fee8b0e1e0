"""π0 and π0.5 as programs: the losses, gradients and actions of eager PyTorch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import GemmaConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma import modeling_gemma

import tpuport
from recipes.openpi.config import Config, Transformer, Vision, config_of, read_config
from recipes.openpi.gemma import MLP, rotary_of, rotated
from recipes.openpi.model import Pi0, augmented_loss, policy_loss, to_bfloat16
from recipes.openpi.siglip import Siglip
from recipes.openpi.weights import random_weights, read_weights, upstream_names, write_weights
from tests.recipes.openpi.small import BOTH, SMALL, observations, small_policy
from tpuport.foundation.errors import CheckpointError, UsageError


def relative(found: Any, expected: torch.Tensor) -> float:
    found = found if isinstance(found, torch.Tensor) else torch.as_tensor(np.array(found))
    found = found.detach().double()
    expected = expected.detach().double()
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


@pytest.mark.parametrize("kind", BOTH)
def test_losses_gradients_and_actions_are_those_of_eager(kind: str):
    policy, batch = small_policy(kind), observations()
    ported = tpuport.convert(policy, methods=("sample_actions", policy_loss), verify=False)

    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, None, batch, method="policy_loss")[0]

    value, found = jax.jit(jax.value_and_grad(loss))(ported.params)
    expected = policy_loss(policy, batch)
    expected.backward()
    assert relative(value, expected) < 1e-5
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            assert relative(found[name], parameter.grad) < 1e-4, name
    # Of the last layer of the language model only keys and values are read.
    last = "paligemma_with_expert.paligemma.model.language_model."
    without = {name for name, one in policy.named_parameters() if one.grad is None}
    assert {name.removeprefix(last) for name in without} == {
        "norm.weight",
        "layers.2.post_attention_layernorm.weight",
        *(f"layers.2.self_attn.{part}_proj.weight" for part in "qo"),
        *(f"layers.2.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    noise = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    for steps in (10, 3):  # one program for both
        with torch.no_grad():
            actions = policy.sample_actions(batch, noise, steps)
        given = torch.tensor(steps, dtype=torch.int32)
        found = ported.sample_actions(batch, noise, given)
        assert relative(tpuport.to_numpy(found), actions) < 1e-5
    assert "while_loop" in str(ported.report)


def test_parts_are_those_of_transformers():
    """The encoder of images, and a layer's rotation of positions and gated product."""
    torch.manual_seed(0)
    sizes = Vision(width=32, depth=2, mlp=48, heads=4, image_size=28, patch_size=14)
    encoder, pixels = Siglip(sizes), torch.randn(2, 3, 28, 28)
    config = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=28, patch_size=14, vision_use_head=False,
    )  # fmt: skip
    theirs = SiglipVisionModel(config).eval()
    theirs.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        expected = theirs(pixels).last_hidden_state
        found = encoder.post_layernorm(encoder.encoder(encoder.embeddings(pixels)))
    assert relative(found, expected) < 1e-6

    language = Transformer(width=32, depth=1, mlp=48, heads=4, kv_heads=1, head_dim=16)
    settings = GemmaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=1,
        head_dim=16, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    x, positions = torch.randn(2, 5, 32), torch.tensor([[0, 1, 2, 3, 700], [0, 0, 0, 1, 2]])
    gated = MLP(language)
    product = modeling_gemma.GemmaMLP(settings)
    product.load_state_dict(gated.state_dict())
    assert relative(gated(x), product(x)) < 1e-6
    cosine, sine = modeling_gemma.GemmaRotaryEmbedding(settings)(x, positions)
    query = torch.randn(2, 4, 5, 16)
    turned, _ = modeling_gemma.apply_rotary_pos_emb(query, query, cosine, sine)
    assert relative(rotated(query, rotary_of(positions, 16, x.dtype)), turned) < 1e-6


def test_a_server_starts_without_transformers(tmp_path: Path):
    """It takes a second or two to import."""
    write_weights(tmp_path, small_policy("pi0"))
    code = f"""
import sys
from pathlib import Path
import recipes.openpi.serve
from recipes.openpi.weights import read_weights
read_weights(Path({str(tmp_path)!r}))
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_what_is_padding_changes_nothing():
    """Neither the tokens behind a prompt nor the picture of a camera that is not there."""
    policy, batch = small_policy(), observations()
    noise = batch["noise"]
    with torch.no_grad():
        expected = policy.sample_actions(batch, noise, 2)
        changed = {name: value.clone() for name, value in batch.items()}
        changed["tokens"][~batch["token_mask"]] = 39
        changed["images"][0, 1] = 255
        torch.testing.assert_close(policy.sample_actions(changed, noise, 2), expected)
        changed["images"][0, 0] = 255
        other = policy.sample_actions(changed, noise, 2)
    assert not torch.allclose(other[0], expected[0], atol=1e-3)
    torch.testing.assert_close(other[1], expected[1])


def test_the_prefix_does_not_see_the_suffix_and_states_do_not_see_actions():
    """One attention over all tokens with openpi's masks gives what the two parts give."""
    policy, batch = small_policy(), observations()
    time, noisy = batch["time"], batch["noise"]
    with torch.no_grad():
        prefix = policy.read_prefix(batch, policy.encode_images(batch["images"]))
        first = policy.velocity(prefix, batch["state"], noisy, time)
        other = policy.velocity(prefix, batch["state"] + 1, noisy, time)
    assert not torch.allclose(first, other)
    assert [keys.shape for keys in prefix.keys[0]] == [(2, 1, 2 * 4 + 7, 8)] * 2


def test_time_is_drawn_as_openpi_draws_it():
    """Beta(1.5, 1): the mean of drawn times is 0.6, and new for each call."""
    from torch.distributions import Beta

    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    drawn = (uniform ** (1 / 1.5)).sort().values
    share = torch.arange(1, 10) / 10
    exact = Beta(1.5, 1.0)
    for q in share:
        value = drawn[int(q * len(drawn))]
        # Its distribution function is x ** 1.5.
        assert abs(value**1.5 - q) < 0.02
        assert exact.log_prob(value).isfinite()


def test_augmented_images_differ_by_call_and_stay_in_range():
    from recipes.openpi.augment import augmented

    pixels = observations(4)["images"].float() / 127.5 - 1
    torch.manual_seed(0)
    first, second = augmented(pixels), augmented(pixels)
    assert not torch.equal(first, second)
    assert first.shape == pixels.shape
    assert first.min() >= -1
    assert first.max() <= 1
    # A grey picture has no colour that saturation could change.
    grey = augmented(torch.zeros(1, 2, 28, 28, 3))
    torch.testing.assert_close(grey[0, 1].amin(-1), grey[0, 1].amax(-1))


def test_augmented_losses_are_drawn_anew():
    ported = tpuport.convert(small_policy(), methods=(augmented_loss,), verify=False)
    batch = observations(drawn=False)
    losses = [float(ported.augmented_loss(batch)) for _ in range(3)]
    assert len(set(losses)) == 3
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("kind", BOTH)
def test_in_bfloat16_the_parts_that_openpi_keeps_stay_float32(kind: str):
    policy = to_bfloat16(small_policy(kind))
    dtypes = {name: parameter.dtype for name, parameter in policy.named_parameters()}
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert all("paligemma_with_expert" in name for name in narrow)
    assert not any("layernorm" in name and "vision" not in name for name in narrow)
    assert sum("_proj.weight" in name for name in narrow) > 20
    batch = observations()
    with torch.no_grad():
        found = policy.sample_actions(batch, batch["noise"], 4)
        wide = small_policy(kind).sample_actions(batch, batch["noise"], 4)
    assert found.dtype == torch.float32
    assert relative(found, wide) < 0.1


def test_at_full_size_parameters_are_those_of_openpi():
    counts = {"pi0": 0, "pi05": 0}
    for size in counts:
        with torch.device("meta"):
            policy = Pi0(config_of(size))
        counts[size] = sum(p.numel() for p in policy.parameters())
    # Those of openpi's classes, without the expert's head, which nothing reads.
    assert counts == {"pi0": 3_238_048_528, "pi05": 3_353_433_872}


@pytest.mark.parametrize("kind", BOTH)
def test_weights_come_back_under_openpis_names(kind: str, tmp_path):
    policy = small_policy(kind)
    write_weights(tmp_path, policy)
    found = read_weights(tmp_path)
    assert found.config == policy.config
    for name, value in policy.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value)
    opened = tpuport.open_checkpoint(tmp_path / "model.safetensors")
    head = "paligemma_with_expert.paligemma.lm_head.weight"
    assert head in opened
    assert "paligemma_with_expert.gemma_expert.lm_head.weight" in opened
    assert set(opened) == set(upstream_names(policy))
    assert any(".vision_tower.vision_model.encoder.layers.0.self_attn.q_proj" in n for n in opened)


def test_random_weights_train_and_files_that_do_not_fit_are_named(tmp_path):
    policy = random_weights(SMALL, seed=3)
    norms = [v for n, v in policy.named_parameters() if "layers.0.input_layernorm.weight" in n]
    assert len(norms) == 2
    assert all(value.abs().max() == 0 for value in norms)
    with pytest.raises(UsageError, match=r"config\.json does not hold the sizes"):
        read_config(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"expert\.depth=2 and language\.depth=3"):
        Config(language=Transformer(8, 3, 8), expert=Transformer(8, 2, 8))
    with pytest.raises(UsageError, match="size='huge': expected one of pi0"):
        config_of("huge")
    write_weights(tmp_path, policy)
    Config(**{**vars(SMALL), "action_dim": 5}).save(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="action_in_proj"):
        read_weights(tmp_path)
