"""Convolutions and experts in integers: floats that round as they do are the judge."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock

import tpuport
from tpuport.quantization import QuantizationScheme


class Convolutions(torch.nn.Module):
    """One of each kind of convolution that is quantized, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(4, 8, 3, stride=2, padding=(1, 2))
        self.grouped = torch.nn.Conv2d(8, 8, (3, 2), groups=4, dilation=(1, 2), padding="same")
        self.line = torch.nn.Conv1d(8, 6, 4, bias=False)
        self.solid = torch.nn.Conv3d(1, 2, 2, padding=1)
        self.back = torch.nn.ConvTranspose1d(2, 3, 2)
        self.odd = torch.nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.grouped(self.first(x))).flatten(2)
        z = self.solid(self.line(y)[:, None, None])
        return self.odd(self.back(z[0].flatten(1)))


def rounded(x: torch.Tensor, dims: tuple[int, ...], number: str) -> torch.Tensor:
    """Round to int8 or float8 with one scale for all of some dims."""
    limit = 448 if number == "float8" else 127
    step = x.abs().amax(dims, keepdim=True) / limit
    if number == "float8":
        return (x / step).to(torch.float8_e4m3fn).float() * step
    return torch.clamp(torch.round(x / step), -128, 127) * step


@pytest.mark.parametrize("number", ["int", "float8"])
def test_convolutions_equal_rounded_floats(number: Any, tmp_path: Path):
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(1, 4, 12, 9)
    scheme = QuantizationScheme(8, 8, number=number)
    made = tpuport.quantize(model, scheme, calibration=[x])
    names = ["first", "grouped", "line", "solid"]
    assert [one.name for one in made.quantization.layers] == names
    assert "ConvTranspose1d" in made.quantization.kept["back"]
    assert "'circular'" in made.quantization.kept["odd"]
    fake = Convolutions()
    fake.load_state_dict(model.state_dict())
    for name in names:
        layer: Any = fake.get_submodule(name)
        layer.weight.data = rounded(layer.weight, tuple(range(1, layer.weight.dim())), number)
        layer.register_forward_pre_hook(
            lambda _, args: (rounded(args[0], tuple(range(1, args[0].dim())), number),)
        )
    with torch.no_grad():
        want, plain = fake(x), model(x)
    got = tpuport.to_torch(made(x))
    assert (got - want).abs().max() < 2e-2 * want.abs().max()
    assert (got - want).norm() < 0.3 * (got - plain).norm()
    tpuport.save_checkpoint(tmp_path / "model.safetensors", made)
    with torch.device("meta"):
        empty = Convolutions()
    loaded = tpuport.quantize(empty, checkpoint=tmp_path / "model.safetensors")
    assert torch.equal(tpuport.to_torch(loaded(x)), got)


def test_a_calibrated_scale_of_a_convolutions_input_is_its_peak():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 2))
    batches = [torch.randn(2, 3, 7), 5 * torch.randn(2, 3, 7)]
    scheme = QuantizationScheme(8, 8, activations="tensor")
    made = tpuport.quantize(model, scheme, calibration=batches)
    peak = max(float(x.abs().max()) for x in batches)
    assert float(made.buffers["0.input_scale"]) == pytest.approx(peak / 127)
    one = batches[0][0]
    assert torch.equal(tpuport.to_torch(made(one)), tpuport.to_torch(made(one[None]))[0])


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_experts_equal_rounded_floats(name: str, tmp_path: Path):
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = MixtralSparseMoeBlock(config).eval()
    for one in model.parameters():
        torch.nn.init.normal_(one, std=0.2)
    x = torch.randn(2, 5, 32)
    made = tpuport.quantize(model, name, calibration=[x])
    assert [one.name for one in made.quantization.layers] == ["experts"]
    assert "is no plain" in made.quantization.kept["gate"]
    got = tpuport.to_torch(made(x))
    fake = MixtralSparseMoeBlock(config).eval()
    fake.load_state_dict(model.state_dict())
    most = 7 if name == "w4a16" else 127
    experts: Any = fake.experts
    assert isinstance(experts, MixtralExperts)
    for weight in experts.parameters():
        step = weight.abs().amax(-1, keepdim=True) / most
        weight.data = torch.clamp(torch.round(weight / step), -most - 1, most) * step
    with torch.no_grad():
        want, plain = fake(x), model(x)
    # Inputs are rounded too in w8a8.
    tolerance = 1e-5 if name == "w4a16" else 2e-2
    assert (got - want).abs().max() < tolerance * want.abs().max()
    report = made.quantization
    measured = float((got - plain).norm() / plain.norm())
    assert report.outputs is not None
    assert report.outputs.relative == pytest.approx(measured, rel=1e-2)
    before, after = report.layers[0].bytes_before, report.layers[0].bytes_after
    assert before / after > (6 if name == "w4a16" else 3.5)
    tpuport.save_checkpoint(tmp_path / "model.safetensors", made)
    with torch.device("meta"):
        empty = MixtralSparseMoeBlock(config).eval()
    loaded = tpuport.quantize(empty, checkpoint=tmp_path / "model.safetensors")
    assert torch.equal(tpuport.to_torch(loaded(x)), got)
    tpuport.shard(loaded, {"expert": 4, "data": 2}, "expert_parallel")
    codes: Any = loaded.buffers["experts.gate_up_proj.codes"]
    assert codes.sharding.spec[0] == "expert"
    assert torch.allclose(tpuport.to_torch(loaded(x)), got, rtol=0, atol=1e-5)


def test_embeddings_stay_in_float_with_a_reason():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 16))
    made = tpuport.quantize(model, "w8a8")
    assert "looked up, not multiplied" in made.quantization.kept["0"]
