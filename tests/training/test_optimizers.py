"""torch's optimizers and schedules in optax's form: the same weights after the same steps."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedules

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.training import from_torch, make_train_step

STEPS = 12


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    )


def grouped(module: Any) -> list[dict[str, Any]]:
    """Two groups, as for weights that decay and those that do not; one bias is in neither."""
    decaying = [p for p in module.parameters() if p.ndim > 1]
    others = [module[0].bias, *module[2].parameters()]
    return [{"params": decaying}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]


def squared(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (module(x) - y).square().mean()


def check(make: Callable[[Any], Any], schedule: Callable[[Any], Any] | None = None) -> None:
    """So many steps by torch and by the port, each schedule stepped after each update."""
    ours = model()
    eager = copy.deepcopy(ours)
    mine, theirs = make(ours), make(eager)
    scheduler = schedule(mine) if schedule is not None else None
    ported = tpuport.convert(ours)
    converted = from_torch(ported, mine, scheduler, steps=STEPS if schedule else None)
    step = make_train_step(ported, squared, converted)
    state = step.init()
    running = schedule(theirs) if schedule is not None else None
    torch.manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(4, 6), torch.randn(4, 2)
        state, _ = step(state, x, y)
        theirs.zero_grad()
        squared(eager, x, y).backward()
        theirs.step()
        if running is not None:
            running.step()
    for name, value in eager.state_dict().items():
        np.testing.assert_allclose(
            state.params[name], value.numpy(), rtol=2e-4, atol=2e-6, err_msg=name
        )


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 1e-2, (0.8, 0.95), weight_decay=0.1),
    "adamw in groups": lambda m: torch.optim.AdamW(grouped(m), 1e-2, weight_decay=0.3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 1e-2, eps=1e-6, weight_decay=0.1),
    "adam, decoupled": lambda m: torch.optim.Adam(
        m.parameters(), 1e-2, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adam, maximising": lambda m: torch.optim.Adam(m.parameters(), 1e-2, maximize=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), 1e-2, amsgrad=True, weight_decay=0.1),
    "adamw, amsgrad": lambda m: torch.optim.AdamW(grouped(m), 1e-2, amsgrad=True),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), 1e-2, weight_decay=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 1e-2, weight_decay=0.1),
    "nadam, decoupled": lambda m: torch.optim.NAdam(
        m.parameters(), 1e-2, momentum_decay=0.1, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adagrad": lambda m: torch.optim.Adagrad(
        m.parameters(), 1e-2, lr_decay=0.1, initial_accumulator_value=0.2, weight_decay=0.1
    ),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), 0.5, maximize=True),
    "dampening": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.3),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, weight_decay=0.01),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 1e-3, alpha=0.9),
    "rmsprop, centered": lambda m: torch.optim.RMSprop(
        m.parameters(), 1e-3, momentum=0.5, centered=True, weight_decay=0.1
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_those_of_torch(make: Callable[[Any], Any]):
    check(make)


def chained(optimizer: Any) -> Any:
    return schedules.SequentialLR(
        optimizer,
        [
            schedules.LinearLR(optimizer, 0.1, total_iters=3),
            schedules.CosineAnnealingLR(optimizer, T_max=9, eta_min=1e-4),
        ],
        milestones=[3],
    )


def warmed_up(optimizer: Any) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 3, STEPS)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "chained": chained,
    "of transformers": warmed_up,
    "one cycle": lambda o: schedules.OneCycleLR(
        o, max_lr=[0.02, 0.01], total_steps=STEPS + 1, cycle_momentum=False
    ),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "steps": lambda o: schedules.MultiStepLR(o, [2, 5], gamma=0.5),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_rates_are_those_of_the_schedule(schedule: Callable[[Any], Any]):
    check(OPTIMIZERS["adamw in groups"], schedule)


@pytest.mark.parametrize(
    "name",
    ["adamw in groups", "amsgrad", "adamax", "nadam", "dampening", "nesterov", "rmsprop, centered"],
)
def test_momentum_that_a_schedule_changes_is_followed(name: str):
    check(OPTIMIZERS[name], lambda o: schedules.OneCycleLR(o, 0.02, total_steps=STEPS + 1))


class Decaying:
    """Changes the decay of weights, as DINO's loop does, and momentum."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.number = optimizer, 0

    def step(self) -> None:
        self.number += 1
        for group in self.optimizer.param_groups:
            group["weight_decay"], group["momentum"] = 0.1 * self.number, 0.1 * self.number


def test_options_that_a_schedule_changes_are_followed():
    check(lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.5), Decaying)


def test_the_users_own_schedule_stays_where_it_was():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), 1.0)
    scheduler = schedules.StepLR(optimizer, 1, gamma=0.5)
    from_torch(tpuport.convert(module), optimizer, scheduler, steps=5)
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert next(module.parameters()).numel() > 1


class Blocks(torch.nn.Module):
    """Three that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_in_a_stack_are_in_one_group():
    module = Blocks()
    groups = [{"params": block.parameters()} for block in module.blocks]
    optimizer = torch.optim.SGD(groups, 0.1)
    ported = tpuport.convert(module)
    assert tpuport.stack_blocks(ported)
    with pytest.raises(UsageError, match=r"are in different groups of the SGD \(0, 1, 2\)"):
        from_torch(ported, optimizer)


def stepped(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    return optimizer


REFUSED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "another": (
        lambda m: torch.optim.RAdam(m.parameters()),
        None,
        "RAdam has no form in optax here; there are Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam",
    ),
    "foreign": (
        lambda m: torch.optim.SGD(model().parameters(), 0.1),
        None,
        r"group 0 of the SGD has a parameter of shape \[8, 6\] that is not one of the ported",
    ),
    "used": (stepped, None, "has taken steps already"),
    "momentum from zero": (
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        Decaying,
        "Decaying sets momentum to zero at some steps",
    ),
    "plateau": (
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        schedules.ReduceLROnPlateau,
        "ReduceLROnPlateau depends on a metric",
    ),
}


@pytest.mark.parametrize(("make", "schedule", "message"), REFUSED.values(), ids=REFUSED)
def test_what_optax_does_otherwise_is_refused(
    make: Callable[[Any], Any], schedule: Any, message: str
):
    module = model()
    optimizer = make(module)
    scheduler = schedule(optimizer) if schedule is not None else None
    with pytest.raises(UsageError, match=message):
        from_torch(tpuport.convert(module), optimizer, scheduler, steps=10)


def test_a_schedule_needs_the_number_of_steps():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(UsageError, match="pass the number of updates of the whole run"):
        from_torch(tpuport.convert(module), optimizer, schedules.StepLR(optimizer, 1))
