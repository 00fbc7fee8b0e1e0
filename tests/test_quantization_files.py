"""Quantized models in files: tpuport's own, and those of other tools, packed here by definition."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tpuport
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.quantization import QuantizationScheme

F = torch.nn.functional
SCHEMES = {
    "w8a8": QuantizationScheme(8, 8, activations="tensor", method="smooth"),
    "w4a16": QuantizationScheme(4, 16, group=32, symmetric=False),
    "svd": QuantizationScheme(4, 8, method="duquant", rotate_outputs=True),
    "greedy": QuantizationScheme(
        4, 8, method="duquant", basis="greedy", rotation_steps=4, activation_symmetric=False
    ),
}


class Small(torch.nn.Module):
    """Two linear layers, one of them without a bias, and a norm in float."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128)
        self.norm = torch.nn.LayerNorm(128)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


def meta() -> Small:
    with torch.device("meta"):
        return Small()


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 64)


@pytest.mark.parametrize("name", SCHEMES)
def test_saved_and_loaded_without_float_weights_a_model_is_the_same(name: str, tmp_path: Path):
    torch.manual_seed(0)
    made = tpuport.quantize(Small(), SCHEMES[name], calibration=[batch()])
    target = tmp_path if name == "svd" else tmp_path / "model.safetensors"
    tpuport.save_checkpoint(target, made)
    loaded = tpuport.quantize(meta(), checkpoint=target)
    assert torch.equal(tpuport.to_torch(loaded(batch())), tpuport.to_torch(made(batch())))
    assert loaded.quantization == made.quantization
    values = {**loaded.params, **loaded.buffers}
    assert "up.weight" not in values
    assert values.keys() == {**made.params, **made.buffers}.keys()


