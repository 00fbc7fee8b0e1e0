"""Random training steps: make_train_step over research layers, beside a loop in eager PyTorch.

Networks of benchmarks/research_layers.txt are trained for some steps with a random optimizer of
torch, its options, parameter groups and schedule, with accumulation, clipping, averages and frozen
parameters. Parameters, averages, buffers and metrics are compared with those of the loop.
Prints what differs: `python -m benchmarks.train_steps --count 100`.
"""

import copy
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from benchmarks import research_scripts
from benchmarks.seeds import Found, run_seeds
from benchmarks.task_scripts import Shaken, distance
from benchmarks.training_scripts import head, listed
from tpuport.foundation.errors import ParityError, PortError, UsageError
from tpuport.training import from_torch, make_train_step

OPTIMIZERS = listed("""
torch.optim.SGD(groups, 0.05)

torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1)

torch.optim.SGD(groups, 0.05, momentum=0.9, dampening=0.5, maximize=True)

torch.optim.Adam(groups, 0.01, eps=0.05, weight_decay=0.1)

torch.optim.Adam(groups, 0.01, betas=(0.5, 0.9), eps=0.05, amsgrad=True)

torch.optim.Adam(groups, torch.tensor(0.01), eps=0.05, maximize=True)

torch.optim.AdamW(groups, 0.01, eps=0.05)

torch.optim.AdamW(groups, 0.01, eps=0.05, amsgrad=True, weight_decay=0.3)

torch.optim.Adam(groups, 0.01, eps=0.05, weight_decay=0.2, decoupled_weight_decay=True)

torch.optim.Adamax(groups, 0.01, eps=0.05, weight_decay=0.1)

torch.optim.NAdam(groups, 0.01, eps=0.05, weight_decay=0.1, decoupled_weight_decay=True)

torch.optim.NAdam(groups, 0.01, eps=0.05, weight_decay=0.1, momentum_decay=0.1)

torch.optim.Adagrad(groups, 0.01, lr_decay=0.1, initial_accumulator_value=0.2, weight_decay=0.1)

torch.optim.Adadelta(groups, 0.5, rho=0.8, eps=1e-3, weight_decay=0.1)

torch.optim.RMSprop(groups, 0.01, eps=0.05, momentum=0.9, centered=True, weight_decay=0.1)

torch.optim.RMSprop(groups, 0.01, alpha=0.9, eps=0.05)
""")
SCHEDULES = listed("""
None

None

schedules.StepLR(optimizer, 2, 0.5)

schedules.CosineAnnealingLR(optimizer, 4, 1e-3)

schedules.LambdaLR(optimizer, lambda step: (step + 1) / 3)

schedules.OneCycleLR(optimizer, 0.05, total_steps=8)

schedules.OneCycleLR(optimizer, 0.05, total_steps=8, cycle_momentum=False)

schedules.CyclicLR(optimizer, 0.01, 0.05, step_size_up=2, cycle_momentum=False)

schedules.PolynomialLR(optimizer, 4, power=2.0)

schedules.CosineAnnealingWarmRestarts(optimizer, 2, 2)

schedules.SequentialLR(
    optimizer,
    [schedules.LinearLR(optimizer, 0.2, total_iters=2), schedules.ExponentialLR(optimizer, 0.8)],
    [2],
)

schedules.ChainedScheduler(
    [schedules.ConstantLR(optimizer, 0.3, 2), schedules.MultiStepLR(optimizer, [1, 3], 0.5)]
)

schedules.MultiplicativeLR(optimizer, lambda step: 0.9)
""")
_GROUPS = listed("""
parameters

parameters

[{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2], "weight_decay": 0.0}]

[
    {"params": [p for p in parameters if p.ndim > 1]},
    {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.01, "lr": 0.03},
]

parameters[: len(parameters) // 2 + 1]

list(net.named_parameters())
""")
_FROZEN = listed("""
pass

pass

net.l0.requires_grad_(False)

parameters[0].requires_grad = False

net.eval()

for m in net.modules(): m.training = type(m).__name__ != "BatchNorm1d"
""")
_LOSSES = listed("""
return (head(out) - batch["y"]).square().mean()

return (head(out) - batch["y"]).square().mean() + 0.1 * left(model)

value = (head(out) - batch["y"]).abs().mean() + left(model)
return value, {"largest": head(out).detach().abs().max()}

each = (head(out) - batch["y"]).square().flatten(1).mean(1)
return (each * batch["w"]).sum() / batch["w"].sum(), {"weight": batch["w"].sum()}

return {"loss": head(out).float().logsumexp(-1).mean(), "extra": head(out).mean()}
""")


