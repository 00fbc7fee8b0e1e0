"""Lightning modules: `training_step` and `configure_optimizers` as a training step.

They are recognized by their methods alone: Lightning need not be installed.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.training.adapters.setup import Setup
from tpuport.training.optimizers import from_torch
from tpuport.training.step import make_train_step

# Names that a step uses itself; what the module logs under them gets a prefix.
_TAKEN = {"loss", "grad_norm", "skipped", "weight"}


def from_lightning(
    ported: PortedModel,
    trainer: Any = None,
    *,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    **options: Any,
) -> Setup:
    """Make the training step of a Lightning module: loss, optimizer, schedule, clipping and parts.

    The batch of a step is that of one update: with `accumulate_grad_batches=4` it is four of the
    loader's. Scalars that `training_step` logs are metrics of the step. Its `batch_idx` is always
    0, and a trainer's numbers (`global_step`, `current_epoch`) are refused: a step is one program
    for all batches, so pass values that depend on the step in the batch.

    Args:
        ported: the module, converted by `tpuport.convert`.
        trainer: a Trainer, or a mapping or object with some of its arguments: max_steps,
            max_epochs, gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches.
        steps: updates of the entire run; by default max_steps, or max_epochs * steps_per_epoch.
        steps_per_epoch: updates of an epoch, for schedules that advance once an epoch (Lightning's
            default).
        **options: further arguments of `make_train_step`.

    Raises:
        UsageError: it optimises by hand, has several optimizers, or something is not known.
    """
    module: Any = ported._source
    for name in ("training_step", "configure_optimizers"):
        if not callable(getattr(module, name, None)):
            raise UsageError(f"from_lightning: a {type(module).__name__} has no {name}")
    if not getattr(module, "automatic_optimization", True):
        raise UsageError(
            f"{type(module).__name__} optimises by hand (automatic_optimization=False). What to do:"
            " write one loss function for each optimizer, and tpuport.training.alternating"
        )
    accumulate = int(_said(trainer, "accumulate_grad_batches", 1) or 1)
    clip = _clip_norm(trainer)
    total = _steps(trainer, steps, steps_per_epoch)
    optimizer, scheduler = _optimizer(module.configure_optimizers(), accumulate, steps_per_epoch)
    made = make_train_step(
        ported,
        training_step_loss,
        from_torch(ported, optimizer, scheduler, steps=total),
        accumulate=accumulate,
        clip_norm=clip,
        **options,
    )
    return Setup(made, total)


def training_step_loss(model: Any, batch: Any) -> Any:
    """Return the loss of `training_step(batch, 0)`, with the scalars that it logs."""
    logged: dict[str, Any] = {}
    # Without a trainer, Lightning's global_step and current_epoch are silently 0.
    with logs_caught(model, logged, _trainer=_NoTrainer()):
        out = model.training_step(batch, 0)
    if out is None:
        raise UsageError(
            "training_step gives None, which skips the batch in Lightning. What to do: give a loss"
            " of 0, or leave such batches out of the data"
        )
    loss = out["loss"] if isinstance(out, Mapping) else out
    scalars = {
        f"logged_{name}" if name in _TAKEN else name: value
        for name, value in logged.items()
        if isinstance(value, (int, float)) or getattr(value, "shape", None) == ()
    }
    return loss, scalars


class _NoTrainer:
    """A trainer that refuses all attributes: they depend on the step, and a trace runs once."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"training_step asks the trainer for {name} (self.trainer, self.global_step and"
            " self.current_epoch do), and there is none: it would keep the value of the first step."
            " What to do: what depends on the step, pass it in the batch"
        )


