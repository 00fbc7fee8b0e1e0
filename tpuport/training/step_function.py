"""One step of training as a pure function: loss, gradients, update, averages."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.model.pure import traced
from tpuport.tracing.core import arguments
from tpuport.tracing.core.constants import Hoisted
from tpuport.tracing.core.gradient_paths import as_torch, value_and_grad
from tpuport.tracing.state.request import TraceRequest, TraceResult
from tpuport.training.first_call_state import settle
from tpuport.training.losses import WEIGHT, loss_and_metrics
from tpuport.training.microbatches import in_parts
from tpuport.training.state import TrainState, ema_update

Metrics = dict[str, jax.Array]

# Among a step's metrics, the number of the first lifted check that failed. `TrainStep` raises it.
CHECK = "tpuport_check"


@dataclass(frozen=True)
class Training:
    """A step of training, to be traced for any devices that the model is on.

    Attributes:
        ported: the ported model.
        method: name of the method that returns the loss, or an output with it.
        optimizer: an optax optimizer, without clipping; None for gradients alone.
        accumulate: number of parts that the batch is split into.
        clip_norm: largest norm of all gradients together, or None.
        ema_decay: decay of the averages of the parameters, or None for no averages.
        skip_nonfinite: whether a step with infinite or NaN gradients changes nothing.
        loss: function from the method's output (with arrays in it) to the loss; None if the output
            is the loss, or has it.
        optimizer_name: name for reports.
        trained: names of the parameters that are trained, the others being frozen; None for all.
    """

    ported: PortedModel
    method: str
    optimizer: optax.GradientTransformation | None
    accumulate: int = 1
    clip_norm: float | None = None
    ema_decay: float | None = None
    skip_nonfinite: bool = False
    loss: Callable[[Any], Any] | None = None
    optimizer_name: str = ""
    trained: frozenset[str] | None = None

    def trained_names(self) -> frozenset[str]:
        """Return the names of the parameters that are trained."""
        return frozenset(self.ported.params) if self.trained is None else self.trained

    def split(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the model's trained parameters, frozen parameters, and buffers."""
        chosen = self.trained_names()
        params = {name: v for name, v in self.ported.params.items() if name in chosen}
        rest = {name: v for name, v in self.ported.params.items() if name not in chosen}
        frozen = {**rest, **self.ported.frozen}
        return params, frozen, {n: v for n, v in self.ported.buffers.items() if n not in frozen}

    def key_of_step(self, state: TrainState) -> jax.Array:
        """Return the key of a step's random numbers.

        Steps that alternate on one model draw numbers of their own from one seed.
        """
        key = state.key
        if self.trained_names() != frozenset(self.ported.params):
            names = " ".join(sorted(self.trained_names()))
            key = jax.random.fold_in(key, zlib.crc32(names.encode()))
        return jax.random.fold_in(key, state.step)


class Trains(Protocol):
    """A training step that `tpuport.compile_for` compiles: a `tpuport.training.TrainStep`."""

    @property
    def training(self) -> Training:
        """Return the definition of the step."""
        ...


@dataclass
class Batch:
    """The flattened arguments of one step, and the records of tracing with them.

    Attributes:
        values: array, tracer or shape of each argument.
        metas: meta tensor of each argument.
        spec: tree structure of the arguments.
        paths: names of the arguments.
        known: concrete values that are known while tracing, by index.
        hoisted: collects the large constants of the host.
        outcomes: results of each trace of the model.
        weighted: for each trace in parts, whether the loss returned their weight.
    """

    values: list[Any]
    metas: list[Any]
    spec: pytree.TreeSpec
    paths: list[str]
    known: dict[int, Any]
    hoisted: Hoisted = field(default_factory=Hoisted)
    outcomes: list[TraceResult] = field(default_factory=list)
    weighted: list[bool] = field(default_factory=list)


def known_values(values: Sequence[Any], accumulate: int) -> dict[int, Any]:
    """Return concrete arguments by index; if the batch is split, only those without dims."""
    return {
        index: value
        for index, value in enumerate(values)
        if not isinstance(value, jax.ShapeDtypeStruct) and (accumulate == 1 or not value.ndim)
    }