@dataclass(frozen=True)
class Setting:
    """What one seed trains, and how; each text is Python's."""

    source: str
    loss: str
    frozen: str
    groups: str
    optimizer: str
    schedule: str
    accumulate: int
    clip_norm: float | None
    ema_decay: float | None
    seed: int

    @classmethod
    def of(cls, seed: int) -> "Setting":
        """Return the setting of a seed."""
        chosen = random.Random(seed)
        source, _ = research_scripts.Maker(seed).program()
        loss, frozen = chosen.choice(_LOSSES), chosen.choice(_FROZEN)
        groups, optimizer = chosen.choice(_GROUPS), chosen.choice(OPTIMIZERS)
        schedule = chosen.choice(SCHEDULES)
        accumulate = chosen.choice([1, 1, 2])
        if accumulate > 1 and "weight" not in loss and "mean()" not in loss:
            accumulate = 1
        clip, decay = chosen.choice([None, 0.3]), chosen.choice([None, 0.9])
        texts = (source, loss, frozen, groups, optimizer, schedule)
        return cls(*texts, accumulate, clip, decay, seed)

    def __str__(self) -> str:
        texts = (self.loss, self.frozen, self.groups, self.optimizer, self.schedule)
        numbers = (self.accumulate, self.clip_norm, self.ema_decay)
        return "\n---\n".join([self.source, *texts, str(numbers)])


class _Made:
    """A network, its loss, optimizer and schedule, made from a setting."""

    def __init__(self, setting: Setting, path: Path) -> None:
        body = "\n".join(f"    {line}" for line in setting.loss.splitlines())
        text = (
            f"{setting.source}\n\n\ndef loss(model, batch):\n    out = model(batch['x'])\n{body}\n"
        )
        path.write_text(text)
        names: dict[str, Any] = {"__name__": "script", "__file__": str(path), "head": head}
        exec(compile(text, path, "exec"), names)
        torch.manual_seed(0)
        net = names["Net"]()
        names |= {"net": net, "parameters": list(net.parameters())}
        names["schedules"] = torch.optim.lr_scheduler
        exec(setting.frozen, names)
        names["parameters"] = list(net.parameters())
        for what in ("groups", "optimizer", "schedule"):
            names[what] = eval(getattr(setting, what), names)
        self.net, self.loss = net, names["loss"]
        self.optimizer, self.schedule = names["optimizer"], names["schedule"]


def _batches() -> list[dict[str, torch.Tensor]]:
    waves = [torch.sin(torch.arange(4 * 48.0) * 1.3 + i).view(4, 6, 8) for i in range(4)]
    weights = [torch.tensor([1.0, 0.5, 2.0, i]) for i in range(4)]
    return [{"x": x, "y": x.cos(), "w": w} for x, w in zip(waves, weights, strict=True)]


