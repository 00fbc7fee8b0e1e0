"""What torch_xla 2.9 saved: FSDP shards and tensors in files of their own, read without code.

The files are written here in the layout that the package writes.
"""

import os
import sys
import types

import pytest
import torch

import tpuport
from tpuport.foundation.errors import CheckpointError

WORLD = 3
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


def model_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 4)]
    return torch.nn.Sequential(*blocks).state_dict()


def split(value: torch.Tensor, on_dim_0: bool) -> list[torch.Tensor]:
    """Cut a padded parameter into the shards of all ranks."""
    value = value if on_dim_0 and value.dim() else value.reshape(-1)
    padding = value.new_zeros((-len(value) % WORLD, *value.shape[1:]))
    return list(torch.cat([value, padding]).chunk(WORLD))


def save_shards(folder, layout: str) -> dict[str, torch.Tensor]:
    """Save the state as shards of three ranks; return what they hold together."""
    whole = model_state()
    buffers = {n for n in whole if "running" in n or "num_batches" in n}
    states = [{} for _ in range(WORLD)]
    inner, flatten_info = {}, {}

    def add(original: str, value: torch.Tensor, on_dim_0: bool) -> None:
        name = "_fsdp_shard" + SEPARATOR + original.replace(".", SEPARATOR)
        inner[name] = {"_orig_size": value.shape, "_orig_name": original}
        for state, part in zip(states, split(value, on_dim_0), strict=True):
            state[f"_fsdp_wrapped_module.0.{name}"] = part.clone()

    params = {name: value for name, value in whole.items() if name not in buffers}
    if layout == "flat":
        flat = "_fsdp_wrapped_module.flat_param_0"
        add(flat, torch.cat([value.reshape(-1) for value in params.values()]), on_dim_0=False)
        flatten_info[f"_fsdp_wrapped_module.0.{flat}"] = (
            [f"_fpw_module.{name}" for name in params],
            [value.shape for value in params.values()],
            [value.numel() for value in params.values()],
        )
    for name, value in params.items() if layout != "flat" else ():
        add(f"_fsdp_wrapped_module._fpw_module.{name}", value, on_dim_0=layout == "dim 0")
    buffer_info = {}
    for name in buffers:
        held = f"_fsdp_wrapped_module.0._fsdp_wrapped_module.{name}"
        if whole[name].is_floating_point():
            buffer_info[held] = {"_orig_dtype": torch.float32}
            whole[name] = whole[name].bfloat16().float()
        for state in states:
            state[held] = whole[name].bfloat16() if held in buffer_info else whole[name]
    metadata = {
        "shard_info": {"_fsdp_wrapped_module.0": inner},
        **{"flatten_info": flatten_info, "buffer_info": buffer_info, "world_size": WORLD},
    }
    for rank, state in enumerate(states):
        held = {"model": state, "shard_metadata": {**metadata, "rank": rank}, "epoch": 3}
        torch.save(held, folder / f"rank-{rank}-of-{WORLD}.pth")
    return {f"0.{name}": value for name, value in whole.items()}


@pytest.mark.parametrize("layout", ["flat", "each", "dim 0"])
def test_shards_are_read_as_the_module_that_was_wrapped(tmp_path, layout: str):
    whole = save_shards(tmp_path, layout)
    for path in (tmp_path, tmp_path / "rank-*.pth"):
        opened = tpuport.open_checkpoint(path)
        assert set(opened) == set(whole)
        for name, value in whole.items():
            assert (opened[name].shape, opened[name].dtype) == (tuple(value.shape), value.dtype)
            assert torch.equal(opened.read(name), value)
            if value.dim():
                assert torch.equal(opened.read(name, (slice(1, 3),)), value[1:3])
    loaded = tpuport.load_checkpoint(tmp_path)
    assert all(torch.equal(tpuport.to_torch(loaded[n]), v) for n, v in whole.items() if v.dim())
    with tpuport.porting(torch_xla={}):
        from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints as consolidate

        state, place = consolidate(str(tmp_path / "rank-"))
    assert all(torch.equal(state[name], value) for name, value in whole.items())
    assert torch.load(place)["model"].keys() == whole.keys()


