"""Which call of a script is the call of its model."""

from typing import Any

import pytest
import torch

from tpuport.repository.capture import ModelCapture


class Policy(torch.nn.Module):
    """A model that is never called itself, as those of robotics are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(3, 4)
        self.net = torch.nn.Linear(4, 2)

    def compute_loss(self, batch: dict[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        self.noted = self.encoder(batch["x"])
        return scale * self.net(self.noted).square().mean()

    def rebinding_loss(self, batch: Any) -> torch.Tensor:
        batch = batch["x"]
        return self.net(self.encoder(batch)).square().mean()


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
    del model.owner.noted
    model(*args, **kwargs)
    assert not hasattr(model.owner, "noted")


def test_a_method_whose_arguments_cannot_be_seen() -> None:
    """Then it is the module that is called, and how much of the model that is."""
    watching = capture("rebinding_loss")
    assert watching.found is not None
    assert isinstance(watching.found["model"], torch.nn.Linear)
    assert watching.share == 16 / 26
