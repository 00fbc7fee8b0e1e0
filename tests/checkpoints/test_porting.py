"""Checkpoints inside `tpuport.porting`, where torch says that tensors are on a CUDA device."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tpuport


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".ckpt"])
def test_checkpoints_go_in_and_out_inside_the_block(tmp_path: Path, suffix: str):
    path = tmp_path / f"m{suffix}"
    model = torch.nn.Linear(3, 2)
    weights = dict(model.state_dict())
    with tpuport.porting(port_modules=False):
        if suffix == ".safetensors":
            save_file(weights, path)
        else:
            on_cuda = {name: tensor.cuda() for name, tensor in weights.items()}
            torch.save(on_cuda, path, _use_new_zipfile_serialization=suffix == ".pt")
        loaded = tpuport.load_checkpoint(path, dtype="bfloat16")
        tpuport.save_checkpoint(tmp_path / f"b{suffix}", loaded, like=path)
        ported = tpuport.convert(torch.nn.Linear(3, 2))
        assert ported.load(path) == ([], [])
        opened = tpuport.open_checkpoint(tmp_path / f"b{suffix}")
        assert opened.read("weight").tolist() == weights["weight"].tolist()
    assert np.array_equal(ported.params["weight"], weights["weight"])
    # What CUDA saved is read outside the block, too.
    assert np.array_equal(tpuport.load_checkpoint(path)["bias"], weights["bias"])
