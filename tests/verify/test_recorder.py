"""What the recorder calls the parameters of a script."""

import weakref
from pathlib import Path
from typing import Any

import torch

from tpuport.verify.compare import _apart
from tpuport.verify.recorder import StepRecorder


def test_names_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """A port holds copies and proxies of the modules that it runs as programs."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    copy: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    part: Any = torch.nn.Linear(2, 3)
    for name, parameter in model.named_parameters():
        place, _, last = name.partition(".")
        setattr(copy[int(place)], last, parameter)
    part.weight = model[0].weight
    outer: Any = torch.nn.Module()
    outer.net = model
    wrapper: Any = torch.nn.Module()  # it may be there in one of two runs
    wrapper.module = torch.nn.Module()
    wrapper.module.module = outer
    proxy = weakref.proxy(model)
    recorder = StepRecorder(tmp_path, "trained", 1)
    recorder.before_step(torch.optim.SGD(model.parameters()))
    expected = {"net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"}
    assert set(recorder.names.values()) == expected
    running = {name for name in recorder.buffers if "running" in name}
    assert running == {"net.1.running_mean", "net.1.running_var"}
    del copy, part, proxy, wrapper


def test_an_optimizer_that_stands_for_another_is_the_same(tmp_path: Path) -> None:
    """Lightning makes one with the same groups, and both may make the step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    alias = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    alias.__dict__ = dict(vars(optimizer))
    recorder = StepRecorder(tmp_path, "trained", 9)
    for one in (optimizer, alias):
        recorder.before_step(one)
    for one in (optimizer, alias):
        recorder.after_step(one)
    assert (recorder.optimizers, recorder.counts) == ([optimizer], [1])


def test_the_same_infinity_is_no_difference() -> None:
    infinite = torch.tensor([float("inf"), 1.0])
    assert _apart(infinite, infinite.clone(), infinite.double() - infinite.double()) == 0.0
    assert not _apart(infinite, -infinite, infinite.double() - infinite.double()) == 0.0
