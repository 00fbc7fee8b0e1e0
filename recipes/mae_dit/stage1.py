"""Stage 1: an autoencoder and a discriminator take turns, each as one program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

import tpuport
from recipes.mae_dit.config import Config
from recipes.mae_dit.devices import trained
from recipes.mae_dit.discriminator import ActNorm
from recipes.mae_dit.losses import Active, Stage1, active_in, gan_of
from recipes.mae_dit.reconstructions import Reconstructions
from recipes.mae_dit.schedules import make_optimizer, make_schedule
from recipes.records import check_run
from tpuport.foundation import pytree
from tpuport.model.ported_model import PortedModel
from tpuport.training import (
    Alternating,
    Checkpoints,
    TrainState,
    TrainStep,
    alternating,
    fit,
    from_torch,
    make_train_step,
)
from tpuport.training.metric_writers import Sink


def _generator(modules: Any, batch: Any, active: Active) -> Any:
    return modules.generator(batch, active)


def _discriminator(modules: Any, batch: Any) -> Any:
    return modules.discriminate(batch)


class GeneratorOnly:
    """The generator's step over the state of both, for epochs that train no discriminator.

    Args:
        both: The steps of which only "generator" is taken.
    """

    def __init__(self, both: Alternating) -> None:
        self._both, self._step = both, both.steps["generator"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def init(self, seed: int = 0) -> TrainState:
        """Make the state of both."""
        return self._both.init(seed)

    def load_state(self, state: TrainState, *, ema: bool = False) -> PortedModel:
        """Load a state into the model."""
        return self._both.load_state(state, ema=ema)

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        """Take one step; metrics have the names that steps of both give them."""
        call = self._step.place(*args, **kwargs)
        trained = self._step.trained
        others = {n: v for n, v in state.params.items() if n not in trained}
        part = replace(
            state,
            params={n: v for n, v in state.params.items() if n in trained},
            frozen={**state.frozen, **others},
            optimizer=state.optimizer["generator"],
        )
        part, metrics = self._step(part, call)
        values = {**part.frozen, **part.params}
        state = replace(
            part,
            params={n: values[n] for n in state.params},
            frozen={n: values[n] for n in state.frozen},
            optimizer={**state.optimizer, "generator": part.optimizer},
        )
        own = ("loss", "skipped")
        named = {n if n in own else f"generator/{n}": v for n, v in metrics.items()}
        return state, {**named, "generator/loss": metrics["loss"]}


class FirstScales:
    """The discriminator's step, before which its `ActNorm`s take their scales from the first batch.

    With accumulation, the first part of the batch decides the scales. If the batch does not give
    the numbers that `augment` draws, they are drawn once for the scales and again for the step.

    Args:
        step: The step.
        norms: Names of the norms.
        parts: Parts of an update.
    """

    def __init__(self, step: TrainStep, norms: list[str], parts: int) -> None:
        self._step, self._parts = step, parts
        self._flags = [f"{norm}.initialized" for norm in norms]
        self._names = [f"{norm}.{name}" for norm in norms for name in ("loc", "scale")]
        self._scales = jax.jit(self._taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> Any:
        """Take one step."""
        call = self._step.place(*args, **kwargs)
        (batch,), _ = pytree.unflatten(call.spec, call.values)
        found = {
            name: jax.device_put(value, state.params[name].sharding)
            for name, value in self._scales(state, batch).items()
        }
        flags = {name: jnp.ones_like(state.buffers[name]) for name in self._flags}
        state = replace(state, params={**state.params, **found}, buffers={**state.buffers, **flags})
        return self._step(state, call)

    def _taken(self, state: TrainState, batch: Any) -> dict[str, jax.Array]:
        """Return the scales that a state has, or else those of a batch.

        The program decides, as an answer to Python would wait for the devices in each step.
        """

        def of_batch() -> dict[str, jax.Array]:
            part = {name: value[: len(value) // self._parts] for name, value in batch.items()}
            given = {**state.frozen, **state.buffers, **state.params}
            params = {name: given.pop(name) for name in self._step.ported.params}
            key = jax.random.fold_in(state.key, state.step)
            return self._step.ported.apply(params, given, key, part, method="first_scales")[0]

        kept = {name: state.params[name] for name in self._names}
        return jax.lax.cond(state.buffers[self._flags[0]] == 0, of_batch, lambda: kept)


class Stage1Steps:
    """The steps of all epochs of a run, over one state.

    Args:
        modules: The modules on the CPU.
        config: The configuration.
        steps_per_epoch: Updates per epoch.
        on: Changes the ported modules before steps are made of them, such as by sharding.
    """

    def __init__(
        self,
        modules: Stage1,
        config: Config,
        steps_per_epoch: int,
        on: Callable[[PortedModel], Any] | None = None,
    ) -> None:
        self._config, self._gan = config, gan_of(config)
        self._steps_per_epoch = steps_per_epoch
        self.ported = tpuport.convert(modules, verify=False)
        if on is not None:
            on(self.ported)
        loss, epochs = self._gan.loss, config.experiment.epochs
        own = make_optimizer(modules.model.parameters(), config.optimizer)
        schedule = make_schedule(own, config.optimizer, steps_per_epoch, epochs)
        steps = steps_per_epoch * epochs
        self._generator = from_torch(self.ported, own, schedule, steps=steps)
        assert self._gan.disc.optimizer is not None
        other = make_optimizer(modules.discriminator.parameters(), self._gan.disc.optimizer)
        schedule = make_schedule(
            other, self._gan.disc.optimizer, steps_per_epoch, epochs - loss.disc_start
        )
        parts = config.experiment.accu_step
        self._discriminator: Any = make_train_step(
            self.ported,
            _discriminator,
            from_torch(self.ported, other, schedule, steps=steps),
            accumulate=parts,
            trainable="discriminator.**",
        )
        norms = [n for n, m in modules.named_modules() if isinstance(m, ActNorm)]
        if norms:
            self._discriminator = FirstScales(self._discriminator, norms, parts)
        self._made: dict[Active, Any] = {}

    def of(self, epoch: int) -> Any:
        """Return the step of an epoch; those with the same losses share one."""
        active = active_in(self._gan, epoch)
        if active not in self._made:
            steps: dict[str, TrainStep] = {
                "generator": make_train_step(
                    self.ported,
                    partial(_generator, active=active),
                    self._generator,
                    accumulate=self._config.experiment.accu_step,
                    clip_norm=self._config.optimizer.clip_grad_norm or None,
                    ema_decay=self._config.arch.ema_decay,
                    trainable="model.**",
                ),
                "discriminator": self._discriminator,
            }
            both = alternating(**steps)
            self._made[active] = both if active.discriminator else GeneratorOnly(both)
        return self._made[active]

    def phases(self) -> list[tuple[int, Any]]:
        """Return the step of each run of epochs with the same losses, and the epoch it ends at."""
        found: list[tuple[int, Any]] = []
        for epoch in range(self._config.experiment.epochs):
            step = self.of(epoch)
            if found and found[-1][1] is step:
                found.pop()
            found.append((epoch + 1, step))
        return found


def train(
    steps: Stage1Steps,
    batches: Any,
    out: Path,
    config: Config,
    *,
    identity: Mapping[str, Any],
    limit: int | None = None,
    log_every: int = 10,
    sinks: Sequence[Sink],
    watch: Reconstructions | None = None,
) -> torch.nn.Module:
    """Train, or resume after the last checkpoint of the same command.

    Args:
        steps: The steps.
        batches: `Batches` of the images.
        out: Folder of the run, for OUT/states.
        config: The configuration.
        identity: What a resumed run must have been begun with.
        limit: Largest number of updates.
        log_every: Updates between lines of the log.
        sinks: Where numbers and pictures go.
        watch: Draws pictures.

    Returns:
        The trained modules. They have the averaged weights if there are any.

    Raises:
        UsageError: The run was begun otherwise.
    """
    check_run(
        out / "run.json",
        identity,
        "give what the run was begun with, or another --out",
    )
    per_epoch = len(batches)
    every = per_epoch * config.experiment.save_ckpt_freq
    state, step = None, None
    with Checkpoints(out / "states") as saved:
        for end, one in steps.phases():
            last = min(end * per_epoch, limit or end * per_epoch)
            if step is not None and (max(saved.steps, default=0) >= last):
                continue
            step = one
            state = fit(
                step,
                batches,
                steps=last,
                state=state,
                seed=config.seed,
                checkpoints=saved,
                save_every=every,
                log_every=log_every,
                evaluate=watch,
                evaluate_every=None if watch is None else watch.every,
                sinks=sinks,
            )
            if last == limit:
                break
    assert step is not None
    assert state is not None
    return trained(step.load_state(state, ema=config.arch.ema_decay is not None))
