"""Quantized models: eager PyTorch of the frozen module is the judge, and plain numpy of errors."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.quantization import QuantizationScheme, Statistics, calibrate
from tpuport.quantization.freeze import freeze, freeze_layer
from tpuport.quantization.product import pack, unpack
from tpuport.quantization.rounding import round_weight

F = torch.nn.functional


class Block(torch.nn.Module):
    """Two linear layers with a residual, and one layer that must stay as it is."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.up = torch.nn.Linear(size, 2 * size)
        self.down = torch.nn.Linear(2 * size, size, bias=False)
        self.unused = torch.nn.Linear(size, size)
        self.conv = torch.nn.Conv1d(size, size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(F.gelu(self.up(x)))
        return self.conv(y.mT).mT


def model_and_batches(count: int = 3) -> tuple[Block, list[torch.Tensor]]:
    torch.manual_seed(0)
    # Later batches are larger, so that the first alone gives other scales.
    return Block(), [torch.randn(2, 5, 64) * (i + 1) for i in range(count)]


def scheme(name: str = "w8a8", **fields) -> QuantizationScheme:
    return QuantizationScheme(int(name[1]), int(name[3:]), **fields)


SCHEMES = [
    *(scheme(name) for name in ("w8a8", "w4a8", "w4a16", "w8a16")),
    scheme("w8a8", number="float8"),
    scheme("w8a16", number="float8", method="hadamard"),
    scheme("w8a8", number="float8", activations="tensor"),
    scheme("w4a8", group=32, symmetric=False, activation_symmetric=False),
    scheme("w8a8", activations="tensor", estimator="mse", method="hadamard"),
    scheme("w8a8", activations="tensor", estimator="percentile", symmetric=False),
    scheme("w8a8", activations="tensor", method="smooth"),
    scheme("w4a8", activations="channel", estimator="percentile", method="duquant", clip="mse",
           rotate_outputs=True),
    scheme("w4a8", method="duquant", basis="greedy", rotation_steps=8, activation_symmetric=False),
]  # fmt: skip


def deviation(want: list[np.ndarray], got: list[np.ndarray]) -> float:
    a, b = (np.concatenate([x.ravel() for x in one]).astype(np.float64) for one in (want, got))
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


@pytest.mark.parametrize("one", SCHEMES, ids=lambda s: f"{s.name}-{s.method}-{s.activations}")
def test_the_reports_errors_are_what_is_measured(one: QuantizationScheme):
    model, batches = model_and_batches()
    quantized = tpuport.quantize(model, one, calibration=batches)
    report = quantized.quantization
    with torch.no_grad():
        want = [model(x).numpy() for x in batches]
        got = [tpuport.to_numpy(quantized(x)) for x in batches]
    assert report.outputs is not None
    assert report.outputs.relative == pytest.approx(deviation(want, got), rel=1e-2)
    limit = 0.05 if one.number == "float8" else 0.02
    assert 0 < report.outputs.relative < (limit if one.weight_bits == 8 else 0.2)
    layers = {layer.name: layer for layer in report.layers}
    frozen = dict(quantized.module.named_modules())
    with torch.no_grad():
        inner = [F.gelu(model.up(x)) for x in batches]
        pairs = [(model.down(x).numpy(), frozen["down"](x).numpy()) for x in inner]
    measured = deviation(*map(list, zip(*pairs, strict=True)))
    assert layers["down"].deviation is not None
    assert layers["down"].deviation.relative == pytest.approx(measured, rel=1e-2)
    if (one.weight_bits, one.activation_bits, one.method, one.symmetric) == (8, 8, "round", True):
        assert layers["conv"].shape == (64, 64, 1)
    else:
        assert "convolutions" in report.kept["conv"]
    assert ("no batch" in report.kept.get("unused", "")) == one.is_calibrated


@pytest.mark.parametrize("one", SCHEMES, ids=lambda s: f"{s.name}-{s.method}-{s.activations}")
def test_errors_do_not_depend_on_the_unit_of_inputs_and_weights(one: QuantizationScheme):
    errors = []
    for unit in (1.0, 1e-7):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 32, bias=False), torch.nn.Conv1d(6, 4, 3, bias=False)
        )
        for parameter in model.parameters():
            parameter.data *= unit
        x = (torch.randn(2, 6, 64) + 0.3) * unit
        # A row of equal numbers has no range.
        x[0, 0] = unit
        keep = ["1"] if one.method != "round" else []
        frozen = freeze(model, one, calibrate(model, one, [x], keep=keep), keep)[1]
        found = {}
        with torch.no_grad():
            for name, layer in frozen.items():
                given = x if name == "0" else model[0](x)
                want = model.get_submodule(name)(given)
                found[name] = deviation([want.numpy()], [layer(given).numpy()])
        errors.append(found)
    # Steps are not scaled to the bit, so some codes round otherwise; the fault was a factor of 40.
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    assert errors[0]["0"] < 0.2


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_keeps_all_codes(bits: int):
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).view(1, 1, -1)
    packed = pack(codes, bits)
    assert packed.nbytes == codes.numel() * bits // 8
    assert torch.equal(unpack(packed, bits), codes.to(torch.int8))


