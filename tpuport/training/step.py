"""A training step as one program: loss, gradients, update, averages, in the old state's memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.diagnosis.explain import explaining
from tpuport.errors import UsageError
from tpuport.model import arguments, structure
from tpuport.model.blocks import at_rest
from tpuport.model.compiled import Executable, Signature, release
from tpuport.model.host_values import Hoisted
from tpuport.model.ported import PortedModel
from tpuport.model.pure import traced
from tpuport.model.random_keys import unused_key
from tpuport.model.request import Outcome, Request
from tpuport.program.losses import WEIGHT, loss_and_metrics
from tpuport.program.step import as_optimiser, optimiser_state
from tpuport.training.batches import in_parts
from tpuport.training.state import TrainState, ema_of, ema_update

# How the names begin under which loss functions are methods of the model.
LOSS = "training_loss"

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, taken apart."""

    values: list[Any]
    metas: list[Any]
    spec: structure.Spec
    paths: list[str]


@dataclass(frozen=True)
class _Compiled:
    """A step for one signature of arguments."""

    run: Executable
    outcome: Outcome


class TrainStep:
    """One step of training as a function of a `TrainState`; made by `make_train_step`.

        state = step.init(seed=0)
        for batch in batches:
            state, metrics = step(state, batch)
        step.put(state)  # into the ported model, to save or to evaluate

    Attributes:
        ported: the model; its own `params` stay as they are until `put`.
        optimiser: one of optax's, without clipping.
        retraces: how many programs were compiled after the first.
    """

    def __init__(
        self,
        ported: PortedModel,
        optimiser: optax.GradientTransformation,
        *,
        method: str,
        accumulate: int,
        clip_norm: float | None,
        ema_decay: float | None,
        skip_nonfinite: bool,
    ) -> None:
        self.ported = ported
        self.optimiser = optimiser
        self._method = method
        self._accumulate = accumulate
        self._clip_norm = clip_norm
        self._ema_decay = ema_decay
        self._skip = skip_nonfinite
        self._programs: dict[Signature, _Compiled] = {}
        self._num_compiled = 0

    @property
    def retraces(self) -> int:
        """How many programs there are beyond the first."""
        return max(self._num_compiled - 1, 0)

    def init(self, seed: int = 0, *, copy: bool = True) -> TrainState:
        """The state before the first step.

        Args:
            seed: of all random numbers that steps draw.
            copy: False hands over the model's own arrays, which the first step overwrites: until
                `put` the model has no values then, and the weights are in memory once.
        """
        take: Callable[[Any], Any] = jnp.copy if copy else lambda value: value
        params = {name: take(value) for name, value in self.ported.params.items()}
        frozen = {name: take(value) for name, value in self.ported.frozen.items()}
        buffers = {n: take(v) for n, v in self.ported.buffers.items() if n not in frozen}
        counts: Any = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jax.random.key(seed)
        mesh, places = self.ported._program.placement.mesh, None
        if mesh is not None:
            counts = jax.device_put(counts, NamedSharding(mesh, PartitionSpec()))
            _, places = optimiser_state(self.ported, self.optimiser)
        return TrainState(
            params=params,
            frozen=frozen,
            buffers=buffers,
            optimiser=jax.jit(self.optimiser.init, out_shardings=places)(params),
            ema=ema_of(params) if self._ema_decay is not None else {},
            step=counts[0],
            skipped=counts[1],
            key=counts[2],
        )

    def put(self, state: TrainState, *, ema: bool = False) -> PortedModel:
        """Give the model the weights and buffers of a state, and return it.

        Args:
            state: it stays valid: the model gets copies, as the next step overwrites the arrays.
            ema: the averages instead of the parameters.
        """
        source = state.with_ema() if ema else state
        self.ported.params = jax.tree.map(jnp.copy, source.params)
        self.ported.buffers = jax.tree.map(jnp.copy, {**source.buffers, **source.frozen})
        return self.ported

    @explaining()
    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, Metrics]:
        """One step.

        Args:
            state: its arrays are overwritten; use the one that is returned.
            *args: the loss function's arguments after the model: tensors, arrays, structures of
                them. With `accumulate` the first dim of each tensor with dims is the batch.
            **kwargs: its keyword arguments.

        Returns:
            The state after it, and scalars that are still being computed: "loss", "grad_norm"
            (before clipping), "skipped" (bool) and the loss function's own metrics. Nothing waits
            for the device.

        Raises:
            PortError: the code cannot be ported exactly.
            UsageError: an argument is of a kind that cannot be passed, or the batch cannot be cut.
        """
        leaves, spec, paths = arguments.take_apart((args, kwargs))
        values, metas = arguments.argument_arrays(leaves, paths)
        call = _Call(self.ported._program.placement.arguments(values, paths), metas, spec, paths)
        compiled = self._programs.get(self._signature(call))
        if compiled is None or compiled.outcome.trace.guards.changed() is not None:
            compiled = self._compile(state, call)
            # Tracing may have found that it needs the value of an argument.
            self._programs[self._signature(call)] = compiled
        return compiled.run(state, unused_key(), call.values)

    def _signature(self, call: _Call) -> Signature:
        return self.ported._signature(self._method, call.values, call.metas, call.paths, call.spec)

    def _compile(self, state: TrainState, call: _Call) -> _Compiled:
        hoisted, held = Hoisted(), []
        places = jax.tree.map(lambda value: value.sharding, state)

        def program(state: TrainState, key: Any, values: list[Any]) -> Any:
            del key
            given = replace(call, values=values)
            after, metrics = self._step(state, given, call.values, hoisted, held)
            if self.ported._program.placement.mesh is not None:
                # Else the partitioner may choose others, and the next step is another program.
                after = jax.lax.with_sharding_constraint(after, places)
            return after, metrics

        with self.ported._precision_scope():
            closed, shape = jax.make_jaxpr(program, return_shape=True)(
                state, unused_key(), call.values
            )
        name = f"train_{self.ported.report.model}"
        run = Executable(closed, shape, name, donate_state=True)
        run.hoisted = self.ported._program.placement.constants(run.hoisted)
        release(held[-1])
        self._num_compiled += 1
        return _Compiled(run, held[-1])

    def _step(
        self, state: TrainState, call: _Call, concrete: list[Any], hoisted: Hoisted, held: list[Any]
    ) -> tuple[TrainState, Metrics]:
        """The pure function that is compiled."""
        # Of a batch that is cut, no part's values are known.
        known = {i: v for i, v in enumerate(concrete) if self._accumulate == 1 or not v.ndim}

        def measured(params: Any, buffers: Any, key: Any, values: list[Any]) -> Any:
            given = {**state.frozen, **buffers, **params}
            request = Request(
                self._method,
                at_rest.unstack(given),
                key,
                values,
                call.metas if self._accumulate == 1 else _metas_of_part(call.metas, values),
                call.spec,
                hoist=hoisted.array,
                checks=False,
                known_leaves=known,
            )
            outcome = traced(self.ported._program, request, given)
            held.append(outcome)
            changed = _changed_buffers(outcome, buffers, params, state.frozen)
            leaves = arguments.static_leaves(outcome.out_leaves, outcome.out_metas)
            loss, metrics = loss_and_metrics(structure.rebuild(outcome.out_spec, leaves))
            return loss, (metrics, {**buffers, **changed})

        key = jax.random.fold_in(state.key, state.step)
        loss, metrics, grads, buffers = self._gradients(measured, state, call, key)
        norm = optax.tree.norm(grads)
        if self._clip_norm is not None:
            # As torch.nn.utils.clip_grad_norm_, which adds 1e-6.
            scale = jnp.minimum(1.0, self._clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        with jax.named_scope("optimiser"):
            updates, optimiser = self.optimiser.update(grads, state.optimiser, state.params)
            params: Any = optax.apply_updates(state.params, updates)
        ema = state.ema
        if self._ema_decay is not None:
            ema = ema_update(ema, params, self._ema_decay)
        after = replace(state, params=params, optimiser=optimiser, ema=ema, buffers=buffers)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if self._skip:
            after = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, state)
        else:
            is_finite = jnp.asarray(True)
        skipped = state.skipped + (~is_finite).astype(jnp.int32)
        after = replace(after, step=state.step + 1, skipped=skipped, key=state.key)
        return after, {**metrics, "loss": loss, "grad_norm": norm, "skipped": ~is_finite}

    def _gradients(self, measured: Any, state: TrainState, call: _Call, key: jax.Array) -> Any:
        """Loss, metrics, gradients and buffers of a batch."""
        differentiate = jax.value_and_grad(measured, has_aux=True)
        if self._accumulate == 1:
            (loss, (metrics, buffers)), grads = differentiate(
                state.params, state.buffers, key, call.values
            )
            metrics.pop(WEIGHT, None)
            return loss, metrics, grads, buffers
        parts = in_parts(call.values, call.paths, self._accumulate)
        cut = [i for i, value in enumerate(call.values) if value.ndim]

        def one(carry: Any, given: Any) -> Any:
            buffers, total, weights = carry
            number, pieces = given
            values = list(parts)
            for index, piece in zip(cut, pieces, strict=True):
                values[index] = piece
            (loss, (metrics, buffers)), grads = differentiate(
                state.params, buffers, jax.random.fold_in(key, number), values
            )
            weight = metrics.pop(WEIGHT, jnp.ones(())).astype(jnp.float32)
            # What is added up is in no less than float32: many small terms. A part that counts
            # for nothing may have a mean over nothing, which is no number.
            total = jax.tree.map(
                lambda t, g: t + jnp.where(weight == 0, 0, weight * g.astype(t.dtype)),
                total,
                (grads, loss, metrics),
            )
            return (buffers, total, weights + weight), None

        first = [v[0] if i in cut else v for i, v in enumerate(parts)]
        shapes = jax.eval_shape(differentiate, state.params, state.buffers, key, first)
        (loss, (metrics, _)), grads = shapes
        metrics = {name: m for name, m in metrics.items() if name != WEIGHT}
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)),
            (grads, loss, metrics),
        )
        carry = (state.buffers, zeros, jnp.zeros((), jnp.float32))
        given = (jnp.arange(self._accumulate), [parts[i] for i in cut])
        (buffers, total, weights), _ = jax.lax.scan(one, carry, given)
        mean_grads, loss, metrics = jax.tree.map(lambda t: t / weights.astype(t.dtype), total)
        mean_grads = jax.tree.map(lambda m, g: m.astype(g.dtype), mean_grads, grads)
        return loss, metrics, mean_grads, buffers


