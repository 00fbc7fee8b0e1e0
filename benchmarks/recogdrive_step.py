"""`python -m benchmarks.recogdrive_step`: a step of ReCogDrive's stage 2 in several ways.

Forward, loss, backward, clipping and AdamW of upstream's small planner (`--upstream DIR`, an
untouched checkout) and of the recipe's own, in float32: eager PyTorch, torch.compile, plain torchax
and tpuport in turn. All have the same weights, batch and noise, and must have the same losses.
Writes docs/recogdrive_step.md.
"""

import argparse
import contextlib
import copy
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import machine, timing
from benchmarks.contestants import (
    COMPILED,
    EAGER,
    OURS,
    PLAIN,
    check_compiler,
    make_plain,
)
from benchmarks.models import Case
from benchmarks.recogdrive_step_page import COMPACT, UPSTREAM, page

PAGE = Path(__file__).parent.parent / "docs" / "recogdrive_step.md"
# Number of compared losses. Those after the first show that the updates are the same, too.
NUM_COMPARED, RTOL = 3, 1e-4
LR, CLIP_NORM = 1e-4, 1.0

Batch = dict[str, torch.Tensor]
Step = Callable[[], float]


@dataclass(frozen=True)
class Options:
    """The settings of the measurement.

    Attributes:
        upstream: Upstream checkout; None for the recipe's planner alone.
        size: Size of the planner.
        batch: Rows of the batch.
        tokens: Hidden states per row; upstream's caches have 2800.
        rounds: Number of rounds, in each of which every contestant takes a step.
        cores: Number of cores that may be used.
    """

    upstream: Path | None = None
    size: str = "small"
    batch: int = 2
    tokens: int = 2800
    rounds: int = 7
    cores: int = 1


@dataclass
class Found:
    """The results, by planner and way.

    Attributes:
        steps: Functions that take a step and return its loss.
        losses: Losses of the first steps.
        errors: Errors of the ways that cannot run it.
        notes: Further notes for the page.
        times: Seconds per step, round by round.
    """

    steps: dict[tuple[str, str], Step] = field(default_factory=dict)
    losses: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    times: dict[tuple[str, str], timing.Series] = field(default_factory=dict)

    def add(self, planner: str, way: str, make: Callable[[], Step]) -> None:
        """Take the first steps in a way, or store the reason why it cannot run."""
        print(f"{planner} planner, {way}", flush=True)
        try:
            step = make()
            self.losses[planner, way] = [step() for _ in range(NUM_COMPARED)]
            self.steps[planner, way] = step
        except Exception as error:  # any error, which the page shows
            if way == OURS:
                raise
            self.errors[planner, way] = _told(error)
            print(self.errors[planner, way], flush=True)


def _told(error: Exception) -> str:
    """Return the error, and the last place in code that is not in a library."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    own = [f for f in traceback.extract_tb(error.__traceback__) if "-packages" not in f.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "nowhere"
    return f"{type(error).__name__} at {place}: {lines[0]}"


def make_batch(options: Options, width: int) -> Batch:
    """Return scenes with made-up hidden states, the noise, and its times."""
    from recipes.recogdrive.layouts import collate
    from recipes.recogdrive.make_data import hidden_states, make_scenes

    samples = [
        {
            **scene.features(),
            "trajectory": scene.trajectory().float(),
            "last_hidden_state": hidden_states(scene, options.tokens, width),
        }
        for scene in make_scenes(options.batch)
    ]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(options.batch, 8, 3, generator=generator)
    times = torch.randint(0, 100, (options.batch,), generator=generator)
    return {**collate(samples), "noise": noise, "times": times}


@contextlib.contextmanager
def _drawn(batch: Batch) -> Iterator[None]:
    """Make torch draw the noise and the times of a batch, since upstream's loss takes neither."""
    kept = torch.randn_like, torch.randint
    torch.randn_like = lambda *_, **__: batch["noise"]
    torch.randint = lambda *_, **__: batch["times"]
    try:
        yield
    finally:
        torch.randn_like, torch.randint = kept