def test_products_are_of_integers_and_no_weight_is_unpacked_whole():
    model, batches = model_and_batches(1)
    quantized = tpuport.quantize(model, "w4a8")
    text = str(
        jax.make_jaxpr(lambda x: quantized.apply(quantized.params, quantized.buffers, None, x))(
            batches[0].numpy()
        )
    )
    assert text.count("preferred_element_type=int32") == 4  # two halves of two layers
    assert "f32[128,64]" not in text
    assert "f32[64,128]" not in text


def test_calibration_is_the_same_in_any_number_of_processes(tmp_path: Path):
    model, batches = model_and_batches(4)
    one = scheme("w8a8", activations="tensor", estimator="mse")
    whole = calibrate(model, one, batches)
    parts = [calibrate(model, one, batches[:1]), calibrate(model, one, batches[1:])]
    parts[1].save(tmp_path / "second.safetensors")
    merged = Statistics.load(tmp_path / "second.safetensors").merge(parts[0])
    scales = [freeze(model, one, found)[1]["up"].input_scale for found in (whole, merged, parts[0])]
    assert torch.equal(scales[0], scales[1])
    assert not torch.allclose(scales[0], scales[2], rtol=0.1)


def test_freezing_twice_gives_equal_layers_and_changes_no_model():
    model, batches = model_and_batches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = scheme("w4a8", method="duquant", basis="greedy", rotation_steps=8)
    found = calibrate(model, one, batches)
    made = [freeze(model, one, found)[0] for _ in range(2)]
    first, second = (m.state_dict() for m in made)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    # No buffer is None: it would be in no file.
    assert all(b is not None for m in made[0].modules() for b in m._buffers.values())


def test_serving_writes_no_state():
    model, batches = model_and_batches()
    quantized = tpuport.quantize(model, "w8a8")
    before = dict(quantized.buffers)
    for x in batches:
        quantized(x)
    assert all(quantized.buffers[name] is value for name, value in before.items())


def test_duquant_spreads_planted_outliers():
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 128, bias=False)
    x = torch.randn(256, 128)
    x[:, 7] *= 100
    errors = {}
    for method in ("round", "duquant"):
        one = scheme("w4a8", method=method, activations="tensor")
        found = calibrate(torch.nn.Sequential(layer), one, [x]).layers["0"]
        frozen = freeze_layer(layer, one, found)
        exact = frozen.inputs(x)
        step = frozen.input_scale
        errors[method] = float(((torch.round(exact / step) * step - exact) ** 2).mean() ** 0.5)
    # A block of 16 spreads one outlier's peak by at most sqrt(16) = 4.
    assert 1.5 < errors["round"] / errors["duquant"] < 4.5


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weights_error_is_at_most_half_a_step(symmetric: bool):
    torch.manual_seed(0)
    weight = torch.randn(8, 64) + 0.5
    codes = round_weight(weight, scheme("w4a16", group=32, symmetric=symmetric))
    error = (codes.weight() - weight).abs().unflatten(1, (2, 32)).amax(-1)
    assert torch.all(error <= codes.scale.t() * (0.5 if symmetric else 1.0) + 1e-6)


