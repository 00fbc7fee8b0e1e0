"""Some steps of training on both sides, in float64."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from tpuport.model.parity.float64 import Float64
from tpuport.verify.ports.original import FixedDropout, Original, settled, value_of
from tpuport.verify.ports.port import Port, port_code
from tpuport.verify.ports.program import double, run
from tpuport.verify.ports.table import OriginalState


@dataclass(frozen=True)
class PortTraining:
    """How both sides train.

    Attributes:
        optimizer: Makes the original's optimizer of its parameters.
        transform: The port's optimizer, of optax.
        steps: The number of steps, with the same arguments and key each.
        ema: Updates of an average, of the original (`(average, model) -> None`) and of the port
            (`(average, params) -> average`); None for no average.
        torch_step: One step of the original, `(model, optimizer, average) -> loss`; zero_grad,
            forward, backward, step and the average if left out.
        jax_step: One step of the port, `(params, opt_state, average, *args, **kwargs) -> (params,
            opt_state, average, loss)`; the same with optax if left out.
    """

    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    transform: Any
    steps: int = 5
    ema: tuple[Callable[..., None], Callable[..., Any]] | None = None
    torch_step: Callable[..., torch.Tensor] | None = None
    jax_step: Callable[..., Any] | None = None


@dataclass
class Trained:
    """Losses of all steps, and the state after each, as one flat array or by leaf."""

    losses: list[float] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)


def train_original(
    original: Original,
    how: PortTraining,
    masks: Sequence[np.ndarray],
    state: OriginalState,
    *,
    wide: bool,
) -> Trained:
    """Train a copy of the original; states are flat, numbered as `state` is."""
    model, args, kwargs = copy.deepcopy((original.model, original.args, original.kwargs))
    average = copy.deepcopy(model) if how.ema else None
    float64 = Float64() if wide else None
    found = Trained()

    def values(module: torch.nn.Module) -> np.ndarray:
        named = [*module.named_parameters(), *module.named_buffers()]
        return state.joined({name: value_of(one, float64) for name, one in named})

    with settled(float64), torch.enable_grad():
        optimizer = how.optimizer(model.parameters())
        for _ in range(how.steps):
            with FixedDropout(masks):
                if how.torch_step is not None:
                    loss = how.torch_step(model, optimizer, average)
                else:
                    optimizer.zero_grad()
                    loss = original.loss(model(*args, **kwargs), *args, **kwargs)
                    loss.backward()
                    optimizer.step()
                    if how.ema is not None:
                        with torch.no_grad():
                            how.ema[0](average, model)
            found.losses.append(float(value_of(loss, float64)))
            found.states.append(values(model))
            if average is not None:
                found.averages.append(values(average))
    return found


def train_port(port: Port, how: PortTraining, trainable: Sequence[bool]) -> Trained:
    """Train the port; states are lists of arrays by leaf."""
    weights = port.weights
    inputs = port.inputs()

    def step(leaves: Any, optimizer: Any, average: Any, arrays: Any) -> Any:
        args, kwargs = port.arguments(arrays)
        params = weights.build(leaves)
        if how.jax_step is not None:
            mean = None if average is None else weights.build(average)
            params, optimizer, mean, loss = how.jax_step(params, optimizer, mean, *args, **kwargs)
            return weights.read(params), optimizer, mean and weights.read(mean), loss

        def loss_of(some: Any) -> Any:
            own = iter(some)
            now = [next(own) if t else x for x, t in zip(leaves, trainable, strict=True)]
            return port.results(weights.build(now), arrays)[1]

        chosen = [x for x, t in zip(leaves, trainable, strict=True) if t]
        loss, grads = jax.value_and_grad(loss_of)(chosen)
        rest = iter(grads)
        grads = weights.only([next(rest) if t else None for t in trainable], trainable)
        now = weights.only(leaves, trainable)
        updates, optimizer = how.transform.update(grads, optimizer, now)
        moved = weights.read(jax.tree.map(lambda p, u: p + u.astype(p.dtype), now, updates))
        new = [m if t else x for m, x, t in zip(moved, leaves, trainable, strict=True)]
        if how.ema is not None:
            average = weights.read(how.ema[1](weights.build(average), weights.build(new)))
        return new, optimizer, average, loss

    with double(True):
        leaves = [np.asarray(x, np.float64) for x in weights.arrays().values()]
        start = weights.build(leaves) if how.jax_step else weights.only(leaves, trainable)
        with port_code():
            optimizer = how.transform.init(start)
        average = list(leaves) if how.ema else None
        carry, structure = jax.tree.flatten((leaves, optimizer, average))
        carry = [np.asarray(x) for x in carry]

        def flat(carry: Any, arrays: Any) -> Any:
            leaves, optimizer, average = jax.tree.unflatten(structure, carry)
            *new, loss = step(leaves, optimizer, average, arrays)
            return [*jax.tree.leaves(tuple(new)), loss]

        program = port.traced(flat, [carry, inputs], wide=True)
        found = Trained()
        for _ in range(how.steps):
            *carry, loss = run(program, [*carry, *inputs], wide=True).out
            new, _, mean = jax.tree.unflatten(structure, carry)
            found.losses.append(float(loss))
            found.states.append(new)
            if mean is not None:
                found.averages.append(mean)
    return found
