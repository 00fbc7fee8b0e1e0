"""Several steps that take turns on one model, each with an optimizer and a loss of its own."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.training.call import PlacedArguments
from tpuport.training.input.sources import HostShard
from tpuport.training.state import TrainState
from tpuport.training.step import Metrics, TrainStep


class Alternating:
    """Steps taken one after another on the same batch, as one step over one state.

        step = alternating(
            discriminator=make_train_step(ported, d_loss, d_optimizer, trainable="d.**"),
            generator=make_train_step(ported, g_loss, g_optimizer, trainable="g.**"),
        )
        state, metrics = step(state, batch)  # metrics["generator/loss"]

    Its state has the optimizers' states by the names of the steps; it can be saved and passed to
    `fit`. `step` counts rounds, `skipped` the steps whose update was skipped.

    Attributes:
        steps: the steps by name.
        ported: the model.
    """

    def __init__(self, steps: dict[str, TrainStep]) -> None:
        self.steps = steps
        self.ported: PortedModel = next(iter(steps.values())).ported

    @property
    def causes(self) -> list[tuple[str, ...]]:
        """Return why each program of all steps was compiled, in the order of compilation."""
        made = [one for step in self.steps.values() for one in step._compiled]
        return [one.causes for one in sorted(made, key=lambda one: one.number)]

    @property
    def retraces(self) -> int:
        """Return the number of programs compiled after the first one of each step."""
        return sum(step.retraces for step in self.steps.values())

    def flops(self) -> int:
        """Return the FLOPs of a round on all devices."""
        return sum(step.flops() for step in self.steps.values())

    def leaves_unread(self, name: str) -> bool:
        """Return whether one of the programs leaves an argument of that name unused."""
        return any(step.leaves_unread(name) for step in self.steps.values())

    @property
    def counts_parts_alike(self) -> bool:
        """Return whether one of the programs has unweighted parts (`accumulate`)."""
        return any(step.counts_parts_alike for step in self.steps.values())

    def share(self) -> HostShard:
        """Return which rows of a batch this process's chips hold."""
        return next(iter(self.steps.values())).share()

    def place(self, *args: Any, share: HostShard | None = None, **kwargs: Any) -> PlacedArguments:
        """Place the arguments of a round on the devices, see `TrainStep.place`."""
        return next(iter(self.steps.values())).place(*args, share=share, **kwargs)

    def init(self, seed: int = 0, *, copy: bool = True) -> TrainState:
        """Make the state before the first round, see `TrainStep.init`."""
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

    def load_state(self, state: TrainState, *, ema: bool = False) -> PortedModel:
        """Load the weights and buffers of a state into the model, and return it."""
        return next(iter(self.steps.values())).load_state(state, ema=ema)

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, Metrics]:
        """Take one step of each, in order; see `TrainStep.__call__`.

        Returns:
            The state after them, and the metrics as "name/loss", with "loss", their sum, and
            "skipped", whether any was.
        """
        call = self.place(*args, **kwargs)
        count, metrics = state.step, {}
        for name, step in self.steps.items():
            # A step's state is donated, and the next step needs the count too, so each gets a copy.
            part, found = step(self._part(state, name, jnp.copy(count)), call)
            state = self._whole(state, name, part)
            metrics |= {f"{name}/{key}": value for key, value in found.items()}
        metrics["loss"] = sum(metrics[f"{name}/loss"] for name in self.steps)
        metrics["skipped"] = jnp.stack([metrics.pop(f"{n}/skipped") for n in self.steps]).any()
        return state, metrics

    def _part(self, state: TrainState, name: str, count: Any) -> TrainState:
        """Return the state for one of the steps, with the others' parameters frozen."""
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
        """Return the joint state after one of the steps."""
        values = {**part.frozen, **part.params}
        return replace(
            part,
            params={n: values[n] for n in state.params},
            frozen={n: values[n] for n in state.frozen},
            optimizer={**state.optimizer, name: part.optimizer},
            ema={**state.ema, **part.ema},
        )


def alternating(**steps: TrainStep) -> Alternating:
    """Combine steps that take turns on a model, such as a GAN's, each with its own `trainable=`.

    Args:
        **steps: the steps by name, in the order in which they are taken.

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
