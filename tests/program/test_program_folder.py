"""`tpuport.export`: a folder that jax alone runs, with the results of eager PyTorch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.aot import load_program

# Runs where neither torch nor tpuport can be imported.
ALONE = """
import json, sys
for name in ("torch", "torchax", "tpuport", "safetensors"):
    sys.modules[name] = None
import numpy as np
import load_program
program = load_program.load(".")
out = program(*np.load("inputs.npz").values())
np.savez("outputs.npz", y=out["y"][0], n=out["n"], count=program.state["norm.num_batches_tracked"])
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.table = nn.Embedding(5, 4).to(torch.bfloat16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, *, scale: float = 2.0) -> Any:
        h = self.norm(self.line(x)) * scale
        if x.sum() > 1000:
            raise ValueError("too large")
        return {"y": (h + self.table(ids), None), "n": ids.sum(), "name": "net"}


def test_jax_alone_runs_the_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x, ids = Net(), torch.randn(6, 3), torch.arange(6) % 5
    ported = tpuport.convert(net)
    tpuport.export(ported, tmp_path, inputs=((x, ids), {"scale": 3.0}))
    expected = net(x, ids, scale=3.0)
    np.savez(tmp_path / "inputs.npz", x=x.numpy(), ids=ids.numpy())
    env = {"JAX_PLATFORMS": "cpu", "PATH": "", "JAX_ENABLE_X64": "0"}
    subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, env=env, check=True)
    with np.load(tmp_path / "outputs.npz") as file:
        found = dict(file)
    np.testing.assert_allclose(found["y"], expected["y"][0].detach().numpy(), rtol=2e-5, atol=2e-5)
    assert (found["n"], found["count"]) == (ids.sum(), 1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [one["name"] for one in manifest["arguments"]] == ["args[0]", "args[1]"]
    assert manifest["platforms"] == ["cpu", "tpu"]

    program = load_program.load(tmp_path)
    for _ in range(2):  # buffers change from call to call
        expected = net(x, ids, scale=3.0)
    out = [program(x.numpy(), ids.numpy()) for _ in range(3)][-1]
    assert (out["name"], out["y"][1]) == ("net", None)
    np.testing.assert_allclose(out["y"][0], expected["y"][0].detach().numpy(), rtol=2e-5, atol=2e-5)
    mean = program.state["norm.running_mean"]
    running_mean = net.get_buffer("norm.running_mean").numpy()
    np.testing.assert_allclose(mean, running_mean, rtol=1e-5, atol=1e-6)

    # Errors that eager PyTorch raises for values, and wrong calls.
    with pytest.raises(RuntimeError, match="ValueError: too large"):
        program(x.numpy() + np.array([1e3, 0, 0]) * np.arange(6)[:, None], np.zeros(6, int))
    whole = ids.numpy()[:, None].repeat(3, 1)
    for arrays, message in [
        ((x.numpy(),), r"expected 2 arrays \(args\[0\], args\[1\]\), got 1"),
        ((x.numpy()[:2], ids.numpy()), r"args\[0\]: expected \[6, 3\], got \[2, 3\]"),
        ((whole, ids.numpy()), r"args\[0\]: expected float32, got int32"),
    ]:
        with pytest.raises(TypeError, match=message):
            program(*arrays)


def test_random_numbers_need_a_key(tmp_path: Path) -> None:
    ported = tpuport.convert(lambda x: x + torch.rand(3))
    tpuport.export(ported, tmp_path, inputs=(jax.ShapeDtypeStruct((3,), "float32"),))
    program = load_program.load(tmp_path)
    with pytest.raises(TypeError, match="draws random numbers"):
        program(np.zeros(3))
    zero, one = (program(np.zeros(3), key=jax.random.key(seed)) for seed in (0, 1))
    assert not np.allclose(zero, one)
    expected, _ = ported.apply({}, {}, jax.random.key(1), jnp.zeros(3))
    np.testing.assert_array_equal(one, expected)


def fills(x: torch.Tensor) -> torch.Tensor:
    x.fill_(1)
    return x.sum()


class Counts(nn.Module):
    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * 2


def test_what_is_refused(tmp_path: Path) -> None:
    x, ported = torch.ones(3), tpuport.convert(nn.Linear(3, 3))
    for model, what in [(fills, "its arguments"), (Counts(), "Python values")]:
        with pytest.raises(tpuport.PortError, match=f"The call changes {what}"):
            tpuport.export(tpuport.convert(model), tmp_path, inputs=(x,))
    with pytest.raises(tpuport.TpuportError, match="platforms: expected some of cpu, tpu"):
        tpuport.export(ported, tmp_path, inputs=(x,), platforms=("gpu",))
    with pytest.raises(tpuport.TpuportError, match="returns a device"):
        tpuport.export(tpuport.convert(lambda x: (x, torch.device("cpu"))), tmp_path, inputs=(x,))
    with torch.device("meta"):
        empty = tpuport.convert(nn.Linear(3, 3), verify=False)
    with pytest.raises(tpuport.TpuportError, match="needs the weights"):
        tpuport.export(empty, tmp_path, inputs=(x,))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").touch()
    with pytest.raises(tpuport.TpuportError, match="holds other files"):
        tpuport.export(ported, tmp_path, inputs=(x,))


def test_attention_for_the_tpu_alone_is_a_kernel(tmp_path: Path) -> None:
    def attends(q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q)

    q = jax.ShapeDtypeStruct((1, 2, 256, 128), "bfloat16")
    ported = tpuport.convert(attends, verify=False)
    texts = []
    for platforms in (("tpu",), ("cpu", "tpu")):
        tpuport.export(ported, tmp_path, inputs=(q,), platforms=platforms)
        data = (tmp_path / "program.stablehlo").read_bytes()
        texts.append(jax.export.deserialize(bytearray(data)).mlir_module())
    assert "tpu_custom_call" in texts[0]
    assert "tpu_custom_call" not in texts[1]
