"""Several steps that take turns on one model, each with an optimizer and a loss of its own."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from tpuport.errors import UsageError
from tpuport.model.ported import PortedModel
from tpuport.program.train_state import TrainState
from tpuport.training.call import PlacedArguments
from tpuport.training.input.sources import Share
from tpuport.training.step import Metrics, TrainStep


class Alternating:
    """Steps taken one after another on the same batch, as one step over one state.

        step = alternating(
            discriminator=make_train_step(ported, d_loss, d_optimizer, trainable="d.**"),
            generator=make_train_step(ported, g_loss, g_optimizer, trainable="g.**"),
        )
        state, metrics = step(state, batch)  # metrics["generator/loss"]

    Its state has the optimizers' states by the names of the steps; it can be saved, and given to
    `fit`. `step` counts rounds, `skipped` the steps that left everything as it was.

    Attributes:
        steps: by name.
        ported: the model.
    """

    def __init__(self, steps: dict[str, TrainStep]) -> None:
        self.steps = steps
        self.ported: PortedModel = next(iter(steps.values())).ported

    @property
    def causes(self) -> list[tuple[str, ...]]:
        """Why each program was compiled, of all steps, in the order in which they were."""
        made = [one for step in self.steps.values() for one in step._compiled]
        return [one.causes for one in sorted(made, key=lambda one: one.number)]

    @property
    def retraces(self) -> int:
        """How many programs were compiled after the first one of each step."""
        return sum(step.retraces for step in self.steps.values())

    def flops(self) -> int:
        """Floating-point operations of a round on all devices."""
        return sum(step.flops() for step in self.steps.values())

    def leaves_unread(self, name: str) -> bool:
        """Whether one of the programs does not use an argument of that name."""
        return any(step.leaves_unread(name) for step in self.steps.values())

    @property
    def counts_parts_alike(self) -> bool:
        """Whether one of the programs has parts whose loss gave no "weight"."""
        return any(step.counts_parts_alike for step in self.steps.values())

    def share(self) -> Share:
        """Which rows of a batch this process's chips hold."""
        return next(iter(self.steps.values())).share()

    def place(self, *args: Any, share: Share | None = None, **kwargs: Any) -> PlacedArguments:
        """The arguments of a round on the devices, see `TrainStep.place`."""
        return next(iter(self.steps.values())).place(*args, share=share, **kwargs)

    def init(self, seed: int = 0, *, copy: bool = True) -> TrainState:
        """The state before the first round, see `TrainStep.init`."""
        states = {name: step.init(seed, copy=copy) for name, step in self.steps.items()}
        first = next(iter(states.values()))
        params = {n: v for state in states.values() for n, v in state.params.items()}
        return replace(
            first,
            params=params,
            frozen={n: v for n, v in first.frozen.items() if n not in params},
            optimizer={name: state.optimizer for name, state in states.items()},
            ema={n: v for state in states.values() for n, v in state.ema.items()},
        )

    def put(self, state: TrainState, *, ema: bool = False) -> PortedModel:
        """Give the model the weights and buffers of a state, and return it."""
        return next(iter(self.steps.values())).put(state, ema=ema)

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, Metrics]:
        """One step of each, in order; see `TrainStep.__call__`.

        Returns:
            The state after them, and the metrics as "name/loss", with "loss", their sum, and
            "skipped", whether any was.
        """
        call = self.place(*args, **kwargs)
        count, metrics = state.step, {}
        for name, step in self.steps.items():
            # A step gives its memory away; the count is needed once more for the next one.
            part, found = step(self._part(state, name, jnp.copy(count)), call)
            state = self._whole(state, name, part)
            metrics |= {f"{name}/{key}": value for key, value in found.items()}
        metrics["loss"] = sum(metrics[f"{name}/loss"] for name in self.steps)
        metrics["skipped"] = jnp.stack([metrics.pop(f"{n}/skipped") for n in self.steps]).any()
        return state, metrics

    def _part(self, state: TrainState, name: str, count: Any) -> TrainState:
        """The state as one of the steps has it: what the others train is frozen."""
        trained = self.steps[name].trained
        params = {n: v for n, v in state.params.items() if n in trained}
        others = {n: v for n, v in state.params.items() if n not in trained}
        return replace(
            state,
            params=params,
            frozen={**state.frozen, **others},
            optimizer=state.optimizer[name],
            ema={n: v for n, v in state.ema.items() if n in trained},
            step=count,
        )

    def _whole(self, state: TrainState, name: str, part: TrainState) -> TrainState:
        """The state after one of the steps."""
        values = {**part.frozen, **part.params}
        return replace(
            part,
            params={n: values[n] for n in state.params},
            frozen={n: values[n] for n in state.frozen},
            optimizer={**state.optimizer, name: part.optimizer},
            ema={**state.ema, **part.ema},
        )


def alternating(**steps: TrainStep) -> Alternating:
    """One step of several that take turns on a model: a GAN's, with `trainable=` of its own each.

    Args:
        **steps: by name, in the order in which they are taken.

    Raises:
        UsageError: they are of different models, or train the same parameters.
    """
    if not steps:
        raise UsageError("alternating: expected steps by name, such as alternating(generator=step)")
    first, *others = steps.items()
    owner = dict.fromkeys(first[1].trained, first[0])
    for name, step in others:
        if step.ported is not first[1].ported:
            raise UsageError(
                f"alternating: {name} and {first[0]} are of different ported models. What to do:"
                " convert one module that has both, and give each step trainable='part.**'"
            )
        for parameter in sorted(step.trained):
            if parameter in owner:
                raise UsageError(
                    f"alternating: {owner[parameter]} and {name} both train {parameter!r}. What to"
                    " do: give each step trainable= of its own, such as 'generator.**'"
                )
            owner[parameter] = name
    return Alternating(steps)