@pytest.mark.parametrize("inputs", [{"activation_bits": 16}, {"activations": "tensor"}])
@pytest.mark.parametrize("field", [{"activation_symmetric": False}, {"activation_clip": 0.9}])
def test_fields_that_would_change_nothing_are_refused(inputs: dict, field: dict):
    with pytest.raises(UsageError, match="rounded by token"):
        QuantizationScheme(**inputs, **field)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheme": "w3a8"}, "scheme is 'w8a8'"),
        ({"scheme": scheme(activations="tensor")}, "needs calibration"),
        ({"scheme": scheme(activations="tensor"), "calibration": []}, "no batches"),
        ({"calibration": torch.zeros(2, 5, 64)}, "write calibration="),
        ({"keep": ["nothing"]}, "matches no module with weights"),
        ({"keep": ["*"]}, "no layer can be quantized"),
    ],
)
def test_wrong_calls_are_refused(given: dict, message: str):
    with pytest.raises(UsageError, match=message):
        tpuport.quantize(Block(), **given)


def test_code_that_reads_a_weight_is_told_what_to_do():
    class Reads(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.up.weight)

    quantized = tpuport.quantize(Reads(), "w8a16")
    stands_in: Any = quantized.to_torch().get_submodule("up").weight
    assert (stands_in.dtype, tuple(stands_in.shape)) == (torch.float32, (128, 64))
    with pytest.raises(UsageError, match="name the layer in keep="):
        quantized(torch.zeros(1, 64))


def spec_of(model: tpuport.PortedModel, name: str) -> list[str | None]:
    value = model.buffers[name]
    found = list(value.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
    return found + [None] * (value.ndim - len(found))


@pytest.mark.parametrize("preset", ["fsdp", "tensor_parallel"])
def test_all_stages_on_eight_devices_equal_one(preset: str, tmp_path: Path):
    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)
            self.norm = torch.nn.LayerNorm(128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.down(F.gelu(self.up(x))))

    torch.manual_seed(0)
    model, batches = Large(), [torch.randn(8, 5, 128) * (i + 1) for i in range(2)]
    one = scheme("w4a8", group=32, activations="tensor")
    alone = tpuport.quantize(model, one, calibration=batches)
    ported = tpuport.convert(model, verify=False)
    tpuport.shard(ported, {"fsdp": 4, "tensor": 2}, preset)
    spread = tpuport.quantize(ported, one, calibration=batches)
    tensor = preset == "tensor_parallel"
    assert spec_of(spread, "up.codes") == [None, "tensor" if tensor else "fsdp", None]
    assert spec_of(spread, "down.codes") == (
        ["tensor", None, None] if tensor else [None, "fsdp", None]
    )
    assert spec_of(spread, "down.scale") == ["tensor" if tensor else None, None]
    for name, value in alone.buffers.items():
        assert np.allclose(value, spread.buffers[name], rtol=1e-5, atol=1e-7), name
    want = tpuport.to_torch(alone(batches[0]))
    assert torch.allclose(tpuport.to_torch(spread(batches[0])), want, rtol=0, atol=1e-4)
    tpuport.save_checkpoint(tmp_path / "spread.safetensors", spread)
    served = tpuport.quantize(ported, checkpoint=tmp_path / "spread.safetensors")
    assert spec_of(served, "up.codes") == spec_of(spread, "up.codes")
    assert torch.allclose(tpuport.to_torch(served(batches[0])), want, rtol=0, atol=1e-4)


def test_a_ported_model_can_be_quantized():
    model, batches = model_and_batches(1)
    ported = tpuport.quantize(tpuport.convert(model), "w8a16")
    with torch.no_grad():
        want = model(batches[0])
    assert (tpuport.to_torch(ported(batches[0])) - want).abs().max() < 0.02 * want.abs().max()
