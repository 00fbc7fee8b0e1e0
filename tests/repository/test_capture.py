"""Which call of a script is the call of its model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tpuport
from tpuport.repository import capture as captured
from tpuport.repository.capture import SETTINGS, ModelCapture
from tpuport.training import from_torch, make_train_step

ON_CUDA = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        assert torch.cuda.is_available()
        return self.linear(x.cuda()).square().mean()

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net(torch.ones(4, 3)).backward()
"""
AFTER = """
from tpuport.repository.capture import program
found = program()
print(found["model"](*found["inputs"][0]).shape)
"""


class Scheduler:
    """An object whose tables follow the device of what it gets, as those of diffusers."""

    def __init__(self) -> None:
        self.table = torch.ones(2)

    def add_noise(self, x: torch.Tensor) -> torch.Tensor:
        self.table, self.device = self.table.clone(), x.device
        return x * self.table


class Policy(torch.nn.Module):
    """A model that is never called itself, as those of robotics are."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.encoder = torch.nn.Linear(3, 4)
        self.net = torch.nn.Linear(4, 2)

    def compute_loss(self, batch: dict[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        self.noted = self.encoder(batch["x"])
        return scale * self.scheduler.add_noise(self.net(self.noted)).square().mean()

    def rebinding_loss(self, batch: Any) -> torch.Tensor:
        batch = batch["x"]
        return self.net(self.encoder(batch)).square().mean()


class Lit(Policy):
    """A Lightning module by its methods, which logs only in a loop of its trainer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.encoder(x))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self(batch).abs().sum() + number
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def log(self, name: str, value: Any, **options: Any) -> None:
        raise RuntimeError("no loop")

    def log_dict(self, values: Any, **options: Any) -> None:
        raise RuntimeError("no loop")


def capture(method: str) -> ModelCapture:
    policy, batch = Policy(), {"x": torch.ones(5, 3)}
    watching = ModelCapture(trains=True)
    given = {"scale": 2.0} if method == "compute_loss" else {}
    with watching.installed():
        torch.optim.SGD([*policy.encoder.parameters(), torch.nn.Parameter(torch.ones(99))])
        torch.optim.AdamW(policy.parameters())
        with pytest.raises(SystemExit):
            getattr(policy, method)(batch, **given)
    return watching


def test_a_method_that_calls_modules_inside() -> None:
    watching = capture("compute_loss")
    assert watching.found is not None
    model, (args, kwargs) = watching.found["model"], watching.found["inputs"]
    assert (type(model).__name__, watching.share) == ("Policy.compute_loss", 1.0)
    assert not hasattr(model.owner, "noted")
    assert torch.equal(model(*args, **kwargs), model.owner.compute_loss({"x": torch.ones(5, 3)}, 2))
    del model.owner.noted, model.owner.scheduler.device
    table = model.owner.scheduler.table
    model(*args, **kwargs)
    assert not hasattr(model.owner, "noted")
    assert set(vars(model.owner.scheduler)) == {"table"}
    assert model.owner.scheduler.table is table


def test_a_training_step_of_a_method_whose_objects_note_tensors() -> None:
    found = capture("compute_loss").found
    assert found is not None
    ported = tpuport.convert(found["model"])
    _, given = found["inputs"]
    optimizer = torch.optim.SGD(found["model"].parameters(), 0.1)
    step = make_train_step(
        ported, lambda model, batch: model(**batch), from_torch(ported, optimizer)
    )
    _, metrics = step(step.init(seed=0), given)
    assert float(metrics["loss"]) == pytest.approx(found["model"](**given).item())


def test_a_step_that_a_strategy_of_lightning_sends_through_the_forward() -> None:
    module, watching, batch = Lit(), ModelCapture(trains=True), torch.ones(5, 3)
    with watching.installed():
        module.configure_optimizers()
        module.forward = module.training_step  # type: ignore[method-assign]
        with pytest.raises(SystemExit):
            module(batch, 7)
    assert watching.found is not None
    model, (args, kwargs) = watching.found["model"], watching.found["inputs"]
    assert type(model).__name__ == "Lit.training_step"
    for _ in range(2):
        assert torch.equal(model(*args, **kwargs), module(batch).abs().sum() + 7)
    with pytest.raises(RuntimeError, match="no loop"):
        module.log("loss", 1)


def test_a_method_whose_arguments_cannot_be_seen() -> None:
    """Then it is the module that is called, and how much of the model that is."""
    watching = capture("rebinding_loss")
    assert watching.found is not None
    assert isinstance(watching.found["model"], torch.nn.Linear)
    assert watching.share == 16 / 26


def test_a_forward_that_asks_for_cuda_does_so_after_the_script_as_well(tmp_path: Path) -> None:
    """In a process of its own: CUDA stays emulated in it."""
    (tmp_path / "train.py").write_text(ON_CUDA)
    before = tmp_path / "before.py"
    before.write_bytes(Path(captured.__file__).with_name("before.py").read_bytes())
    settings = {"writable": [str(tmp_path)], "made_up": False, "autocast": True, "workers": True}
    before.with_suffix(".json").write_text(json.dumps(settings | {"batches": [], "quiet": False}))
    wanted = {"script": str(tmp_path / "train.py"), "arguments": [], "trains": True}
    wanted |= {"before": str(before), "folder": str(tmp_path)}
    (tmp_path / "capture.json").write_text(json.dumps(wanted))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", SETTINGS: str(tmp_path / "capture.json")}
    done = subprocess.run(
        [sys.executable, "-c", AFTER], env=env, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("torch.Size([])\n")