def _metas_of_part(metas: list[Any], values: list[Any]) -> list[Any]:
    """The metas of a batch's arguments for one part of it."""
    return [
        meta.new_empty(tuple(value.shape)) if value.ndim else meta
        for meta, value in zip(metas, values, strict=True)
    ]


def _changed_buffers(
    outcome: Outcome, buffers: Any, params: Any, frozen: Any
) -> dict[str, jax.Array]:
    """The buffers that a call left changed.

    Raises:
        UsageError: it changes what a step does not carry.
    """
    changed = {n: v for n, v in outcome.state.items() if n not in params and n not in frozen}
    new = [name for name in changed if name not in buffers]
    if outcome.python_changes:
        new += [name for name in outcome.python_changes.names if name not in new]
    written = [name for name in outcome.state if name in params or name in frozen]
    if new or written:
        what = ", ".join(map(repr, (new or written)[:4]))
        raise UsageError(
            f"the loss function changes {what}, which is "
            + (
                "Python state of the module or state that is not there yet. What to do: call the"
                " ported model once before init() if it is set up lazily; register what changes"
                " at each step as a buffer"
                if new
                else "a parameter. What to do: leave the updates of parameters to the optimiser"
            )
        )
    return changed


def _name_of(loss: Callable[..., Any], ported: PortedModel) -> str:
    """The name under which a loss function is one of the model's methods, each its own."""
    functions = ported._program.functions
    for name, function in functions.items():
        if function is loss:
            return name
    name = f"{LOSS}_{len(functions)}"
    functions[name] = loss
    return name


