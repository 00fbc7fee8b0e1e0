"""`python -m benchmarks.mae_dit`: MAE-DiT's steps, features and samples against PyTorch.

Steps of the small configurations of `recipes/mae_dit` (forward, backward, clipping, AdamW,
averages; stage 1 with all losses and its discriminator), the Inception network of FID, and a
sampler as one scan against Python loops. All ways come to the same numbers first. Prints medians
of each way's seconds, and how many times as fast as it tpuport is in the rounds, in wall time.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import tpuport
from benchmarks import machine
from benchmarks.contestants import COMPILED, EAGER, OURS, check_compiler
from benchmarks.timing import faster, interleaved
from recipes.mae_dit.config import Config, load
from recipes.mae_dit.discriminator import make_discriminator
from recipes.mae_dit.evaluation.inception import FIDInception
from recipes.mae_dit.evaluation.lpips import LPIPS
from recipes.mae_dit.losses import Stage1, active_in, gan_of
from recipes.mae_dit.models import make_autoencoder, make_stage2
from recipes.mae_dit.schedules import make_optimizer, make_schedule
from recipes.mae_dit.stage1 import Stage1Steps
from recipes.mae_dit.stage2.samplers import euler, predictor
from recipes.mae_dit.stage2.training import Stage2, make_step

CONFIGS = Path(__file__).parent.parent / "recipes" / "mae_dit" / "configs"
SCAN, PROGRAM_LOOP = "one scan", "a loop over a program"
NUM_COMPARED, RTOL = 3, 1e-3
_PER_EPOCH = 100  # updates; only the schedule depends on it
Ways = dict[str, Callable[[], Any]]


class EagerUpdates:
    """The optimizer, schedule and averages of a part of a model, in eager PyTorch."""

    def __init__(self, module: nn.Module, options: Any, epochs: int, decay: float | None) -> None:
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(self._trained, options)
        self._schedule = make_schedule(self._optimizer, options, _PER_EPOCH, epochs)
        self._clip, self._decay = options.clip_grad_norm, decay
        self._averages = [p.detach().clone() for p in self._trained]

    def update(self, loss: torch.Tensor, clip: bool = True) -> None:
        """Take a step along the gradient of a loss."""
        self._optimizer.zero_grad()
        loss.backward()
        if clip and self._clip:
            nn.utils.clip_grad_norm_(self._trained, self._clip)
        self._optimizer.step()
        self._schedule.step()
        if self._decay is not None:
            for average, parameter in zip(self._averages, self._trained, strict=True):
                average.lerp_(parameter.detach(), 1 - self._decay)


def stage_1(rows: int) -> Ways:
    """Return a step of stage 1 in each way, whose call returns the generator's loss."""
    config = load(CONFIGS / "small.yaml")
    gan, epoch = gan_of(config), config.experiment.epochs - 1
    model = make_autoencoder(config)
    modules = Stage1(model, make_discriminator(gan.disc.arch), LPIPS(), gan)
    g = torch.Generator().manual_seed(0)
    batch = {
        "image": torch.rand(rows, 3, 32, 32, generator=g),
        "draws": torch.rand(rows, 3, 7, generator=g),
    }

    def eager(given: Stage1) -> Callable[[], float]:
        assert gan.disc.optimizer is not None
        epochs = config.experiment.epochs
        own = EagerUpdates(given.model, config.optimizer, epochs, config.arch.ema_decay)
        left = epochs - gan.loss.disc_start
        judge = EagerUpdates(given.discriminator, gan.disc.optimizer, left, None)
        active = active_in(gan, epoch)

        def step() -> float:
            loss, _ = given.generator(batch, active)
            own.update(loss)
            judge.update(given.discriminate(batch)[0], clip=False)
            return loss.item()

        return step

    def ours() -> Callable[[], float]:
        steps = Stage1Steps(modules, config, _PER_EPOCH).of(epoch)
        return _stepping(steps, batch, "generator/loss")

    def parts(given: Stage1) -> Stage1:
        for name in ("model", "discriminator", "perceptual"):
            setattr(given, name, torch.compile(getattr(given, name), dynamic=False))
        return given

    return _ways(modules, ours, eager, parts)


def stage_2(rows: int) -> Ways:
    """Return a step of stage 2 on latents in each way, whose call returns the loss."""
    config = load(CONFIGS / "small_stage2.yaml")
    modules = Stage2(_denoiser(config))
    g = torch.Generator().manual_seed(0)
    shape = (rows, 64, 4, 4)
    batch = {
        "latent": torch.randn(shape, generator=g),
        "label": (torch.arange(rows) % 4).int(),
        "t": torch.rand(rows, generator=g),
        "noise": torch.randn(shape, generator=g),
        "uniform": torch.rand(rows, generator=g),
    }

    def eager(given: Stage2) -> Callable[[], float]:
        epochs = config.experiment.epochs
        own = EagerUpdates(given.model, config.optimizer, epochs, config.arch.ema_decay)

        def step() -> float:
            loss, _ = given.loss(batch)
            own.update(loss)
            return loss.item()

        return step

    def ours() -> Callable[[], float]:
        return _stepping(make_step(modules, config, _PER_EPOCH), batch, "loss")

    def parts(given: Stage2) -> Stage2:
        denoiser = given.model.conditional.denoiser
        given.model.conditional.denoiser = torch.compile(denoiser, dynamic=False)
        return given

    return _ways(modules, ours, eager, parts)