def packed(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack unsigned codes into int32 along a dim, the first in the lowest bits."""
    each = 32 // bits
    parts = codes.long().movedim(dim, -1).unflatten(-1, (-1, each))
    words = sum(parts[..., i] << (bits * i) for i in range(each))
    return torch.as_tensor(words).to(torch.int32).movedim(-1, dim).contiguous()


class Parts:
    """Random codes of a layer `[out, in]`, and the weight that they stand for."""

    def __init__(self, layer: torch.nn.Linear, bits: int, group: int, *, zeros: bool) -> None:
        rows, columns = layer.out_features, layer.in_features
        groups = columns // group
        self.codes = torch.randint(0, 2**bits, (rows, columns))
        self.scale = torch.rand(rows, groups) * 0.02 + 0.01
        middle = 2 ** (bits - 1)
        drawn = torch.randint(1, 2**bits, (rows, groups))
        self.zero = drawn if zeros else torch.full((rows, groups), middle)
        self.index = torch.arange(columns) // group

    def weight(self) -> torch.Tensor:
        return (self.codes - self.zero[:, self.index]) * self.scale[:, self.index]


def gptq(bits: int, version: str, *, shuffled: bool, zeros: bool = True) -> Any:
    def write(name: str, layer: torch.nn.Linear) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts = Parts(layer, bits, 32, zeros=zeros)
        if shuffled:
            parts.index = parts.index[torch.randperm(len(parts.index))]
        stored = parts.zero - (1 if version == "gptq" else 0)
        tensors = {
            "qweight": packed(parts.codes.t(), bits, 0),
            "qzeros": packed(stored.t(), bits, 1),
            "scales": parts.scale.t().contiguous(),
            "g_idx": parts.index.to(torch.int32),
        }
        if layer.bias is None:
            tensors["bias"] = torch.zeros(layer.out_features)
        return {f"{name}.{key}": value for key, value in tensors.items()}, parts.weight()

    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    return write, config


def awq() -> Any:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def columns(codes: torch.Tensor) -> torch.Tensor:
        return packed(codes.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1)

    def write(name: str, layer: torch.nn.Linear) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts = Parts(layer, 4, 32, zeros=True)
        tensors = {
            "qweight": columns(parts.codes.t()),
            "qzeros": columns(parts.zero.t()),
            "scales": parts.scale.t().contiguous(),
        }
        return {f"{name}.{key}": value for key, value in tensors.items()}, parts.weight()

    return write, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def compressed_float(**inputs: Any) -> Any:
    """Return a writer of compressed-tensors with weights of float8, and inputs if they are said."""

    def write(name: str, layer: torch.nn.Linear) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes = (torch.randn(layer.weight.shape) * 100).to(torch.float8_e4m3fn)
        scale = torch.rand(layer.out_features, 1) * 0.001 + 0.001
        tensors = {"weight": codes, "weight_scale": scale}
        return {f"{name}.{key}": value for key, value in tensors.items()}, codes.float() * scale

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    said = {"num_bits": 8, "type": "float", "symmetric": True, **inputs} if inputs else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": said}}
    return write, {"quant_method": "compressed-tensors", "config_groups": groups}


def compressed(bits: int, *, zeros: bool = False, **inputs: Any) -> Any:
    """Return a writer of compressed-tensors: int4 packed by groups, int8 plain by channel."""
    group = 32 if bits == 4 else None

    def write(name: str, layer: torch.nn.Linear) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts = Parts(layer, bits, group or layer.in_features, zeros=zeros)
        tensors = {"weight_scale": parts.scale}
        if bits == 4:
            tensors["weight_packed"] = packed(parts.codes, 4, 1)
            tensors["weight_shape"] = torch.tensor(parts.codes.shape)
            if zeros:
                tensors["weight_zero_point"] = packed(parts.zero, 4, 0)
        else:
            tensors["weight"] = (parts.codes - 128).to(torch.int8)
        if inputs and not inputs["dynamic"]:
            tensors["input_scale"] = torch.tensor([0.03])
        return {f"{name}.{key}": value for key, value in tensors.items()}, parts.weight()

    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "group_size": group}
    weights["strategy"] = "group" if group else "channel"
    said = {"num_bits": 8, "type": "int", "symmetric": True, **inputs} if inputs else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": said}}
    return write, {"quant_method": "compressed-tensors", "config_groups": groups}


FORMATS: dict[str, Any] = {
    "gptq": gptq(4, "gptq", shuffled=False),
    "gptq-symmetric": gptq(4, "gptq", shuffled=False, zeros=False),
    "gptq-shuffled": gptq(4, "gptq_v2", shuffled=True),
    "gptq-8": gptq(8, "gptq_v2", shuffled=False),
    "awq": awq(),
    "w4a16": compressed(4),
    "w4a16-zeros": compressed(4, zeros=True),
    "w4a8": compressed(4, dynamic=True, strategy="token"),
    "w8a8": compressed(8, dynamic=True, strategy="token"),
    "fp8a16": compressed_float(),
    "fp8a8": compressed_float(dynamic=True, strategy="token"),
    "w8a8-static": compressed(8, dynamic=False, strategy="tensor"),
}


def written(name: str, folder: Path) -> Small:
    """Write a checkpoint of a format, and return the float model that it stands for."""
    torch.manual_seed(0)
    write, config = FORMATS[name]
    model = Small()
    tensors = {key: value for key, value in model.state_dict().items() if "weight" not in key}
    tensors["norm.weight"] = model.norm.weight.detach()
    for key in ("up", "down"):
        layer = model.get_submodule(key)
        assert isinstance(layer, torch.nn.Linear)
        found, weight = write(key, layer)
        tensors |= found
        layer.weight.data = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return model


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """Round a layer's input as compressed-tensors defines it."""
    if "a8" not in name:
        return x
    peaks = x.abs().amax(-1, keepdim=True)
    if name == "fp8a8":
        return (x / (peaks / 448)).to(torch.float8_e4m3fn).float() * (peaks / 448)
    step = torch.tensor(0.03) if name == "w8a8-static" else peaks / 127.5
    return torch.clamp(torch.round(x / step), -128, 127) * step


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_of_other_tools_compute_as_their_format_defines(name: str, tmp_path: Path):
    model = written(name, tmp_path)
    loaded = tpuport.quantize(meta(), checkpoint=tmp_path)
    loaded(batch())
    got = tpuport.to_torch(loaded(batch()))
    with torch.no_grad():
        inner = model.norm(model.up(rounded(batch(), name)))
        want = model.down(rounded(inner, name))
    # A value between two codes may be rounded to either.
    tolerance = 2e-2 if "a8" in name else 1e-5
    assert (got - want).abs().max() <= tolerance * want.abs().max()
    assert loaded.quantization.kept == {}
    # What was read can be saved in tpuport's layout.
    tpuport.save_checkpoint(tmp_path / "own.safetensors", loaded)
    again = tpuport.quantize(meta(), checkpoint=tmp_path / "own.safetensors")
    assert torch.equal(tpuport.to_torch(again(batch())), got)


def test_eager_the_largest_input_of_a_row_has_the_code_that_the_format_gives_it(tmp_path: Path):
    """It is 127.5 steps, between two codes; XLA divides by a product with the inverse."""
    model = written("w8a8", tmp_path)
    layer = tpuport.quantize(meta(), checkpoint=tmp_path).to_torch().get_submodule("up")
    rows = torch.randn(64, 64)
    want = model.up(rounded(rows, "w8a8"))
    assert (layer(rows) - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_buffer_that_is_none_is_not_saved(tmp_path):
    quantized = tpuport.quantize(Small(), "w8a8")
    quantized._module.get_submodule("up")._buffers["scale"] = None
    with pytest.raises(CheckpointError, match=r"up\.scale of the quantized model is None"):
        tpuport.save_checkpoint(tmp_path / "model.safetensors", quantized)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is absent"
)
@pytest.mark.parametrize("name", ["w4a16", "w4a16-zeros"])
def test_packing_here_is_that_of_compressed_tensors(name: str, tmp_path: Path):
    helpers = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")
    written(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shape = torch.Size(tensors["up.weight_shape"].tolist())
    codes = helpers.unpack_from_int32(tensors["up.weight_packed"], 4, shape)
    assert torch.equal(helpers.pack_to_int32(codes, 4), tensors["up.weight_packed"])
    torch.manual_seed(0)
    Small()
    want = Parts(meta().up, 4, 32, zeros="zeros" in name)
    assert torch.equal(codes.long(), want.codes - 8)
    if "zeros" in name:
        stored = tensors["up.weight_zero_point"]
        zero = helpers.unpack_from_int32(stored, 4, torch.Size(want.zero.shape), packed_dim=0)
        assert torch.equal(zero.long(), want.zero - 8)


def changed(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(fields)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gptq", {"bits": 3}, "'down' in .* has weights of 3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "the checkpoint_format 'marlin'"),
        ("gptq", {"group_size": 64}, "groups of 128 input features, and a group of 64"),
        ("awq", {"group_size": 48}, "groups of 128 input features, and a group of 48"),
        ("gptq", {"bits": 8}, "codes that are not of 8 bits"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("w4a16", {"kv_cache_scheme": {"num_bits": 8}}, "a kv_cache_scheme"),
        ("w4a16", {"config_groups": {}}, "0 groups of the configuration"),
        ("w4a16", {"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'; tpuport reads"),
    ],
)
def test_what_no_layer_has_is_refused(name: str, fields: dict, message: str, tmp_path: Path):
    written(name, tmp_path)
    changed(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=message):
        tpuport.quantize(meta(), checkpoint=tmp_path)


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path):
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    tpuport.save_checkpoint(path, tpuport.quantize(Small(), "w4a16"))
    with pytest.raises(
        CheckpointError, match=r"layer 'up' \(linear\), and the model has no such module"
    ):
        tpuport.quantize(torch.nn.Sequential(torch.nn.Linear(64, 64)), checkpoint=path)
    other = meta()
    other.up = torch.nn.Linear(32, 128, device="meta")
    with pytest.raises(CheckpointError, match=r"64 input features in .*, and 128 and 32"):
        tpuport.quantize(other, checkpoint=path)
    with pytest.raises(UsageError, match="leave scheme=, calibration="):
        tpuport.quantize(meta(), "w8a8", checkpoint=path)
    tpuport.save_checkpoint(path, tpuport.convert(Small()))
    with pytest.raises(CheckpointError, match="says nothing about quantization"):
        tpuport.quantize(meta(), checkpoint=path)


def test_weights_that_are_no_codes_are_refused(tmp_path: Path):
    written("w8a8", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["up.weight"] = tensors["up.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'up' in .* has a weight of torch.float32"):
        tpuport.quantize(meta(), checkpoint=tmp_path)
    written("gptq-shuffled", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["up.g_idx"][0] = (tensors["up.g_idx"][0] + 1) % 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'up' in .* has groups of several sizes"):
        tpuport.quantize(meta(), checkpoint=tmp_path)
