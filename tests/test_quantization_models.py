"""Every scheme and method on a Llama, a ViT and a DiT: errors of the report are measured again."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

import tpuport
from tpuport.quantization import QuantizationScheme

Scheme = QuantizationScheme
SCHEMES = {
    "w8a8": Scheme(8, 8),
    "w4a8": Scheme(4, 8),
    "w4a16": Scheme(4, 16, group=32),
    "w8a16": Scheme(8, 16),
    "fp8": Scheme(8, 8, number="float8"),
    "smooth": Scheme(8, 8, method="smooth", activations="tensor"),
    "hadamard": Scheme(4, 8, method="hadamard", symmetric=False),
    "duquant-svd": Scheme(4, 8, method="duquant", rotate_outputs=True),
    "duquant-greedy": Scheme(4, 8, method="duquant", basis="greedy", rotation_steps=16),
    "gptq": Scheme(4, 16, group=32, method="gptq"),
    "awq": Scheme(4, 16, group=32, method="awq"),
}


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(0, 64, (2, 12)), "use_cache": torch.tensor(False)}
    return LlamaForCausalLM(config), {**batch, "use_cache": False}  # pyright: ignore


def vit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        image_size=16, patch_size=4,
    )  # fmt: skip
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def dit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=1, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    batch = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }
    return model, batch


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
    "llama": llama, "vit": vit, "dit": dit,
}  # fmt: skip
FAST = {("llama", "duquant-greedy"), ("vit", "w8a8"), ("dit", "gptq")}


@functools.cache
def model_and_batch(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    for one in model.parameters():
        # Freshly made norms and gates of zeros would hide what layers do.
        torch.nn.init.normal_(one, std=0.2 if one.dim() > 1 else 0.5)
    return model.eval(), batch


def first_of(output: Any) -> torch.Tensor:
    return next(iter(output.values())) if hasattr(output, "values") else output[0]


def differing(want: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Return the relative error and the cosine."""
    a, b = (x.double().flatten().numpy() for x in (want, got))
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.linalg.norm(b - a) / np.linalg.norm(a)), float(a @ b / norms)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param(name, scheme, marks=[] if (name, scheme) in FAST else [pytest.mark.slow])
        for name in MODELS
        for scheme in SCHEMES
    ],
)
def test_the_reports_errors_are_measured_again(name: str, scheme: str):
    model, batch = model_and_batch(name)
    made = tpuport.quantize(model, SCHEMES[scheme], calibration=[batch])
    report, frozen = made.quantization, made.to_torch().eval()
    layers = {one.name: one for one in report.layers}
    assert len(layers) >= 5
    inputs: dict[str, torch.Tensor] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(_: Any, args: Any) -> None:
            inputs[name] = args[0].detach()

        return note

    hooks = [model.get_submodule(one).register_forward_pre_hook(noting(one)) for one in layers]
    with torch.no_grad():
        want, got = first_of(model(**batch)), first_of(frozen(**batch))
        for hook in hooks:
            hook.remove()
        for one, layer in layers.items():
            float_layer, served = model.get_submodule(one), frozen.get_submodule(one)
            error, cosine = differing(float_layer(inputs[one]), served(inputs[one]))
            assert layer.deviation is not None
            # A value between two codes may be rounded to either.
            assert layer.deviation.relative == pytest.approx(error, rel=2e-2), one
            assert layer.deviation.cosine == pytest.approx(cosine, abs=1e-3), one
    error, _ = differing(want, got)
    assert report.outputs is not None
    # Outputs are all floats of the result, of which the first is most.
    assert report.outputs.relative == pytest.approx(error, rel=0.1)
    ours = first_of(tpuport.to_torch(made(**batch)))
    assert differing(got, ours)[0] < 2e-2


def test_with_planted_outliers_duquant_is_better_than_rounding():
    torch.manual_seed(0)
    model, batch = llama()
    block: Any = model.get_submodule("model.layers.0")
    # A channel that is large in the inputs and in the weight takes most codes of both.
    block.input_layernorm.weight.data[5] = 8.0
    block.self_attn.q_proj.weight.data[:, 5] *= 8.0
    found = {}
    for name in ("w4a8", "duquant-greedy"):
        keep = ["**.v_proj", "**.k_proj", "**.o_proj", "**.mlp.*", "lm_head"]
        made = tpuport.quantize(model.eval(), SCHEMES[name], calibration=[batch], keep=keep)
        (found[name],) = made.quantization.layers
    plain, spread = found["w4a8"], found["duquant-greedy"]
    # A rotation of 16 channels leaves a fourth of the peak, which is below that of the others: the
    # step of weights falls by up to two, and the error with it.
    assert plain.outliers[0] / spread.outliers[1] > 1.5
    assert spread.deviation.relative < 0.7 * plain.deviation.relative
