"""What the recorder calls the parameters of a script."""

import weakref
from pathlib import Path

import torch

from tpuport.verify.recorder import StepRecorder


def test_names_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """A port holds copies and proxies of the modules that it runs as programs."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    copy = torch.nn.Linear(2, 3)
    copy.weight, copy.bias = model[0].weight, model[0].bias
    norm = torch.nn.BatchNorm1d(3)
    norm.weight, norm.bias = model[1].weight, model[1].bias
    proxy = weakref.proxy(model[1])
    recorder = StepRecorder(tmp_path, "trained", 1)
    recorder.before_step(torch.optim.SGD(model.parameters()))
    assert set(recorder.names.values()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert {name for name in recorder.buffers if "running" in name} == {
        *("1.running_mean", "1.running_var"),
    }
    del copy, norm, proxy
