"""Checkpoints saved on CUDA come back on the accelerator, whichever way they are loaded."""

import pickle

import pytest
import safetensors
import safetensors.torch
import torch

import tpuport
from tpuport.foundation.errors import UsageError

THERE, HERE = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _porting():
    with tpuport.porting():
        yield


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A checkpoint as a GPU wrote it: every storage says where it was."""

    def save(place: str):
        path = tmp_path / "model.pt"
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: place)
            weight = torch.arange(6.0).reshape(2, 3)
            torch.save({"weight": weight, "row": weight[1], "step": 3}, path)
        return path

    return save


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("place", "options", "expected"),
    [
        ("cuda:0", {}, THERE),
        ("cuda:0", {"map_location": "cpu"}, HERE),
        ("cuda:3", {"map_location": "cuda"}, THERE),
        ("cuda:0", {"map_location": torch.device("cuda:0")}, THERE),
        ("cuda:0", {"map_location": torch.device("cpu")}, HERE),
        ("cuda:3", {"map_location": {"cuda:3": "cuda:0"}}, THERE),
        ("cuda:0", {"map_location": {"cuda:0": "cpu"}}, HERE),
        ("cpu", {}, HERE),
        ("cpu", {"map_location": "cuda:0"}, THERE),
        ("cpu", {"map_location": lambda storage, place: storage.cuda()}, THERE),
        ("cuda:0", {"map_location": lambda storage, place: storage}, HERE),
    ],
)
def test_a_checkpoint_is_where_it_was_saved_or_is_sent(
    saved, place, options, expected, weights_only
):
    state = torch.load(saved(place), weights_only=weights_only, **options)
    assert state["weight"].device == state["row"].device == expected
    assert state["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["step"] == 3
    state["weight"][1, 0] = 9
    assert state["row"].tolist() == [9, 4, 5]


def test_another_device_is_refused_as_by_a_machine_with_one_gpu(saved):
    with pytest.raises(UsageError, match="cuda:3 was asked for, but a process has one accelerator"):
        torch.load(saved("cuda:3"))


def test_what_is_saved_here_says_that_it_was_on_the_accelerator(tmp_path):
    x = torch.arange(3.0, device="cuda")
    torch.save({"there": x, "here": torch.ones(1)}, tmp_path / "x.pt")
    state = torch.load(tmp_path / "x.pt")
    assert (state["there"].device, state["here"].device) == (THERE, HERE)
    assert state["there"].tolist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(x)).device == THERE


def test_a_module_and_its_optimizer_resume(tmp_path):
    model = torch.nn.Linear(2, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    state = torch.load(tmp_path / "x", map_location="cuda")
    other = torch.nn.Linear(2, 2).cuda()
    resumed = torch.optim.AdamW(other.parameters())
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert torch.equal(other.weight, model.weight)
    moments = resumed.state[other.weight]["exp_avg"]
    assert moments.device == THERE
    assert torch.equal(moments, optimizer.state[model.weight]["exp_avg"])


@pytest.fixture
def tensors_file(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_safetensors_load_onto_it(tensors_file, device):
    state = safetensors.torch.load_file(tensors_file, device=device)
    assert state["a"].device == state["b"].device == THERE
    assert state["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with safetensors.safe_open(tensors_file, "pt", device=device) as file:
        assert set(file.keys()) == {"a", "b"}
        part = file.get_slice("a")
        assert part.get_shape() == [2, 3]
        assert part[1:, :2].device == THERE
        assert part[1:, :2].tolist() == [[3, 4]]
        one, two = file.get_tensor("a"), file.get_tensor("a")
        one.zero_()
        assert two.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_safetensors_still_load_onto_the_host(tensors_file):
    assert safetensors.torch.load_file(tensors_file)["a"].device == HERE
    with safetensors.safe_open(tensors_file, "np") as file:
        assert file.get_tensor("b").sum() == 2


def test_safetensors_save_from_it(tmp_path):
    path = tmp_path / "y.safetensors"
    safetensors.torch.save_file({"a": torch.arange(3.0, device="cuda")}, path)
    assert safetensors.torch.load_file(path)["a"].tolist() == [0, 1, 2]
