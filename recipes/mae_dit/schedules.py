"""Optimizers and learning rates as configurations ask for them."""

import math
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
)

from recipes.mae_dit.config import Optimizer
from tpuport.foundation.errors import UsageError


def make_optimizer(parameters: Any, options: Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer of the parameters that are trained.

    Raises:
        UsageError: It is of an unknown type.
    """
    trained = [one for one in parameters if one.requires_grad]
    common: dict[str, Any] = {"lr": options.init_lr, "weight_decay": options.weight_decay}
    match options.type.lower():
        case "adamw":
            return torch.optim.AdamW(trained, betas=options.betas[:2], **common)  # type: ignore[arg-type]
        case "adam":
            return torch.optim.Adam(trained, betas=options.betas[:2], **common)  # type: ignore[arg-type]
        case "sgd":
            return torch.optim.SGD(trained, momentum=0.9, **common)
    raise UsageError(f"optimizer.type={options.type!r}: expected adamw, adam or sgd")


def make_schedule(
    optimizer: torch.optim.Optimizer, options: Optimizer, steps_per_epoch: int, epochs: int
) -> LambdaLR:
    """Return the schedule of an optimizer that counts updates."""
    table = rates(options, steps_per_epoch, epochs)
    last = len(table) - 1
    return LambdaLR(optimizer, lambda step: table[min(step, last)] / options.init_lr)


def rates(options: Optimizer, steps_per_epoch: int, epochs: int) -> list[float]:
    """Return the learning rate of each update: a warmup, then a decay.

    torch's own schedules are stepped in the order in which upstream steps them, as the rate of the
    decay is the last one of the warmup times a factor.

    Args:
        options: The optimizer's settings.
        steps_per_epoch: Updates per epoch.
        epochs: Epochs of the schedule; the last rate holds after them.

    Raises:
        UsageError: A mode is unknown.
    """
    given = options.warmup
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=options.init_lr)
    rising = given.epoch * steps_per_epoch
    held = rising + given.buffer_epoch * steps_per_epoch
    end = epochs if given.decay_end_epoch is None else given.decay_end_epoch
    falling = end * steps_per_epoch - held
    multiplier = given.multiplier
    warmup = None
    if rising > 0:
        if given.mode in ("linear", "sqrt", "fix"):
            multiplier = max(1.0, multiplier)
        elif given.mode != "none":
            raise UsageError(f"warmup.mode={given.mode!r}: expected linear, sqrt, fix or none")
        warmup = _Rising(optimizer, rising, multiplier, given.start_from_zero)
    decay = _decay(optimizer, options, multiplier, falling, epochs * steps_per_epoch)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no optimizer steps here
        for _ in range(max(math.ceil(max(end, epochs) * steps_per_epoch), 1)):
            found.append(float(optimizer.param_groups[0]["lr"]))
            if warmup is not None:
                warmup.step()
            if (warmup is None or warmup.last_epoch > held) and decay.last_epoch < falling:
                decay.step()
    return found


def _decay(
    optimizer: Any, options: Optimizer, multiplier: float, steps: float, total: float
) -> LRScheduler:
    given = options.warmup
    match given.decay_mode:
        case "linear":
            floor = given.min_lr / options.init_lr
            return LinearLR(optimizer, multiplier, floor, steps)  # type: ignore[arg-type]
        case "cosine":
            return CosineAnnealingLR(optimizer, steps, given.min_lr)  # type: ignore[arg-type]
        case "reduce":
            return MultiStepLR(optimizer, [*given.decay_schel] or [int(total)], given.gamma)
    raise UsageError(f"warmup.decay_mode={given.decay_mode!r}: expected linear, cosine or reduce")


class _Rising(LRScheduler):
    """A rate that rises over steps to a multiple, and is left alone afterwards."""

    def __init__(self, optimizer: Any, steps: float, multiple: float, from_zero: bool) -> None:
        self._steps, self._multiple, self._from_zero = steps, multiple, from_zero
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Return the rate of each group."""
        if self.last_epoch > self._steps:
            return [group["lr"] for group in self.optimizer.param_groups]
        done = min(1.0, self.last_epoch / self._steps)
        factor = self._multiple * done if self._from_zero else 1 + (self._multiple - 1) * done
        return [rate * factor for rate in self.base_lrs]