def upstream_loss(planner: Any, batch: Batch) -> torch.Tensor:
    """Return upstream's loss of a batch, with the batch's noise."""
    from recipes.recogdrive import upstream

    with _drawn(batch):
        return upstream.imitation_loss(planner, batch)


def compact_loss(planner: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of the recipe's planner, with the batch's noise."""
    from recipes.recogdrive import kinds

    return kinds.imitation_loss(planner, batch)[0]


class PlannerLoss(torch.nn.Module):
    """A module that computes the loss of a batch whose tensors are separate arguments."""

    def __init__(self, planner: torch.nn.Module, loss: Callable[..., Any], names: Any) -> None:
        super().__init__()
        self.planner, self.loss, self.names = planner, loss, tuple(names)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss of tensors in the order of `names`."""
        return self.loss(self.planner, dict(zip(self.names, values, strict=True)))


@contextlib.contextmanager
def untouched(checkout: Path) -> Iterator[Any]:
    """Import upstream's module unchanged, with stubs for packages that it does not need.

    Only `torch.compile` on two of its functions is disabled, since it is a separate way here.
    """
    import tpuport
    from recipes.recogdrive import upstream

    sys.path.insert(0, str(checkout.resolve()))
    try:
        # No package is named, so none is rewritten.
        with (
            tpuport.porting(absent=upstream.ABSENT, port_modules=False),
            mock.patch.object(torch, "compile", lambda function: function),
        ):
            module = importlib.import_module(upstream.MODULE)
        yield module
    finally:
        sys.path.remove(str(checkout.resolve()))
        for name in [name for name in sys.modules if name.partition(".")[0] == "navsim"]:
            del sys.modules[name]  # so that it is imported again, and ported


def fill_zeros(planner: torch.nn.Module) -> torch.nn.Module:
    """Fill parameters that are zero with small numbers, since zero gates would hide the blocks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in planner.parameters():
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return planner


# The ways.


def eager_step(module: torch.nn.Module, batch: Batch) -> Step:
    """Return a step in PyTorch, whether or not the module is compiled."""
    from recipes.recogdrive.train import BETAS, WEIGHT_DECAY

    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def step() -> float:
        optimizer.zero_grad()
        loss = module(*batch.values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        return loss.item()

    return step


def compiled_step(module: PlannerLoss, batch: Batch, *, whole: bool) -> Step:
    """Return a step under torch.compile of the module, or of its planner alone."""
    check_compiler()
    (module if whole else module.planner).compile(dynamic=False)
    return eager_step(module, batch)


def plain_step(module: PlannerLoss, batch: Batch) -> Step:
    """Return a step with plain torchax and optax, with a donated state."""
    import jax
    import jax.numpy as jnp
    import optax

    from recipes.recogdrive.train import BETAS, WEIGHT_DECAY

    args = tuple(jnp.asarray(value.numpy()) for value in batch.values())
    pure = make_plain(Case("planner", module, tuple(batch.values())), args)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(LR, b1=BETAS[0], b2=BETAS[1], weight_decay=WEIGHT_DECAY),
    )

    def update(params: Any, state: Any, rest: Any, args: Any) -> Any:
        loss, grads = jax.value_and_grad(pure.call)(params, rest, args)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss

    jitted = jax.jit(update, donate_argnums=(0, 1))
    params: Any = jax.tree.map(jnp.copy, pure.params)
    state: Any = optimizer.init(params)

    def step() -> float:
        nonlocal params, state
        params, state, loss = jax.block_until_ready(jitted(params, state, pure.rest, args))
        return float(loss)

    return step


def ported_step(planner: torch.nn.Module, kind: Any, loss: Callable[..., Any], batch: Batch) -> Any:
    """Return a step as the recipe trains it, at the schedule's highest rate."""
    import jax

    from recipes.recogdrive.train import TrainOptions, make_step, port_planner

    options = TrainOptions(lr=LR, warmup_epochs=0, clip_norm=CLIP_NORM, ema_decay=None)
    made = make_step(port_planner(planner, kind, options), loss, options, steps_per_epoch=10**6)
    state, placed = made.init(copy=False), made.place(batch)

    def step() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(made(state, placed))
        assert made.retraces == 0
        return float(metrics["loss"])

    return step


# All of it.


def measure(options: Options) -> Found:
    """Measure every way of every planner."""
    from recipes.recogdrive import upstream
    from recipes.recogdrive.kinds import OURS as KIND
    from recipes.recogdrive.kinds import imitation_loss
    from recipes.recogdrive.planner import SIZES, make_planner

    torch.set_num_threads(options.cores)
    batch, found = make_batch(options, SIZES[options.size].state_width), Found()
    compact = fill_zeros(make_planner(options.size))
    modules = {COMPACT: PlannerLoss(compact, compact_loss, batch)}
    _torch_ways(found, COMPACT, modules[COMPACT], batch)
    if options.upstream is not None:
        with untouched(options.upstream) as upstream_module:
            theirs = upstream.build_planner(upstream_module, options.size)
            theirs.load_state_dict(compact.state_dict())
            modules[UPSTREAM] = PlannerLoss(theirs, upstream_loss, batch)
            _torch_ways(found, UPSTREAM, modules[UPSTREAM], batch)
    # Set after torch.compile, whose C++ compilers may use all cores, and before XLA makes a thread
    # for each usable core.
    machine.use_cores(options.cores)
    for name, module in modules.items():
        found.add(name, PLAIN, lambda m=module: plain_step(m, batch))
    if options.upstream is not None:
        _ported_upstream(options.upstream, options.size, compact.state_dict(), batch, found)
    found.add(COMPACT, OURS, lambda: ported_step(compact, KIND, imitation_loss, batch))
    check_losses(found)
    steps = {f"{planner}, {way}": step for (planner, way), step in found.steps.items()}
    times = timing.interleaved(steps, rounds=options.rounds, seconds=0)
    found.times = dict(zip(found.steps, times.values(), strict=True))
    return found


def _torch_ways(found: Found, name: str, module: PlannerLoss, batch: Batch) -> None:
    """Add eager and compiled steps. Dynamo needs code that can be imported by its name."""
    found.add(name, EAGER, lambda: eager_step(copy.deepcopy(module), batch))
    compiled = copy.deepcopy(module)
    found.add(name, COMPILED, lambda: compiled_step(compiled, batch, whole=name == COMPACT))
    _note_graphs(found, name)


def _note_graphs(found: Found, name: str) -> None:
    """Note how many graphs torch.compile made, and where it broke off."""
    from torch._dynamo.utils import counters

    breaks, graphs = counters["graph_break"], counters["stats"]["unique_graphs"]
    causes = "; ".join(dict.fromkeys(str(cause).splitlines()[0] for cause in breaks))
    told = f"breaks off at {causes}" if breaks else "never breaks off"
    number = "1 graph" if graphs == 1 else f"{graphs} graphs"
    found.notes.append(f"`torch.compile` makes {number} of {name} planner, and {told}.")
    counters.clear()


def _ported_upstream(checkout: Path, size: str, weights: Any, batch: Batch, found: Found) -> None:
    from recipes.recogdrive.kinds import upstream_kind
    from recipes.recogdrive.upstream import upstream_planner

    with upstream_planner(checkout) as make:
        planner = make(size)
        planner.load_state_dict(weights)
        kind = upstream_kind(make)
        found.add(UPSTREAM, OURS, lambda: ported_step(planner, kind, upstream_loss, batch))


def check_losses(found: Found) -> None:
    """Raise `RuntimeError` unless all ways found the same losses in their first steps."""
    (first, expected), *others = found.losses.items()
    for who, losses in others:
        pairs = list(zip(losses, expected, strict=True))
        if not all(abs(a - b) <= RTOL * abs(b) for a, b in pairs):
            raise RuntimeError(f"the losses of {who} are {losses}, those of {first} {expected}")


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=Path, help="an untouched checkout of recogdrive")
    parser.add_argument("--size", default=Options.size)
    for name in ("batch", "tokens", "rounds", "cores"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Options, name))
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    given = vars(parser.parse_args())
    out = given.pop("out")
    options = Options(**given)
    text = page(options, measure(options))
    out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
