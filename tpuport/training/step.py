"""A training step as one program: loss, gradients, update, averages, in the old state's memory."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.cost import count_jaxpr
from tpuport.diagnosis.explain import explaining
from tpuport.foundation.errors import UsageError
from tpuport.model.call_errors import CallErrors
from tpuport.model.ported_model import PortedModel
from tpuport.model.program_cache import JittedProgram, Signature, release, retrace_causes
from tpuport.sharding.shard import argument_name
from tpuport.tracing.core.keys import unused_key
from tpuport.tracing.state.request import TraceResult
from tpuport.training.call import PlacedArguments, placed, placed_part, share_of
from tpuport.training.first_call_state import settled
from tpuport.training.first_gradients import compare_first
from tpuport.training.input.sources import HostShard
from tpuport.training.optimizer_state import as_optimizer, optimizer_state
from tpuport.training.state import TrainState, copy_all, ema_of
from tpuport.training.step_function import CHECK, Batch, Metrics, Training, known_values, train
from tpuport.training.trainable import refuse_shared_memory, trained_names

# Prefix of the method names under which loss functions are added to the model.
LOSS = "training_loss"

# Numbers all programs in the order of compilation, across the steps of `Alternating`.
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class _Compiled:
    """A compiled step for one signature of arguments."""

    run: JittedProgram
    outcome: TraceResult
    signature: Signature
    causes: tuple[str, ...]
    paths: list[str]
    number: int
    counts_parts_alike: bool


class TrainStep:
    """One step of training as a function of a `TrainState`; made by `make_train_step`.

        state = step.init(seed=0)
        for batch in batches:
            state, metrics = step(state, batch)
        step.load_state(state)  # into the ported model, to save or to evaluate

    Attributes:
        ported: the model, whose own `params` do not change until `load_state`.
        optimizer: the optax optimizer, without clipping.
        retraces: the number of programs compiled after the first.
        trained: the names of the parameters that it changes.
    """

    def __init__(self, training: Training) -> None:
        assert training.optimizer is not None
        self.ported = training.ported
        self.optimizer = training.optimizer
        self.trained = training.trained_names()
        self._training = training
        self._programs: dict[Signature, _Compiled] = {}
        self._compiled: list[_Compiled] = []
        # Steps that may still be running, and the numbers of their failed checks.
        self._unread: deque[CallErrors] = deque()

    @property
    def training(self) -> Training:
        """Return the definition of the step, which `tpuport.compile_for` compiles ahead of time."""
        return self._training

    @property
    def retraces(self) -> int:
        """Return the number of programs compiled after the first."""
        return max(len(self._compiled) - 1, 0)

    @property
    def causes(self) -> list[tuple[str, ...]]:
        """Return why each program was compiled: nothing for the first, then what changed."""
        return [one.causes for one in self._compiled]

    def flops(self) -> int:
        """Return the FLOPs of the last program on all devices, recomputation included.

        Raises:
            UsageError: no step was taken yet.
        """
        if not self._compiled:
            raise UsageError("no step was taken yet: its FLOPs are those of its program")
        return count_jaxpr(self._compiled[-1].run.jaxpr, modules=()).flops

    @property
    def counts_parts_alike(self) -> bool:
        """Return whether the last program has unweighted parts (`accumulate` without "weight")."""
        return self._compiled[-1].counts_parts_alike

    def leaves_unread(self, name: str) -> bool:
        """Return whether the last program leaves an argument unused, such as `0.mask`.

        Args:
            name: the full name, with the argument's place in the call, or its last part alone.

        Raises:
            UsageError: there is none.
        """
        last = self._compiled[-1]
        used = {var for eqn in last.run.jaxpr.eqns for var in eqn.invars if isinstance(var, Var)}
        names = [argument_name(path) for path in last.paths]
        given = last.run.jaxpr.invars[-len(names) :] if names else []
        found = [
            var
            for var, path in zip(given, names, strict=True)
            if name in (path, path.rpartition(".")[2])
        ]
        if not found:
            raise UsageError(f"leaves_unread: there is no {name!r} among {', '.join(names)}")
        return not any(var in used for var in found)

    def init(self, seed: int = 0, *, copy: bool = True) -> TrainState:
        """Make the state before the first step.

        Args:
            seed: random seed of all numbers that steps draw.
            copy: if False, use the model's own arrays, which are donated to the first step. Until
                `load_state` the model then has no values, and the weights are in memory once.
        """
        parts = self._training.split()
        params, frozen, buffers = copy_all(parts) if copy else parts
        mesh, whole, places = self.ported.mesh, None, None
        if mesh is not None:
            whole = NamedSharding(mesh, PartitionSpec())
            _, places = optimizer_state(self.ported, self.optimizer, params)
        # Made under jit: jax cannot put a key on the devices of other processes.
        counts = jax.jit(
            lambda: (jnp.int32(0), jnp.int32(0), jax.random.key(seed)), out_shardings=whole
        )()
        return TrainState(
            params=params,
            frozen=frozen,
            buffers=buffers,
            optimizer=jax.jit(self.optimizer.init, out_shardings=places)(params),
            ema=ema_of(params) if self._training.ema_decay is not None else {},
            step=counts[0],
            skipped=counts[1],
            key=counts[2],
        )

    def load_state(self, state: TrainState, *, ema: bool = False) -> PortedModel:
        """Load the weights and buffers of a state into the model, and return it.

        Args:
            state: the state, which stays valid: the model gets copies, as the next step overwrites
                the arrays.
            ema: whether to use the averages instead of the parameters.
        """
        self._raise_failed(wait=True)
        source = state.with_ema() if ema else state
        params = {n: source.params.get(n, source.frozen.get(n)) for n in self.ported.params}
        frozen = {n: v for n, v in source.frozen.items() if n not in params}
        self.ported.params, self.ported.buffers = copy_all((params, {**source.buffers, **frozen}))
        return self.ported

    # The method's name in the scripts of the first users.
    put = load_state

    def share(self) -> HostShard:
        """Return which rows of a batch this process's chips hold, for `place`.

        Raises:
            UsageError: there are several processes and no mesh over them.
        """
        return share_of(self.ported)

    @explaining()
    def place(self, *args: Any, share: HostShard | None = None, **kwargs: Any) -> PlacedArguments:
        """Place the arguments of a step on the devices; call the step with the result instead.

        Args:
            *args: the arguments of a step.
            share: the part of the batch that these rows are; if left out, each process has all.
            **kwargs: the keyword arguments of a step.

        Raises:
            UsageError: an argument is of a kind that cannot be passed.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], PlacedArguments):
            return args[0]
        if share is None or jax.process_count() == 1:
            return placed(self.ported, (args, kwargs))
        return placed_part(self.ported, (args, kwargs), share)

    @explaining()
    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, Metrics]:
        """Take one step.

        Args:
            state: the state, whose arrays are donated; use the one that is returned.
            *args: the loss function's arguments after the model: tensors, arrays, structures of
                them, or the result of `place`. With `accumulate` the first dim of each tensor
                with dims is the batch.
            **kwargs: its keyword arguments.

        What eager PyTorch raises for values (an index out of range) is raised by a later step, or
        by `load_state`; with `skip_nonfinite` the step that failed changes nothing.

        Returns:
            The state after it, and scalars that are still being computed: "loss", "grad_norm"
            (before clipping), "skipped" (bool) and the loss function's own metrics. Nothing waits
            for the device.

        Raises:
            PortError: the code cannot be ported exactly.
            ParityError: gradients of the first step differ from eager PyTorch's.
            UsageError: an argument is of a kind that cannot be passed, or the batch cannot be cut.
        """
        call = self.place(*args, **kwargs)
        if not self._compiled:
            compare_first(self._training, state, call)
        compiled = self._programs.get(self._signature(call))
        outside = None if compiled is None else compiled.outcome.trace.recorder.guards.changed()
        self.ported._count_outside(outside)
        if compiled is None or outside is not None:
            compiled = settled(lambda: self._trace_to_jaxpr(state, call))
            # Tracing may have made an argument static, which changes the signature.
            self._programs[self._signature(call)] = compiled
        self._raise_failed(wait=False)
        after, metrics = compiled.run(state, unused_key(), call.values)
        errors = CallErrors(metrics.pop(CHECK), tuple(compiled.outcome.trace.recorder.checks))
        if errors.checks:
            self._unread.append(errors)
        return after, metrics

    def _raise_failed(self, *, wait: bool) -> None:
        """Raise the error of the first step that failed, of those that are done or of all."""
        while self._unread and (wait or _is_done(self._unread[0].code)):
            self._unread.popleft().throw()

    def _signature(self, call: PlacedArguments) -> Signature:
        return self.ported._signature(self._training.method, call)

    def _trace_to_jaxpr(self, state: TrainState, call: PlacedArguments) -> _Compiled:
        known = known_values(call.values, self._training.accumulate)
        batch = Batch(call.values, call.metas, call.spec, call.paths, known)
        places = jax.tree.map(lambda value: value.sharding, state)

        def program(state: TrainState, key: Any, values: list[Any]) -> Any:
            del key
            after, metrics = train(self._training, state, replace(batch, values=values))
            if self.ported.mesh is not None:
                # Otherwise XLA may choose other shardings, and the next step would be retraced.
                after = jax.lax.with_sharding_constraint(after, places)
            return after, metrics

        with self.ported._precision_scope():
            closed, shape = jax.make_jaxpr(program, return_shape=True)(
                state, unused_key(), call.values
            )
        name = f"train_{self.ported.report.model}"
        place = self.ported._placement.constants
        run = JittedProgram(closed, shape, name, place=place, donate_state=True)
        outcome = batch.outcomes[-1]
        release(outcome)
        signature = self._signature(call)
        causes: tuple[str, ...] = ()
        if self._compiled:
            found = retrace_causes(self._compiled[-1].signature, signature, ())
            # The batch is the first argument of the loss.
            causes = tuple(cause.replace("args[0]", "batch", 1) for cause in found)
        alike = not all(batch.weighted)
        made = _Compiled(run, outcome, signature, causes, call.paths, next(_NUMBERS), alike)
        self._compiled.append(made)
        return self._compiled[-1]