def make_train_step(
    ported: PortedModel,
    loss: Callable[..., Any] | str = "forward",
    optimiser: Any = "adamw",
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    skip_nonfinite: bool = True,
) -> TrainStep:
    """A training step of a ported model as one jitted, donated program.

    What is trained, frozen and a buffer is what `requires_grad` says. Random numbers are fresh at
    each step, and the same for the same seed and step.

    Args:
        ported: what `tpuport.convert` gave; shard and stack it before.
        loss: `def loss(model, batch): ...` in PyTorch, called with the module and the step's
            arguments; or the name of a method that gives the loss. It gives a scalar, a pair of it
            and a dict of metrics (scalars), or an output with `loss`. A metric "weight" says what
            the loss is a mean over (such as the number of tokens that count): with `accumulate`
            parts count by it.
        optimiser: one of optax's, or the name of one ("adamw", "adam", "adafactor", "lion", "sgd").
        accumulate: parts that the batch is cut into, one after another in a scan: memory for one
            part, the gradient of the whole.
        clip_norm: the largest norm of all gradients together, as `clip_grad_norm_`.
        ema_decay: keep averages of the parameters that forget at this rate.
        skip_nonfinite: leave everything as it was where the loss or a gradient is infinite or NaN
            (a schedule of optax's, too), and count it; False applies it all the same.

    Raises:
        UsageError: an argument is of no use.
    """
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}: expected the number of parts, 1 or more")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise UsageError(f"ema_decay={ema_decay}: expected a rate from 0 up to 1, such as 0.999")
    if clip_norm is not None and clip_norm <= 0:
        raise UsageError(f"clip_norm={clip_norm}: expected the largest norm, above 0, or None")
    if isinstance(loss, str) and not callable(getattr(ported.module, loss, None)):
        raise UsageError(f"loss={loss!r}: {ported.report.model} has no method of that name")
    if not ported.params:
        raise UsageError(
            f"{ported.report.model} has no parameter with requires_grad=True: nothing to train"
        )
    chosen = as_optimiser(optimiser)
    if chosen is None:
        raise UsageError("optimiser is None: expected one of optax's or the name of one")
    return TrainStep(
        ported,
        chosen,
        method=loss if isinstance(loss, str) else _name_of(loss, ported),
        accumulate=accumulate,
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        skip_nonfinite=skip_nonfinite,
    )