def test_shards_that_do_not_go_together_are_refused(tmp_path):
    save_shards(tmp_path, "flat")
    one, two = tmp_path / "rank-1-of-3.pth", tmp_path / "rank-2-of-3.pth"
    with pytest.raises(CheckpointError, match=r"a shard of 3, .* ranks \[1\]; pass the directory"):
        tpuport.open_checkpoint(one)
    held = torch.load(two)
    torch.save({**held, "shard_metadata": {**held["shard_metadata"], "rank": 1}}, two)
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1, 1\]"):
        tpuport.open_checkpoint(tmp_path)
    torch.save({"model": held["model"]}, two)
    with pytest.raises(CheckpointError, match=r"rank-2-of-3\.pth, which is none"):
        tpuport.open_checkpoint(tmp_path)
    two.unlink()
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1\]"):
        tpuport.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"world_size": "3"},
        {"shard_info": {}},
        {"shard_info": None},
        {"flatten_info": {"_fsdp_wrapped_module.0._fsdp_wrapped_module.flat_param_0": (1, 2, 3)}},
        {
            "flatten_info": {
                "_fsdp_wrapped_module.0._fsdp_wrapped_module.flat_param_0": (
                    *(["w"], [torch.Size([1000])]),
                    [1],
                )
            }
        },
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path, damage: dict):
    save_shards(tmp_path, "flat")
    for path in tmp_path.iterdir():
        held = torch.load(path)
        torch.save({**held, "shard_metadata": {**held["shard_metadata"], **damage}}, path)
    with pytest.raises(CheckpointError, match="rank-"):
        tpuport.open_checkpoint(tmp_path)


def test_files_without_an_index_that_are_no_shards_are_refused(tmp_path):
    for step in (1, 2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"step-{step}.pt")
    with pytest.raises(CheckpointError, match="2 files without an index"):
        tpuport.open_checkpoint(tmp_path)


class Runs:
    """A pickle of this would make a directory."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["TPUPORT_HACKED"],)


def test_tensors_in_files_of_their_own(tmp_path, monkeypatch):
    module = types.ModuleType("torch_xla.utils.serialization")

    class TensorReference:
        __module__ = "torch_xla.utils.serialization"
        __qualname__ = "TensorReference"

        def __init__(self, tid: int) -> None:
            self.tid = tid

    module.TensorReference = TensorReference
    path, folder = tmp_path / "a.pt", tmp_path / "a.pt.tensors"
    folder.mkdir()
    tensors = [torch.randn(2, 3), torch.arange(4)]
    for number, tensor in enumerate(tensors):
        torch.save(tensor, folder / f"tensor_{number}.pt")
    with monkeypatch.context() as patched:
        for name in ("torch_xla", "torch_xla.utils", module.__name__):
            patched.setitem(sys.modules, name, module)
        state = {"w": TensorReference(0), "n": TensorReference(1)}
        torch.save({"model": state, "steps": [TensorReference(1)], "epoch": 3}, path)
    opened = tpuport.open_checkpoint(path)
    assert [opened.read(name).tolist() for name in ("w", "n")] == [t.tolist() for t in tensors]
    assert opened.extra["epoch"] == 3
    assert torch.equal(opened.extra["steps"][0], tensors[1])

    mark = tmp_path / "hacked"
    monkeypatch.setenv("TPUPORT_HACKED", str(mark))
    torch.save(Runs(), folder / "tensor_1.pt")
    with pytest.raises(CheckpointError, match=r"would run posix\.mkdir when it is loaded"):
        tpuport.open_checkpoint(path)
    assert not mark.exists()
    (folder / "tensor_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"tensor_1\.pt is not; copy it too"):
        tpuport.open_checkpoint(path)
