"""Quantized models written for other tools, read by tpuport and by those tools' own code.

compressed-tensors, auto-gptq and autoawq are asked where they are installed.
"""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tpuport
from tests.test_quantization_files import FORMATS, batch, meta, written
from tpuport.foundation.errors import UsageError
from tpuport.quantization import QuantizationScheme, save_published
from tpuport.quantization.layer import QuantizedLinear
from tpuport.quantization.product import unpack
from tpuport.quantization.transforms import Permute

Scheme = QuantizationScheme
SCHEMES = {
    "w4a16": Scheme(4, 16, group=32),
    "w4a16-zeros": Scheme(4, 16, group=32, symmetric=False),
    "gptq": Scheme(4, 16, group=32, method="gptq", symmetric=False),
    "w4a16-channel": Scheme(4, 16),
    "w8a16": Scheme(8, 16, group=64),
    "w8a8": Scheme(8, 8, activation_clip=127 / 127.5),
    "w8a8-zeros": Scheme(8, 8, activation_clip=127 / 127.5, symmetric=False),
    "w8a8-static": Scheme(8, 8, activations="tensor"),
    "w4a8": Scheme(4, 8, group=32, activation_clip=127 / 127.5),
    "fp8": Scheme(8, 8, number="float8"),
    "fp8a16": Scheme(8, 16, number="float8"),
}
CASES = [
    *[("compressed-tensors", name) for name in SCHEMES],
    *[("gptq", name) for name in ("w4a16", "w4a16-zeros", "gptq", "w4a16-channel", "w8a16")],
    *[("awq", name) for name in ("w4a16", "w4a16-zeros", "gptq", "w4a16-channel")],
]


class Model(torch.nn.Module):
    """Layers with and without a bias, one that stays in float, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128)
        self.norm = torch.nn.LayerNorm(128)
        self.down = torch.nn.Linear(128, 64, bias=False)
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(x))))


def empty() -> Model:
    with torch.device("meta"):
        return Model()


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = Model()
    # A range on one side of zero has its zero point at an end.
    model.up.weight.data[3] = model.up.weight.data[3].abs()
    return tpuport.quantize(model, SCHEMES[name], calibration=[batch()], keep=["head"])


def weight_of(layer: QuantizedLinear) -> torch.Tensor:
    """Return the weight that a layer's codes stand for, in the order of its input."""
    codes = unpack(layer.codes, layer.scheme.weight_bits).float()
    if "offset" in layer._buffers:
        codes = codes - torch.round(layer.offset / layer.scale)[..., None]
    weight = (codes * layer.scale[..., None]).transpose(0, 1).flatten(1)
    for one in layer.inputs:
        assert isinstance(one, Permute)
        weight = weight[:, one.order.long().argsort()]
    return weight


def weights(model: Any) -> dict[str, torch.Tensor]:
    layers = model.to_torch().named_modules()
    return {name: weight_of(one) for name, one in layers if isinstance(one, QuantizedLinear)}


@pytest.mark.parametrize(("format", "name"), CASES)
def test_what_is_written_is_read_as_the_same_weights(format: Any, name: str, tmp_path: Path):
    one = made(name)
    save_published(tmp_path / "out", one, format)
    again = tpuport.quantize(empty(), checkpoint=tmp_path / "out")
    want, got = weights(one), weights(again)
    assert want.keys() == got.keys() == {"up", "down"}
    for layer, weight in want.items():
        assert torch.equal(got[layer], weight), layer
    assert torch.equal(tpuport.to_torch(again(batch())), tpuport.to_torch(one(batch())))


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith(("gptq", "awq"))])
@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors"])
def test_what_was_read_is_written_in_each_format_that_has_it(
    name: str, format: Any, tmp_path: Path
):
    written(name, tmp_path)
    one = tpuport.quantize(meta(), checkpoint=tmp_path)
    if format != "gptq" and name == "gptq-shuffled":
        with pytest.raises(
            UsageError, match=r"'up' has groups of .* no neighbours, which"
        ) as raised:
            save_published(tmp_path / "out", one, format)
        assert 'write format="gptq"' in str(raised.value)
        return
    if (format, name) == ("awq", "gptq-8"):
        with pytest.raises(UsageError, match="weights of 8 bits, which awq has no place for"):
            save_published(tmp_path / "out", one, format)
        return
    save_published(tmp_path / "out", one, format)
    again = tpuport.quantize(meta(), checkpoint=tmp_path / "out")
    want, got = weights(one), weights(again)
    assert all(torch.equal(got[layer], weight) for layer, weight in want.items())
    if (format, name) != ("gptq", "gptq-shuffled") and format == name:
        old, new = (load_file(at / "model.safetensors") for at in (tmp_path, tmp_path / "out"))
        assert all(torch.equal(new[key], old[key]) for key in new)


REFUSED = [
    ("hadamard", Scheme(4, 16, method="hadamard"), "compressed-tensors", "inputs that are rotated"),
    ("smooth", Scheme(8, 8, method="smooth"), "compressed-tensors", "divided by factors"),
    ("svd", Scheme(4, 8, method="duquant"), "compressed-tensors", "two transforms"),
    (
        "outputs", Scheme(4, 8, method="duquant", rotate_outputs=True), "compressed-tensors",
        "outputs that are rotated back",
    ),
    ("clip", Scheme(8, 8), "compressed-tensors", r"largest value over 127.5.*\n.*127 / 127.5"),
    ("channel", Scheme(8, 8, activations="channel"), "compressed-tensors", "scales by input chan"),
    ("zeros", Scheme(8, 8, activation_symmetric=False), "compressed-tensors", "zero points of inp"),
    ("gptq", Scheme(4, 8), "gptq", r"rounded inputs, which gptq.*\n.*compressed-tensors"),
    ("awq", Scheme(8, 16, number="float8"), "awq", "weights of float8"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "format", "message"), [r[1:] for r in REFUSED], ids=[
    r[0] for r in REFUSED
])  # fmt: skip
def test_what_a_format_has_no_place_for_is_refused(
    scheme: Scheme, format: Any, message: str, tmp_path: Path
):
    torch.manual_seed(0)
    one = tpuport.quantize(Model(), scheme, calibration=[batch()], keep=["head"])
    with pytest.raises(UsageError, match=rf"'up' has .*{message}"):
        save_published(tmp_path / "out", one, format)
    assert not (tmp_path / "out").exists()