def _is_done(value: Any) -> bool:
    return value.is_ready()


def _name_of(loss: Callable[..., Any] | str, ported: PortedModel) -> str:
    """Return the method name of a loss function, adding it to the model if it is new."""
    if isinstance(loss, str):
        if not callable(getattr(ported._module, loss, None)):
            raise UsageError(f"loss={loss!r}: {ported.report.model} has no method of that name")
        return loss
    return ported._name_of(loss, LOSS)


def make_train_step(
    ported: PortedModel,
    loss: Callable[..., Any] | str = "forward",
    optimizer: Any = "adamw",
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    skip_nonfinite: bool = True,
    trainable: str | Sequence[str] | None = None,
) -> TrainStep:
    """Make a training step of a ported model: one jitted program with a donated state.

    `requires_grad` decides which parameters are trained and which are frozen. Random numbers are
    fresh at each step, and the same for the same seed and step.

    Args:
        ported: made by `tpuport.convert`; shard and stack it before.
        loss: `def loss(model, batch): ...` in PyTorch, called with the module and the step's
            arguments; or the name of a method that returns the loss. It returns a scalar, a pair
            of it and a dict of metrics (scalars), or an output with `loss`. A metric "weight" says
            how many items the loss is a mean over (such as the number of tokens that count): with
            `accumulate` parts are weighted by it.
        optimizer: an optax optimizer or its name ("adamw", "adam", "adafactor", "lion", "sgd").
        accumulate: the number of parts of the batch, run one after another in a scan: memory for
            one part, the gradient of the entire batch.
        clip_norm: the largest global norm of the gradients, as in `clip_grad_norm_`.
        ema_decay: decay of the moving averages of the parameters; by default there are none.
        skip_nonfinite: keep parameters, buffers and optimizer state (an optax schedule's count too)
            where the loss or a gradient is infinite or NaN, and count the skip; False updates them.
        trainable: patterns of the parameters to train, such as "discriminator.**"; the others are
            frozen in this step. By default all with `requires_grad` are trained.

    Raises:
        UsageError: an argument is invalid.
    """
    _check_numbers(accumulate, ema_decay, clip_norm)
    if not ported.params:
        raise UsageError(
            f"{ported.report.model} has no parameter with requires_grad=True: nothing to train"
        )
    refuse_shared_memory(ported)
    chosen = as_optimizer(optimizer)
    if chosen is None:
        raise UsageError("optimizer is None: expected one of optax's or the name of one")
    training = Training(
        ported,
        _name_of(loss, ported),
        chosen,
        accumulate=accumulate,
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        skip_nonfinite=skip_nonfinite,
        trained=trained_names(ported, trainable) if trainable is not None else None,
        optimizer_name=optimizer if isinstance(optimizer, str) else "of your own",
    )
    return TrainStep(training)


def _check_numbers(accumulate: int, ema_decay: float | None, clip_norm: float | None) -> None:
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}: expected the number of parts, 1 or more")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise UsageError(f"ema_decay={ema_decay}: expected a rate from 0 up to 1, such as 0.999")
    if clip_norm is not None and clip_norm <= 0:
        raise UsageError(f"clip_norm={clip_norm}: expected the largest norm, above 0, or None")
