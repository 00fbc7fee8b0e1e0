"""Neither a step of stage 2 nor the loop around it waits for the device between lines of the log.

`jax.transfer_guard` stops nothing on a CPU, whose memory is the host's. So the arrays of a state
are held back: what waits for one of them waits until the gate opens, which it does only after the
next step was begun.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.recogdrive import planner as planners
from recipes.recogdrive import train as training
from recipes.recogdrive.make_data import make_cache
from recipes.recogdrive.train import TrainOptions, make_step, train
from tests.recipes.recogdrive.runs import logged
from tests.recipes.recogdrive.small import CONFIG

# Seconds until a gate opens by itself, and the test fails: else what waits would wait forever.
LIMIT = 20.0
LOG_EVERY = 4


class Gate:
    """Holds arrays back on the device.

    Attributes:
        held: how often it did.
        overdue: whether somebody waited for them until it opened by itself.
    """

    def __init__(self) -> None:
        self.held, self.overdue = 0, False
        self._open = threading.Event()
        self._busy = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, y: y @ x / 256, x))
        self._after = jax.jit(self._pass)
        self._ones = jnp.ones((256, 256))
        jax.block_until_ready(self._busy(self._ones))

    def _pass(self, tree: Any, busy: jax.Array) -> Any:
        zero = jax.pure_callback(self._wait, jax.ShapeDtypeStruct((), jnp.int32), busy[0, 0])

        def later(value: jax.Array) -> jax.Array:
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                return value
            return value + zero.astype(value.dtype)

        return jax.tree.map(later, tree)

    def _wait(self, _: Any) -> Any:
        self.overdue |= not self._open.wait(LIMIT)
        return np.int32(0)

    def hold(self, tree: Any) -> Any:
        """The same arrays, computed once the gate opens."""
        # Compiled, and through once: the program itself is not what is to be waited for.
        if not self.held:
            self._open.set()
            jax.block_until_ready(self._after(tree, self._ones))
        self._open.clear()
        self.held += 1
        # A program with a callback is begun at once, in this thread, if all its inputs are there.
        return self._after(tree, self._busy(self._ones))

    def open(self) -> None:
        """Let everything that was held be computed."""
        self._open.set()


@dataclass
class Gated:
    """A step whose states are held back from the first after a line of the log on, until the step
    after the next line was begun.

    Attributes:
        step: a `TrainStep`.
        gate: what holds them.
        calls: how many steps were begun.
        waited: those that returned only after the gate had opened by itself.
        ready: those with results that were there when they should have been held.
    """

    step: Any
    gate: Gate
    calls: int = 0
    waited: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, state: Any, batch: Any) -> Any:
        self.calls += 1
        if self.calls % LOG_EVERY == 2:  # the first compiles, and the loop waits for that
            state = self.gate.hold(state)
        overdue = self.gate.overdue
        state, metrics = self.step(state, batch)
        if self.gate.overdue and not overdue:
            self.waited.append(self.calls)
        if self.calls > 1 and any(value.is_ready() for value in (*metrics.values(), state.step)):
            self.ready.append(self.calls)
        if self.calls % LOG_EVERY == 1:
            self.gate.open()
        return state, metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gated, dict[int, float]]]:
    """The step of a whole run of stage 2, and the losses in its log."""
    folder, gate, steps = tmp_path_factory.mktemp("trained"), Gate(), []

    def gated(*given: Any) -> Any:
        steps.append(Gated(make_step(*given), gate))
        return steps[-1]

    make_cache(folder / "cache", count=4, tokens=4, width=12)
    options = TrainOptions(size="tiny", batch_size=4, epochs=9, log_every=LOG_EVERY, progress=False)
    # It compiles a sampler, which is none of the loop's.
    validation = mock.Mock(return_value={}, last={"val_l1": 0.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(planners.SIZES, "tiny", CONFIG)
        patch.setattr(training, "make_step", gated)
        patch.setattr(training, "make_validation", mock.Mock(return_value=validation))
        train(folder / "cache", folder / "out", options)
    (step,) = steps
    yield step, logged(folder / "out")
    gate.open()


def test_a_step_returns_before_what_it_is_given_is_there(trained):
    step, _ = trained
    assert step.gate.held == 2
    assert step.waited == []
    assert step.ready == []
    assert step.retraces == 0
    # Nor does the program itself ask the host for anything.
    (compiled,) = step.step._programs.values()
    assert "callback" not in str(compiled.run.jaxpr)


def test_the_loop_reads_nothing_until_the_step_after_a_line_is_begun(trained):
    step, losses = trained
    assert step.calls == 9
    assert not step.gate.overdue
    assert list(losses) == [4, 8, 9]
    assert np.isfinite(list(losses.values())).all()