def _denoiser(config: Config) -> nn.Module:
    """Return the model of stage 2 without zeros, which would hide what blocks compute."""
    made = make_stage2(config)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.05)
    return made


def _stepping(step: Any, batch: dict[str, torch.Tensor], name: str) -> Callable[[], float]:
    state, placed = [step.init()], step.place(batch)

    def once() -> float:
        state[0], metrics = step(state[0], placed)
        return float(metrics[name])

    return once


def _ways(
    modules: Any,
    ours: Callable[[], Callable[[], float]],
    eager: Callable[[Any], Callable[[], float]],
    parts: Callable[[Any], Any],
) -> Ways:
    """Return the ways that come to the same losses, and print why a compiler does not."""
    found = {EAGER: eager(copy.deepcopy(modules))}
    try:
        check_compiler()
        compiled = eager(parts(copy.deepcopy(modules)))
        compiled()
        found[COMPILED] = eager(parts(copy.deepcopy(modules)))
    except Exception as error:
        print(f"  {COMPILED} does not run: {str(error).strip().splitlines()[0]}", flush=True)
    found[OURS] = ours()
    losses = {name: [step() for _ in range(NUM_COMPARED)] for name, step in found.items()}
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses[EAGER], rtol=RTOL, err_msg=name)
    return found


def features(rows: int) -> Ways:
    """Return Inception's features of images in each way."""
    network = FIDInception()
    images = torch.rand(rows, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ported: Any = tpuport.convert(network, verify=False)

    def eager() -> torch.Tensor:
        with torch.no_grad():
            return network(images).pool

    def ours() -> torch.Tensor:
        return tpuport.to_torch(ported(images).pool)

    wanted = eager()
    assert float((ours() - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    return {EAGER: eager, OURS: ours}


def samples(rows: int, steps: int) -> Ways:
    """Return latents of Euler's method in each way."""
    network: Any = _denoiser(load(CONFIGS / "small_stage2.yaml"))
    denoiser = network.denoiser.eval()
    ported = tpuport.convert(denoiser, verify=False)
    g = torch.Generator().manual_seed(0)
    start, labels = torch.randn(rows, 64, 4, 4, generator=g), torch.arange(rows) % 4
    x, y = jnp.asarray(start.numpy()), jnp.asarray(labels.int().numpy())
    predict = predictor(ported, ported.params)
    scan = jax.jit(lambda x, y: euler(predict, steps, x, y))
    program = jax.jit(lambda x, t, y: x - predict(x, jnp.full(rows, t), y) / steps)
    times = np.linspace(1, 0, steps + 1, dtype=np.float32)[:-1]

    def eager() -> np.ndarray:
        found = start
        with torch.no_grad():
            for t in times:
                found = found - denoiser(found, torch.full((rows,), float(t)), labels) / steps
        return found.numpy()

    def loop() -> np.ndarray:
        found = x
        for t in times:
            found = program(found, t, y)
        return np.asarray(found)

    ways: Ways = {EAGER: eager, PROGRAM_LOOP: loop, SCAN: lambda: np.asarray(scan(x, y))}
    wanted = eager()
    for name, way in ways.items():
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(way(), wanted, rtol=0, atol=RTOL * scale, err_msg=name)
    return ways


CASES: dict[str, tuple[Callable[[int], Ways], str, str]] = {
    "stage 1": (stage_1, OURS, "images"),
    "stage 2": (stage_2, OURS, "latents"),
    "features": (features, OURS, "images"),
    "samples": (partial(samples, steps=50), SCAN, "samples"),
}


def measure(name: str, rows: int, rounds: int, seconds: float) -> list[str]:
    """Return lines of what each way takes, and how it compares."""
    make, ours, what = CASES[name]
    times = interleaved(make(rows), rounds=rounds, seconds=seconds)
    lines = [f"{name}, {rows} {what}:"]
    for way, series in times.items():
        median = statistics.median(series.wall)
        lines.append(f"  {way}: {median:.4f} s, {rows / median:.1f} {what}/s")
    others = [way for way in times if way != ours]
    return [*lines, *(f"  {ours}: {line}" for line in faster(times, ours, others))]


def main(given: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="by default all")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all ways in turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in a round")
    parser.add_argument("--cores", type=int, default=1, help="cores that may be used")
    options = parser.parse_args(given)
    machine.use_cores(options.cores)
    torch.set_num_threads(options.cores)
    about = machine.describe()
    print(f"{about['processor']}, {options.cores} of {about['cores']} cores", flush=True)
    for name in options.cases or CASES:
        print("\n".join(measure(name, options.rows, options.rounds, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
