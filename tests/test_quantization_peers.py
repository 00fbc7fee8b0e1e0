"""DuQuant here against its two published programs, and against plain numpy.

Checkouts of the programs are named by TPUPORT_OPENPI_DUQUANT and TPUPORT_DUQUANT.
"""

import importlib
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import tpuport
from tpuport.quantization import QuantizationScheme, calibrate, duquant
from tpuport.quantization.freeze import freeze_layer
from tpuport.quantization.layer import QuantizedLinear
from tpuport.quantization.rounding import round_weight

FORK = os.environ.get("TPUPORT_OPENPI_DUQUANT", "")
PAPER = os.environ.get("TPUPORT_DUQUANT", "")
OF_FORK = QuantizationScheme(
    4, 8, method="duquant", activations="channel", estimator="percentile", clip="mse",
    rotate_outputs=True,
)  # fmt: skip


def example() -> tuple[torch.nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 40, 64)
    x[..., 5] *= 30
    return torch.nn.Sequential(torch.nn.Linear(64, 48)), x


@pytest.mark.skipif(not FORK, reason="TPUPORT_OPENPI_DUQUANT names no checkout")
def test_layers_equal_the_forks_untouched_module(monkeypatch, tmp_path: Path):
    # The fork's packages import jax models of its own; only these two files are needed.
    package = types.ModuleType("duquant_of_fork")
    package.__path__ = [str(Path(FORK) / "src/openpi/models_pytorch")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    theirs = importlib.import_module("duquant_of_fork.duquant_layers")
    model, x = example()
    config = theirs.DuQuantConfig(pack_dir=str(tmp_path))
    layer = theirs.DuQuantLinear(model[0], "layer", config)
    with torch.no_grad():
        layer(x)  # finds its scales in the first call
        want = layer(x * 0.9)
        quantized = tpuport.quantize(model, OF_FORK, calibration=[x])
        got = tpuport.to_torch(quantized(x * 0.9))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.skipif(not PAPER, reason="TPUPORT_DUQUANT names no checkout")
@pytest.mark.parametrize("steps", [0, 5, 40])
def test_rotations_and_codes_equal_the_papers_code(monkeypatch, steps: int):
    monkeypatch.syspath_prepend(PAPER)
    monkeypatch.setitem(sys.modules, "termcolor", types.SimpleNamespace(colored=None))
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=None))
    quantizer = importlib.import_module("quantize.quantizer")
    # Its file of rotations is made by a script for CUDA; this is the script's matrix.
    monkeypatch.setitem(sys.modules["utils"].Rot, 16, duquant._even_rotation(16))
    model, x = example()
    rows = x.flatten(0, 1)
    given = {"quant_method": "duquant", "block_size": 16, "max_rotation_step": steps}
    of_input = quantizer.UniformAffineQuantizer(8, dynamic_method="per_token", lac=0.9, **given)
    of_weight = quantizer.UniformAffineQuantizer(
        4, dynamic_method="per_channel", swc=0.8, shape=model[0].weight.shape, **given
    )
    torch.manual_seed(3)
    with torch.no_grad():
        rounded = of_input(rows)
        of_weight.copy_duquant_params(of_input)
        want = torch.nn.functional.linear(rounded, of_weight(model[0].weight), model[0].bias)
    scheme = QuantizationScheme(
        *(4, 8, None), symmetric=False, activation_symmetric=False, method="duquant",
        basis="greedy", rotation_steps=steps, seed=3, activation_clip=0.9, weight_clip=0.8,
    )  # fmt: skip
    frozen = freeze_layer(model[0], scheme, {"rows": rows.numpy()})
    assert torch.allclose(frozen.inputs[0].blocks[0], of_input.R[0], atol=1e-5)
    assert torch.equal(frozen.inputs[1].order.long(), of_input.permutation_list[0])
    with torch.no_grad():
        assert (frozen(rows) - want).abs().max() <= 1e-3 * want.abs().max()