def test_other_arguments_that_do_not_fit_are_refused(tmp_path: Path):
    one = made("w4a16")
    with pytest.raises(UsageError, match="format is one of 'compressed-tensors', 'gptq', 'awq'"):
        save_published(tmp_path, one, "gguf")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="the model has no quantized layer"):
        save_published(tmp_path, tpuport.convert(Model()))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; compressed-tensors is a directory"):
        save_published(tmp_path / "file", one)
    torch.manual_seed(0)
    seven = torch.nn.Sequential(torch.nn.Linear(64, 63), torch.nn.Linear(63, 64))
    mixed = tpuport.quantize(seven, "w8a16")
    with pytest.raises(UsageError, match="'0' has 63 output features, no multiple of 4, which"):
        save_published(tmp_path / "out", mixed, "gptq")


def test_a_directory_keeps_its_other_files_and_its_configuration(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    save_published(tmp_path, made("w4a16"), max_shard_size=6000)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert config["quantization_config"]["ignore"] == ["head"]
    names = {file.name for file in tmp_path.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    again = tpuport.quantize(empty(), checkpoint=tmp_path)
    assert set(weights(again)) == {"up", "down"}


def test_schemes_that_differ_by_layer_are_groups_of_compressed_tensors(tmp_path: Path):
    torch.manual_seed(0)
    low = tpuport.quantize(Model(), "w4a16", keep=["head", "down"])
    both = tpuport.quantize(low.to_torch(), "w8a16", keep=["head"])
    save_published(tmp_path / "out", both)
    again = tpuport.quantize(empty(), checkpoint=tmp_path / "out")
    want, got = weights(both), weights(again)
    assert want.keys() == got.keys() == {"up", "down"}
    assert all(torch.equal(got[layer], weight) for layer, weight in want.items())
    with pytest.raises(
        UsageError, match="'down' has 8 bits in groups of all columns, where 'up' has 4"
    ):
        save_published(tmp_path / "gptq", both, "gptq")


# -- the tools themselves --------------------------------------------------------------------------


def tool(package: str, file: str) -> Any:
    """Return a module of a package that may be absent, without the rest of it, which is old."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is absent")
    path = Path(found.submodule_search_locations[0], file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_reads_the_same_weights(name: str, tmp_path: Path):
    package = pytest.importorskip("compressed_tensors")
    base = importlib.import_module("compressed_tensors.compressors.base")
    one = made(name)
    save_published(tmp_path, one)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = package.quantization.QuantizationConfig(**config).config_groups["group_0"]
    tensors = load_file(tmp_path / "model.safetensors")
    compressor = base.BaseCompressor.get_value_from_registry(scheme.format)
    for layer, weight in weights(one).items():
        own = {
            key.removeprefix(f"{layer}."): value
            for key, value in tensors.items()
            if key.startswith(f"{layer}.")
        }
        got = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(got, weight), layer


def as_float(layer: QuantizedLinear) -> torch.nn.Linear:
    made = torch.nn.Linear(layer.in_features, layer.out_features, "bias" in layer._buffers)
    made.weight.data = weight_of(layer)
    return made


@pytest.mark.parametrize("name", ["w4a16", "w4a16-zeros", "w8a16"])
def test_auto_gptq_packs_the_same_integers(name: str, tmp_path: Path):
    packing = tool("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py")
    one = made(name)
    save_published(tmp_path, one, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    tensors = load_file(tmp_path / "model.safetensors")
    for key, layer in one.to_torch().named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        bits, middle = layer.scheme.weight_bits, 2 ** (layer.scheme.weight_bits - 1)
        zeros = torch.full_like(layer.scale, middle)
        if "offset" in layer._buffers:
            zeros = torch.round(layer.offset / layer.scale) + middle
        theirs = packing.QuantLinear(
            bits, layer.scheme.group, layer.in_features, layer.out_features, False,
            weight_dtype=torch.float32,
        )  # fmt: skip
        theirs.pack(as_float(layer), layer.scale.t(), zeros.t())
        assert torch.equal(tensors[f"{key}.scales"], theirs.scales)
        assert torch.equal(tensors[f"{key}.qweight"], theirs.qweight)
        assert torch.equal(tensors[f"{key}.g_idx"], theirs.g_idx)
        if config["checkpoint_format"] == "gptq":
            assert torch.equal(tensors[f"{key}.qzeros"], theirs.qzeros)


@pytest.mark.parametrize("name", ["w4a16", "w4a16-zeros"])
def test_autoawq_reads_the_same_weights(name: str, tmp_path: Path):
    packing = tool("awq", "utils/packing_utils.py")
    one = made(name)
    save_published(tmp_path, one, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, weight in weights(one).items():
        own = (tensors[f"{layer}.{key}"] for key in ("qweight", "qzeros", "scales"))
        got = packing.dequantize_gemm(*own, 4, 32)
        torch.testing.assert_close(got.t(), weight, rtol=1e-6, atol=1e-7)
