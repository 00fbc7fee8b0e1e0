"""Training of stage 2: latents of the frozen stage 1, in one program with the denoiser's step."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tpuport
from recipes.mae_dit.config import Config
from recipes.mae_dit.devices import trained
from recipes.mae_dit.models import Autoencoder, Encodings, Images
from recipes.mae_dit.schedules import make_optimizer, make_schedule
from recipes.mae_dit.statistics import LatentStatistics
from recipes.records import check_run
from tpuport.model.ported_model import PortedModel
from tpuport.training import TrainStep, fit, from_torch, make_train_step
from tpuport.training.metric_writers import Sink

Batch = Mapping[str, Any]


class Stage2(nn.Module):
    """The modules of a step.

    Args:
        model: A model with upstream's interface of stage 2.
        autoencoder: Encodes the images of batches; not needed if they have latents.
        statistics: Normalise the latents, if given.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        autoencoder: Autoencoder | None = None,
        statistics: LatentStatistics | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.autoencoder: Any = autoencoder
        self._kinds: tuple[Any, Any] = Images, Encodings
        if autoencoder is not None:
            autoencoder.requires_grad_(False)
            self._kinds = autoencoder.images, autoencoder.encodings
        self._normalises = statistics is not None
        if statistics is not None:
            for name, value in zip(("mean", "scale"), statistics.shift_and_scale(), strict=True):
                self.register_buffer(name, torch.from_numpy(value).float(), persistent=False)
        self.training_mode()

    def training_mode(self) -> None:
        """Set the modes of a step: stage 1 is frozen, its norms and dropout included."""
        self.model.train()
        if self.autoencoder is not None:
            self.autoencoder.eval()

    def latents(self, batch: Batch) -> torch.Tensor:
        """Return the latents that the model is trained on."""
        if "latent" in batch:
            zs = batch["latent"]
        else:
            with torch.no_grad():
                zs = self.autoencoder.encode(batch["image"]).zs
        return (zs - self.mean) / self.scale if self._normalises else zs

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the model, and its terms."""
        images, encodings = self._kinds
        given = {name: batch[name] for name in ("t", "noise", "uniform") if name in batch}
        inputs = images(
            img=batch.get("image"),
            condition=batch["label"].long(),
            img_path=None,
            additional_attr=given or None,
        )
        zs = encodings(zs=self.latents(batch), additional_attr={})
        found = self.model.compute_loss(zs, self.model(zs, inputs), inputs)
        terms = {n: v.detach() for n, v in found.items() if n != "loss_total" and v.ndim == 0}
        return found["loss_total"], terms


def images_of(modules: Any, zs: torch.Tensor) -> torch.Tensor:
    """Return the images (B, 3, H, W), in [0, 1], of latents that a model of stage 2 made."""
    if modules._normalises:
        zs = zs * modules.scale + modules.mean
    encodings = modules._kinds[1](zs=zs, additional_attr={})
    return modules.autoencoder.decode(encodings).clamp(0, 1)


def _loss(modules: Any, batch: Batch) -> Any:
    return modules.loss(batch)


def make_step(
    modules: Stage2,
    config: Config,
    steps_per_epoch: int,
    on: Callable[[PortedModel], Any] | None = None,
) -> TrainStep:
    """Return the step of stage 2. The loss is divided by the number of accumulated parts.

    Args:
        modules: The modules on the CPU.
        config: The configuration.
        steps_per_epoch: Updates per epoch.
        on: Changes the ported modules before the step is made of them, such as by sharding.
    """
    ported = tpuport.convert(modules, verify=False)
    if on is not None:
        on(ported)
    optimizer = make_optimizer(modules.model.parameters(), config.optimizer)
    epochs = config.experiment.epochs
    schedule = make_schedule(optimizer, config.optimizer, steps_per_epoch, epochs)
    return make_train_step(
        ported,
        _loss,
        from_torch(ported, optimizer, schedule, steps=steps_per_epoch * epochs),
        accumulate=config.experiment.accu_step,
        clip_norm=config.optimizer.clip_grad_norm or None,
        ema_decay=config.arch.ema_decay,
        trainable="model.**",
    )


def train(
    step: TrainStep,
    batches: Any,
    out: Path,
    config: Config,
    *,
    identity: Mapping[str, Any],
    limit: int | None = None,
    log_every: int = 10,
    evaluate: Callable[[Any, Any], Mapping[str, Any] | None] | None = None,
    evaluate_every: int | None = None,
    sinks: Sequence[Sink],
) -> nn.Module:
    """Train, or resume after the last checkpoint of the same command.

    Args:
        step: The step.
        batches: `Batches` of images or latents, with labels.
        out: Folder of the run, for OUT/states.
        config: The configuration.
        identity: What a resumed run must have been begun with.
        limit: Largest number of updates.
        log_every: Updates between lines of the log.
        evaluate: See `tpuport.training.fit`.
        evaluate_every: Updates between evaluations.
        sinks: Where numbers and pictures go.

    Returns:
        The trained model, with the averaged weights if there are any.

    Raises:
        UsageError: The run was begun otherwise.
    """
    check_run(
        out / "run.json",
        identity,
        "give what the run was begun with, or another --out",
    )
    per_epoch = len(batches)
    steps = per_epoch * config.experiment.epochs
    state = fit(
        step,
        batches,
        steps=steps if limit is None else min(limit, steps),
        seed=config.seed,
        checkpoints=out / "states",
        save_every=per_epoch * config.experiment.save_ckpt_freq,
        log_every=log_every,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        sinks=sinks,
    )
    modules: Any = trained(step.load_state(state, ema=config.arch.ema_decay is not None))
    return modules.model


def as_labels(dataset: Any) -> np.ndarray:
    """Return the labels of a data set, without reading its images."""
    if hasattr(dataset, "labels"):
        return dataset.labels
    return np.array([entry.label for entry in dataset.entries])