def train(training: Training, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Return the state after a step, and its metrics: "loss", "grad_norm", "skipped" and more.

    A step whose check has failed counts as one that is not finite.
    """
    assert training.optimizer is not None
    loss, metrics, grads, has_gradient, carried = gradients(training, state, batch)
    norm = optax.tree.norm(grads)
    if training.clip_norm is not None:
        # torch.nn.utils.clip_grad_norm_ adds 1e-6 too.
        scale = jnp.minimum(1.0, training.clip_norm / (norm + 1e-6))
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    with jax.named_scope("optimizer"):
        update = optax.with_extra_args_support(training.optimizer).update
        updates, optimizer = update(grads, state.optimizer, state.params, has_gradient=has_gradient)
        params: Any = optax.apply_updates(state.params, updates)
    ema = state.ema
    if training.ema_decay is not None:
        ema = ema_update(ema, params, training.ema_decay)
    frozen = {name: carried.get(name, value) for name, value in state.frozen.items()}
    buffers = {name: carried[name] for name in state.buffers}
    after = replace(
        state, params=params, optimizer=optimizer, ema=ema, frozen=frozen, buffers=buffers
    )
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss) & (metrics[CHECK] == 0)
    if training.skip_nonfinite:
        after = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, state)
    else:
        is_finite = jnp.asarray(True)
    skipped = state.skipped + (~is_finite).astype(jnp.int32)
    after = replace(after, step=state.step + 1, skipped=skipped, key=state.key)
    return after, {**metrics, "loss": loss, "grad_norm": norm, "skipped": ~is_finite}


class _Carried(Exception):
    """Signal that calls write to frozen parameters, such as a momentum encoder's: trace again."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


def gradients(training: Training, state: TrainState, batch: Batch) -> Any:
    """Return loss, metrics, gradients, which of them exist, and the state that calls change.

    They are computed at once or part by part. That state is the buffers, and the frozen parameters
    that calls write to.
    """
    carried: dict[str, Any] = {}
    while True:
        try:
            return _gradients(training, state, batch, carried)
        except _Carried as found:
            carried |= {name: state.frozen[name] for name in found.names}


def _gradients(training: Training, state: TrainState, batch: Batch, carried: dict[str, Any]) -> Any:
    frozen = {name: value for name, value in state.frozen.items() if name not in carried}

    def of(params: Any, buffers: Any, key: Any, values: list[Any]) -> Any:
        return measured(training, frozen, batch, params, buffers, key, values)

    key = training.key_of_step(state)

    def differentiate(*given: Any) -> Any:
        value, grads, has_gradient = value_and_grad(of)(*given)
        return value, as_torch(grads), has_gradient

    before = {**state.buffers, **carried}
    if training.accumulate > 1:
        given = replace(state, buffers=before)
        return _accumulated(training.accumulate, differentiate, given, batch, key)
    (loss, (metrics, after)), grads, has_gradient = differentiate(
        state.params, before, key, batch.values
    )
    metrics.pop(WEIGHT, None)
    return loss, metrics, grads, has_gradient, after


def measured(
    training: Training,
    frozen: Any,
    batch: Batch,
    params: Any,
    buffers: Any,
    key: Any,
    values: list[Any],
) -> Any:
    """Return the loss of a batch or of a part of it, with metrics and buffers."""
    given = {**frozen, **buffers, **params}
    metas = batch.metas if training.accumulate == 1 else _metas_of_part(batch.metas, values)

    def request(key: Any, values: list[Any]) -> TraceRequest:
        return TraceRequest(
            training.method,
            {},  # from `given`
            key,
            values,
            metas,
            batch.spec,
            hoist=batch.hoisted.array,
            checks=training.ported._options.checks,
            known_leaves=batch.known,
        )

    outcome = traced(training.ported, request(key, values), given)
    left = settle(training.ported, outcome, request, given, key, values)
    batch.outcomes.append(outcome)
    if training.accumulate > 1:
        _refuse_resized(outcome, buffers)
    changed = _changed_buffers(outcome, buffers, params, frozen, left)
    leaves = arguments.static_leaves(outcome.out_leaves, outcome.out_metas)
    out = pytree.unflatten(outcome.out_spec, leaves)
    loss, metrics = loss_and_metrics(out if training.loss is None else training.loss(out))
    return loss, (metrics | {CHECK: outcome.code}, {**buffers, **changed})


def _accumulated(
    count: int, differentiate: Any, state: TrainState, batch: Batch, key: jax.Array
) -> Any:
    """Compute `gradients` as the mean over parts of a batch, one after another."""
    parts = in_parts(batch.values, batch.paths, count)
    cut = [i for i, value in enumerate(batch.values) if value.ndim]

    def one(carry: Any, given: Any) -> Any:
        buffers, total, decided, weights, failed = carry
        number, pieces = given
        values = list(parts)
        for index, piece in zip(cut, pieces, strict=True):
            values[index] = piece
        (loss, (metrics, buffers)), grads, has_gradient = differentiate(
            state.params, buffers, jax.random.fold_in(key, number), values
        )
        # A parameter has a gradient if any part gave it one.
        decided = jax.tree.map(jnp.logical_or, decided, has_gradient.decided)
        weight = metrics.pop(WEIGHT, jnp.ones(())).astype(jnp.float32)
        failed = jnp.where(failed == 0, metrics.pop(CHECK), failed)
        # Sums of many small terms are kept in float32 or wider. A part of weight 0 may have a
        # mean over nothing, NaN, which must not enter the sum.
        total = jax.tree.map(
            lambda t, g: t + jnp.where(weight == 0, 0, weight * g.astype(t.dtype)),
            total,
            (grads, loss, metrics),
        )
        return (buffers, total, decided, weights + weight, failed), None

    first = [v[0] if i in cut else v for i, v in enumerate(parts)]
    shapes = jax.eval_shape(differentiate, state.params, state.buffers, key, first)
    (loss, (metrics, _)), grads, has_gradient = shapes
    batch.weighted.append(WEIGHT in metrics)
    metrics = {name: m for name, m in metrics.items() if name not in (WEIGHT, CHECK)}
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)),
        (grads, loss, metrics),
    )
    undecided = dict.fromkeys(has_gradient.decided, jnp.asarray(False))
    start = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    carry = (state.buffers, zeros, undecided, *start)
    given = (jnp.arange(count), [parts[i] for i in cut])
    (buffers, total, decided, weights, failed), _ = jax.lax.scan(one, carry, given)
    mean_grads, loss, metrics = jax.tree.map(lambda t: t / weights.astype(t.dtype), total)
    mean_grads = jax.tree.map(lambda m, g: m.astype(g.dtype), mean_grads, grads)
    metrics |= {CHECK: failed}
    return loss, metrics, mean_grads, replace(has_gradient, decided=decided), buffers