def test_the_forks_method_equals_numpy():
    model, x = example()
    weight, bias = (p.detach().double().numpy() for p in model[0].parameters())
    energy = np.argsort(-(weight**2).mean(0))
    order = np.array([energy[i // 2] if i % 2 == 0 else energy[-1 - i // 2] for i in range(64)])
    rotation, back = np.zeros((64, 64)), np.zeros((48, 48))
    turned = duquant.from_weight(model[0].weight.detach(), OF_FORK)[1]
    ours_in = turned.get_buffer("blocks").double().numpy()
    ours_out = duquant.output_rotation(model[0].weight.detach(), OF_FORK).blocks.double().numpy()
    # Signs of singular vectors are free, and -8 has no opposite: numpy's get the signs of ours.
    for i in range(0, 64, 16):
        vectors = np.linalg.svd(weight[:, order[i : i + 16]].T)[0]
        signs = np.sign((vectors * ours_in[i // 16]).sum(0))
        rotation[i : i + 16, i : i + 16] = vectors * signs
    for i in range(0, 48, 16):
        vectors = np.linalg.svd(weight[i : i + 16])[0]
        back[i : i + 16, i : i + 16] = vectors * np.sign((vectors * ours_out[i // 16].T).sum(0))
    moved = back @ weight[:, order] @ rotation
    best = np.zeros_like(moved)
    for out, values in zip(best, moved, strict=True):
        tries = [np.abs(values).max() / 7 / share for share in (0.5, 0.75, 1, 1.25, 1.5)]
        made = [np.clip(np.round(values / t), -8, 7) * t for t in tries]
        out[:] = min(made, key=lambda one: ((one - values) ** 2).mean())
    rows = x.double().numpy().reshape(-1, 64)[:, order] @ rotation
    scale = np.maximum(np.quantile(np.abs(rows), 0.999, axis=0) / 127, 1e-6)
    rows = np.clip(np.round(rows / scale), -128, 127) * scale
    want = rows @ best.T @ back + bias
    found = calibrate(model, OF_FORK, [x]).layers["0"]
    with torch.no_grad():
        got = freeze_layer(model[0], OF_FORK, found)(x).numpy().reshape(-1, 48)
    # A value between two codes may be rounded to either.
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "scheme",
    [
        QuantizationScheme(4, 8, group=32, symmetric=False, activation_symmetric=False),
        QuantizationScheme(8, 8, method="hadamard"),
        QuantizationScheme(4, 8, method="duquant", rotate_outputs=True),
    ],
    ids=lambda one: one.method,
)
def test_integer_products_equal_fake_quantization(scheme: QuantizationScheme):
    """Compare with the product of floats that integers stand for."""
    model, x = example()
    frozen = freeze_layer(model[0], scheme, None)
    with torch.no_grad():
        weight = model[0].weight.detach()
        for one in frozen.inputs:
            weight = one.of_weight(weight)  # pyright: ignore[reportCallIssue]
        if scheme.rotate_outputs:
            weight = duquant.output_rotation(model[0].weight, scheme)(weight.t()).t()
        rows = fake(frozen.inputs(x), scheme)
        want = torch.nn.functional.linear(rows, round_weight(weight, scheme).weight())
        want = frozen.restore(want) + model[0].bias
        got = served(frozen)(x)
    assert (tpuport.to_torch(got) - want).abs().max() <= 1e-3 * want.abs().max()


def served(frozen: QuantizedLinear) -> tpuport.PortedModel:
    return tpuport.convert(frozen, verify=False)


def fake(x: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    if scheme.activation_symmetric:
        step = x.abs().amax(-1, keepdim=True) / 127
        return torch.clamp(torch.round(x / step), -128, 127) * step
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / 255
    zero = torch.round(-low / step)
    return (torch.clamp(torch.round(x / step) + zero, 0, 255) - zero) * step
