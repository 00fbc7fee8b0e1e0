"""Hugging Face's `TrainingArguments`: optimizer, schedule, clipping and parts of its Trainer."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpuport.foundation.errors import MissingExtraError, UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.training.adapters.setup import Setup
from tpuport.training.optimizers import from_torch
from tpuport.training.step import make_train_step

# The defaults of the Trainer.
_DEFAULTS = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "max_steps": -1,
    "seed": 42,
    "optim": "adamw_torch",
}
# Options of the Trainer that a step here does not support, and what to do instead.
_WITHOUT_FORM = {
    "label_smoothing_factor": "loss= with F.cross_entropy(..., label_smoothing=)",
    "neftune_noise_alpha": "add the noise to the embeddings in the model",
    "optim_args": "make_train_step with one of optax's",
}
_ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_hf"}


def from_training_arguments(
    args: Any,
    ported: PortedModel,
    *,
    steps: int | None = None,
    loss: Callable[..., Any] | str | None = None,
    num_devices: int | None = None,
    **options: Any,
) -> Setup:
    """Make the training step that Hugging Face's Trainer would take with such arguments.

    Weight decay leaves out what the Trainer leaves out (biases and norms), by its own rule. The
    schedule is transformers' own. The batch of a step is that of one update, see `batch_size`.

    Args:
        args: `TrainingArguments`, or a mapping or object with some of them.
        ported: made of the model by `tpuport.convert`.
        steps: updates of the entire run; by default `max_steps`.
        loss: as in `make_train_step`; by default `model(**batch)`, with parts weighted by their
            labels that are not -100.
        num_devices: the devices that a batch is spread over; by default those of the model's mesh.
        **options: further arguments of `make_train_step`.

    Raises:
        UsageError: an optimizer or argument that has no form here, or how many steps is not known.
        MissingExtraError: transformers is not installed.
    """

    def given(name: str) -> Any:
        return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)

    def said(name: str) -> Any:
        value = given(name)
        return _DEFAULTS[name] if value is None else value

    _check_form(given)
    total = steps if steps is not None else said("max_steps")
    if total < 1:
        raise UsageError(
            f"steps={total}: how many updates the run has is needed for its schedule. What to do:"
            " steps=, such as epochs * len(batches), or max_steps in the arguments"
        )
    optimizer = _optimizer(said, ported)
    scheduler = _scheduler(said, optimizer, total)
    accumulate, clip = int(said("gradient_accumulation_steps")), said("max_grad_norm")
    made = make_train_step(
        ported,
        model_loss if loss is None else loss,
        from_torch(ported, optimizer, scheduler, steps=total),
        accumulate=accumulate,
        clip_norm=float(clip) if clip > 0 else None,
        **options,
    )
    mesh = ported.mesh
    count = num_devices or (1 if mesh is None else mesh.devices.size)
    size = int(said("per_device_train_batch_size")) * count * accumulate
    return Setup(made, total, size, int(said("seed")))


def _check_form(given: Callable[[str], Any]) -> None:
    for name, instead in _WITHOUT_FORM.items():
        if given(name):
            raise UsageError(
                f"{name}={given(name)!r} has no form here. What to do: leave it out; instead,"
                f" {instead}"
            )


def model_loss(model: Any, batch: Mapping[str, Any]) -> Any:
    """Return the loss of a transformers model, and as its weight how many labels count."""
    out = model(**batch)
    loss = out["loss"] if isinstance(out, Mapping) else out.loss
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return loss
    # Causal models predict each label from those before it, so the first one is not predicted.
    shifts = any(part in type(model).__name__ for part in ("CausalLM", "LMHead", "Conditional"))
    # Decoders of two-part models get the labels shifted instead, so each of them is predicted.
    shifts = shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    counted = labels[..., 1:] if shifts and labels.ndim > 1 else labels
    return loss, {"weight": (counted != -100).sum()}


def _optimizer(said: Callable[[str], Any], ported: PortedModel) -> torch.optim.Optimizer:
    module: Any = ported._source
    decayed = set(_trainer().get_decay_parameter_names(None, module))
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": said("weight_decay")},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    asked = said("optim")
    name, rate = str(getattr(asked, "value", asked)), float(said("learning_rate"))
    if name in _ADAMW:
        betas = (said("adam_beta1"), said("adam_beta2"))
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=said("adam_epsilon"))
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate)
    raise UsageError(
        f"optim={name!r} has no form here; there are {', '.join(sorted({*_ADAMW, 'sgd'}))}. What to"
        " do: make_train_step with one of optax's"
    )


def _scheduler(said: Callable[[str], Any], optimizer: torch.optim.Optimizer, steps: int) -> Any:
    try:
        from transformers.optimization import get_scheduler
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    asked = said("warmup_steps")
    # Below 1 it is a fraction of the steps; older versions have warmup_ratio for that.
    share = asked if 0 < asked < 1 else said("warmup_ratio")
    warmup = int(asked) if asked >= 1 else math.ceil(steps * share)
    kind = said("lr_scheduler_type")
    return get_scheduler(
        getattr(kind, "value", kind),
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=said("lr_scheduler_kwargs") or None,
    )


def _trainer() -> Any:
    try:
        from transformers import Trainer
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return Trainer


def _missing(error: ModuleNotFoundError) -> Exception:
    return MissingExtraError.from_import("from_training_arguments", error) or error
