"""Steps to compile: a call of a ported model or a step of its training, as a function of shapes."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.aot.abstract_model import shape_of
from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.model import lowering
from tpuport.model.ported_model import PortedModel
from tpuport.model.program_cache import CallArguments
from tpuport.model.pure import traced
from tpuport.tracing.core.constants import Hoisted
from tpuport.tracing.core.keys import unused_key
from tpuport.tracing.state.request import TraceRequest
from tpuport.training.optimizer_state import optimizer_state
from tpuport.training.state import TrainState
from tpuport.training.step_function import Batch, Training, gradients, known_values, train


@dataclass
class EntryPoint:
    """A function with the shapes and shardings of its arguments, ready to be traced.

    Attributes:
        function: function of `arguments`, in order.
        arguments: arguments by name: "params", "buffers", "key", "inputs"; for training the rest of
            a `TrainState` too.
        donated: indices of the donated arguments.
        out_shardings: shardings of the results; None where the partitioner decides.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    donated: tuple[int, ...]
    out_shardings: Any
    hoisted: Hoisted = field(default_factory=Hoisted)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split `inputs` into positional and keyword arguments.

    Args:
        inputs: a tuple of positional arguments, a dict of keyword arguments, or a pair of both.

    Raises:
        UsageError: `inputs` is none of these.
    """
    match inputs:
        case (tuple(args), dict(kwargs)):
            return args, dict(kwargs)
        case dict():
            return (), dict(inputs)
        case tuple():
            return inputs, {}
    raise UsageError(
        "inputs: expected a tuple of positional arguments, a dict of keyword arguments or a pair"
        f" (tuple, dict), got a {type(inputs).__name__}"
    )


def forward_step(ported: PortedModel, method: str, inputs: Any) -> EntryPoint:
    """Return the step that calls a method; its results include the changed buffers.

    Args:
        ported: ported model on a mesh, with shapes for weights.
        method: name of the method.
        inputs: see `as_call`.
    """
    hoisted = Hoisted()
    call, values, key = _call(ported, method, inputs, hoisted)

    def forward(params: Any, buffers: Any, key: Any, inputs: Any) -> Any:
        outcome = call(params, buffers, key, inputs)
        return outcome.out_leaves, outcome.state

    given = {"params": ported.params, "buffers": ported.buffers, "key": key, "inputs": values}
    return EntryPoint(forward, given, (), None, hoisted)


def function_step(ported: PortedModel, function: Callable[..., Any], inputs: Any) -> EntryPoint:
    """Return the step of a jax function around a model, such as a loop over `ported.apply`.

    Args:
        ported: ported model on a mesh, with shapes for weights.
        function: function of the model, its `params`, its `buffers`, a key, and the inputs.
        inputs: see `as_call`.
    """
    taken, values = _placed(ported, inputs)

    def around(params: Any, buffers: Any, key: Any, inputs: Any) -> Any:
        args, kwargs = pytree.unflatten(taken.spec, inputs)
        return function(ported, params, buffers, key, *args, **kwargs)

    given = {"params": ported.params, "buffers": ported.buffers, "key": _key(ported)}
    return EntryPoint(around, {**given, "inputs": values}, (), None)


def training_step(training: Training, inputs: Any) -> EntryPoint:
    """Return a training step that donates the old state; without an optimizer, gradients alone.

    Args:
        training: training of a model on a mesh, with shapes for weights.
        inputs: see `as_call`.
    """
    taken, values = _placed(training.ported, inputs)
    known = known_values(taken.values, training.accumulate)
    batch = Batch(values, taken.metas, taken.spec, taken.paths, known)
    state = _state_shapes(training)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)

    # The report shows arguments by these parameters' names.
    def train_step(
        params: Any,
        frozen: Any,
        buffers: Any,
        optimizer: Any,
        ema: Any,
        step: Any,
        skipped: Any,
        key: Any,
        inputs: Any,
    ) -> Any:
        state = TrainState(params, frozen, buffers, optimizer, ema, step, skipped, key)
        now = replace(batch, values=inputs)
        with training.ported._precision_scope():
            if training.optimizer is not None:
                return train(training, state, now)
            loss, _, grads, _, buffers = gradients(training, state, now)
            return grads, buffers, loss

    fields = [field.name for field in dataclasses.fields(state)]
    given = {**{name: getattr(state, name) for name in fields}, "inputs": values}
    if training.optimizer is None:
        return EntryPoint(train_step, given, (), (places.params, None, None), batch.hoisted)
    return EntryPoint(train_step, given, tuple(range(len(fields))), (places, None), batch.hoisted)


def _state_shapes(training: Training) -> TrainState:
    """Return the shapes and shardings of a training state."""
    ported = training.ported
    placement = ported._placement
    whole = NamedSharding(placement.mesh, P()) if placement.mesh is not None else None

    def average(value: Any) -> jax.ShapeDtypeStruct:
        kind = jnp.promote_types(value.dtype, jnp.float32)
        return jax.ShapeDtypeStruct(value.shape, kind, sharding=value.sharding)

    params, frozen, buffers = training.split()
    optimizer: Any = ()
    if training.optimizer is not None:
        optimizer, _ = optimizer_state(ported, training.optimizer, params)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    key: Any = jax.ShapeDtypeStruct((), unused_key().dtype, sharding=whole)
    return TrainState(
        params=params,
        frozen=frozen,
        buffers=buffers,
        optimizer=optimizer,
        ema={} if training.ema_decay is None else jax.tree.map(average, params),
        step=number,
        skipped=number,
        key=key,
    )


def _placed(ported: PortedModel, inputs: Any) -> tuple[CallArguments, list[Any]]:
    """Flatten the arguments of a call; return them, and their shapes with shardings."""
    taken = lowering.flatten_call(*as_call(inputs))
    shapes = [
        value if isinstance(value, jax.ShapeDtypeStruct) else shape_of(value)
        for value in taken.values
    ]
    return taken, ported._placement.arguments(shapes, taken.paths)


def _call(
    ported: PortedModel, method: str, inputs: Any, hoisted: Hoisted
) -> tuple[Callable[..., Any], list[Any], Any]:
    """Return the pure function of a method, its arguments' shapes, and the shape of its key."""
    taken, values = _placed(ported, inputs)
    placement = ported._placement
    known = known_values(taken.values, accumulate=1)

    def call(params: Any, buffers: Any, key: Any, values: Any) -> Any:
        given = {**buffers, **params}
        request = TraceRequest(
            method,
            {},  # from `given`
            key,
            values,
            taken.metas,
            taken.spec,
            hoist=hoisted.array,
            checks=False,
            known_leaves=known,
        )
        with ported._precision_scope():
            outcome = traced(ported, request, given)
        outcome.state = placement.state(outcome.state)
        return outcome

    return call, values, _key(ported)


def _key(ported: PortedModel) -> jax.ShapeDtypeStruct:
    """Return the shape of a key, replicated over the mesh."""
    mesh = ported.mesh
    whole = NamedSharding(mesh, P()) if mesh is not None else None
    return jax.ShapeDtypeStruct((), unused_key().dtype, sharding=whole)