@contextlib.contextmanager
def logs_caught(model: Any, logged: dict[str, Any], **attributes: Any) -> Iterator[None]:
    """Collect what a module logs in the block, with these attributes, and restore the module."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        logged[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log(name, value, *args, **kwargs)

    hooks = {"log": log, "log_dict": log_dict, **attributes}
    before = {name: vars(model)[name] for name in hooks if name in vars(model)}
    vars(model).update(hooks)
    try:
        yield
    finally:
        for name in hooks:
            vars(model).pop(name, None)
        vars(model).update(before)


def _said(trainer: Any, name: str, otherwise: Any) -> Any:
    if isinstance(trainer, Mapping):
        return trainer.get(name, otherwise)
    return getattr(trainer, name, otherwise)


def _clip_norm(trainer: Any) -> float | None:
    value = _said(trainer, "gradient_clip_val", None)
    kind = _said(trainer, "gradient_clip_algorithm", None)
    if value and str(getattr(kind, "value", kind) or "norm") != "norm":
        raise UsageError(
            f"gradient_clip_algorithm={kind!r}: expected 'norm'. What to do: put optax.clip(value)"
            " before the optimizer of make_train_step"
        )
    return float(value) if value else None


def _steps(trainer: Any, steps: int | None, steps_per_epoch: int | None) -> int:
    if steps is not None:
        return steps
    most = _said(trainer, "max_steps", -1)
    epochs = _said(trainer, "max_epochs", None)
    found = [most] if most is not None and most > 0 else []
    if epochs is not None and epochs > 0 and steps_per_epoch is not None:
        found.append(epochs * steps_per_epoch)
    if not found:
        raise UsageError(
            "from_lightning: how many updates the run has is not known. What to do: steps=, a"
            " trainer with max_steps, or max_epochs and steps_per_epoch="
        )
    return int(min(found))


def _optimizer(found: Any, accumulate: int, steps_per_epoch: int | None) -> tuple[Any, Any]:
    """Return the optimizer and the schedule from any of the forms that Lightning takes."""
    schedulers: Any = []
    match found:
        case torch.optim.Optimizer():
            optimizers = [found]
        case {"optimizer": one, **rest}:
            optimizers = [one]
            schedulers = [rest["lr_scheduler"]] if rest.get("lr_scheduler") is not None else []
        case (list() | tuple() as optimizers, list() | tuple() as schedulers):
            pass
        case [{"optimizer": _}]:
            return _optimizer(found[0], accumulate, steps_per_epoch)
        case list() | tuple():
            optimizers = list(found)
        case _:
            optimizers = []
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise UsageError(
            f"configure_optimizers gives {len(optimizers)} optimizers and {len(schedulers)}"
            " schedules: expected one optimizer and at most one schedule. What to do: of several"
            " optimizers make one step each, with trainable=, and tpuport.training.alternating"
        )
    if not schedulers:
        return optimizers[0], None
    return optimizers[0], _paced(schedulers[0], accumulate, steps_per_epoch)


def _paced(given: Any, accumulate: int, steps_per_epoch: int | None) -> Any:
    """Return a schedule that advances as often as Lightning lets it."""
    config = given if isinstance(given, Mapping) else {"scheduler": given}
    interval, frequency = config.get("interval", "epoch"), int(config.get("frequency", 1))
    if interval not in ("step", "epoch"):
        raise UsageError(f"lr_scheduler: interval={interval!r}: expected 'step' or 'epoch'")
    if interval == "step":
        if frequency > 1 and accumulate > 1:
            raise UsageError(
                f"lr_scheduler: frequency={frequency} counts the loader's batches, of which"
                f" {accumulate} make a step here. What to do: frequency=1"
            )
        every = frequency
    elif steps_per_epoch is None:
        raise UsageError(
            "lr_scheduler: interval='epoch' (Lightning's default), and how many updates an epoch"
            " has is not known. What to do: steps_per_epoch=len(batches), or interval='step'"
        )
    else:
        every = frequency * steps_per_epoch
    return config["scheduler"] if every == 1 else Paced(config["scheduler"], every)


class Paced:
    """A schedule that advances once every `every` steps.

    Args:
        scheduler: a scheduler of torch.
        every: the number of steps between two advances.
    """

    def __init__(self, scheduler: Any, every: int) -> None:
        self.scheduler, self.every, self.count = scheduler, every, 0
        self.optimizer = scheduler.optimizer

    def step(self) -> None:
        """Count one more step."""
        self.count += 1
        if self.count % self.every == 0:
            self.scheduler.step()