def _metas_of_part(metas: list[Any], values: list[Any]) -> list[Any]:
    """Return the metas of a batch's arguments for one part of it."""
    return [
        meta.new_empty(tuple(value.shape)) if value.ndim else meta
        for meta, value in zip(metas, values, strict=True)
    ]


def _refuse_resized(outcome: TraceResult, buffers: Any) -> None:
    """Refuse state that depends on the number of rows, of which each part has only some."""
    for name, value in outcome.state.items():
        if name in buffers and value.shape != buffers[name].shape:
            raise UsageError(
                f"{name!r} has shape {list(buffers[name].shape)} before a part of the batch and"
                f" {list(value.shape)} after it. What to do: train without accumulate=, or call the"
                " ported model once before init() with as many rows as one part has"
            )


def _changed_buffers(
    outcome: TraceResult, buffers: Any, params: Any, frozen: Any, left: frozenset[str]
) -> dict[str, jax.Array]:
    """Return the buffers that a call changed, without the tensors that it only `left` behind.

    Raises:
        UsageError: the call changes state that a step does not carry.
        _Carried: it writes to frozen parameters.
    """
    kept = {n: v for n, v in outcome.state.items() if n not in left}
    changed = {n: v for n, v in kept.items() if n not in params and n not in frozen}
    new = [name for name in changed if name not in buffers]
    if outcome.python_changes:
        new += [n for n in outcome.python_changes.causes if n not in new and n not in left]
    written = [name for name in outcome.state if name in params]
    if new or written:
        what = ", ".join(map(repr, (new or written)[:4]))
        raise UsageError(
            f"the loss function changes {what}, which is "
            + (
                "Python state of the module or state that does not exist yet. What to do: call the"
                " ported model once before init() if it is set up lazily; register what changes"
                " at each step as a buffer"
                if new
                else "a parameter that is trained. What to do: leave its updates to the optimizer"
            )
        )
    if fixed := [name for name in outcome.state if name in frozen]:
        raise _Carried(fixed)
    return changed