def of_eager(setting: Setting, path: Path, *, called: bool = False) -> list[tuple[str, Any]]:
    """Train in a loop of eager PyTorch, and return what is compared; `called`: call it before."""
    made, seen = _Made(setting, path), []
    if called:
        made.net(_batches()[0]["x"])
    average = copy.deepcopy(dict(made.net.named_parameters()))
    for number, batch in enumerate(_batches()):
        made.net.zero_grad()
        pieces = zip(*(v.chunk(setting.accumulate) for v in batch.values()), strict=True)
        parts = [dict(zip(batch, some, strict=True)) for some in pieces]
        losses = []
        for part in parts:
            value, metrics = _loss_of(made.loss(made.net, part))
            share = torch.tensor(1 / len(parts))
            if "weight" in metrics:
                share = metrics["weight"] / batch["w"].sum()
            losses.append(value.detach() * share)
            if value.requires_grad:
                (value * share).backward()
        held = [p for p in made.net.parameters() if p.grad is not None]
        if setting.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(held, setting.clip_norm)
        made.optimizer.step()
        if made.schedule is not None:
            made.schedule.step()
        with torch.no_grad():
            for name, value in made.net.named_parameters():
                decay = setting.ema_decay or 0.0
                average[name] = decay * average[name] + (1 - decay) * value
        seen.append((f"loss {number}", torch.stack(losses).sum()))
    seen += [(f"parameter {n}", p.detach().clone()) for n, p in made.net.named_parameters()]
    seen += [(f"buffer {n}", b.detach().clone()) for n, b in made.net.named_buffers()]
    if setting.ema_decay is not None:
        flags = dict(made.net.named_parameters())
        seen += [(f"average {n}", v) for n, v in average.items() if flags[n].requires_grad]
    return seen


def _loss_of(result: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    if isinstance(result, dict):
        return result["loss"], {}
    return result if isinstance(result, tuple) else (result, {})


def of_port(setting: Setting, path: Path, *, called: bool = False) -> list[tuple[str, Any]]:
    """Train by a step of tpuport, and return what is compared; `called`: call it before."""
    made, seen = _Made(setting, path), []
    ported = tpuport.convert(made.net)
    if called:
        ported(_batches()[0]["x"])
    step = make_train_step(
        ported,
        made.loss,
        from_torch(ported, made.optimizer, made.schedule, steps=8),
        accumulate=setting.accumulate,
        clip_norm=setting.clip_norm,
        ema_decay=setting.ema_decay,
    )
    state = step.init()
    for number, batch in enumerate(_batches()):
        state, metrics = step(state, batch)
        seen.append((f"loss {number}", torch.tensor(np.asarray(metrics["loss"]))))
    trained = step.load_state(state).to_torch()
    seen += [(f"parameter {n}", p.detach().clone()) for n, p in trained.named_parameters()]
    seen += [(f"buffer {n}", b.detach().clone()) for n, b in trained.named_buffers()]
    if setting.ema_decay is not None:
        averages = step.load_state(state, ema=True).to_torch().named_parameters()
        seen += [(f"average {n}", p.detach().clone()) for n, p in averages]
    return seen


def verdict(setting: Setting, folder: Path) -> tuple[str, str]:
    """Train twice and compare: "passes", "refused", "eager raises", "chaotic" or "differs".

    A network that sets up state at its first call is called once before.
    """
    kind, what = _trained(setting, folder / "script.py", called=False)
    if "once before init()" in what:
        return _trained(setting, folder / "script.py", called=True)
    return kind, what


def _trained(setting: Setting, path: Path, *, called: bool) -> tuple[str, str]:
    try:
        expected = of_eager(setting, path, called=called)
    except Exception as error:  # it is raised by a setting that eager PyTorch refuses
        return "eager raises", f"{type(error).__name__}: {error}"
    try:
        got = dict(of_port(setting, path, called=called))
    except (PortError, UsageError) as error:
        kind = "differs" if isinstance(error, ParityError) else "refused"
        return kind, str(error)
    except Exception as error:
        return "differs", f"{type(error).__name__}: {error}"
    for index, (name, want) in enumerate(expected):
        if name not in got:
            return "differs", f"{name} is missing"
        apart = distance(want, got[name])
        if apart > 1e-3:
            with Shaken():
                shaken = of_eager(setting, path, called=called)
            pairs = zip(expected, shaken[: index + 1], strict=False)
            effect = max(distance(a[1], b[1]) for a, b in pairs)
            kind = "chaotic" if 8 * effect > apart else "differs"
            shown = f"{name}: {apart:.3g} apart ({effect:.3g} by rounding)"
            return kind, f"{shown}\n{want.tolist()}\n{got[name].tolist()}"
    return "passes", ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    setting = Setting.of(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Found(*verdict(setting, folder), str(setting))


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
