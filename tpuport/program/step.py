"""What is compiled: a call of a ported model or a step of its training, as a function of shapes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.errors import UsageError
from tpuport.model import ahead, arguments, structure
from tpuport.model.host_values import Hoisted
from tpuport.model.ported import PortedModel
from tpuport.model.pure import traced
from tpuport.model.random_keys import unused_key
from tpuport.model.request import Request
from tpuport.program.described import shape_of
from tpuport.program.losses import loss_and_metrics

LEARNING_RATE = 1e-4
OPTIMISERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(LEARNING_RATE),
    "adam": lambda: optax.adam(LEARNING_RATE),
    "adafactor": lambda: optax.adafactor(LEARNING_RATE),
    "lion": lambda: optax.lion(LEARNING_RATE),
    "sgd": lambda: optax.sgd(LEARNING_RATE, momentum=0.9),
}


@dataclass
class Step:
    """A function with the shapes and places of its arguments, ready to be traced.

    Attributes:
        function: of `arguments`, in order.
        arguments: by name: "params", "optimiser", "buffers", "key", "inputs".
        donated: the numbers of those whose memory the results take over.
        out_shardings: where the results go; None where the partitioner decides.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    donated: tuple[int, ...]
    out_shardings: Any
    hoisted: Hoisted = field(default_factory=Hoisted)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from `inputs`.

    Args:
        inputs: a tuple of positional arguments, a dict of keyword arguments, or a pair of both.

    Raises:
        UsageError: it is none of these.
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


def forward_step(ported: PortedModel, method: str, inputs: Any) -> Step:
    """A call of a method, with what it leaves in buffers.

    Args:
        ported: on a mesh, with shapes for weights.
        method: which method.
        inputs: see `as_call`.
    """
    hoisted = Hoisted()
    call, values, key = _call(ported, method, inputs, hoisted)

    def forward(params: Any, buffers: Any, key: Any, inputs: Any) -> Any:
        outcome = call(params, buffers, key, inputs)
        return outcome.out_leaves, outcome.state

    given = {"params": ported.params, "buffers": ported.buffers, "key": key, "inputs": values}
    return Step(forward, given, (), None, hoisted)


def training_step(ported: PortedModel, method: str, inputs: Any, loss: Any, optimiser: Any) -> Step:
    """Loss, gradients, and the optimiser's update in the memory of the old parameters and state.

    Args:
        ported: on a mesh, with shapes for weights.
        method: which method.
        inputs: see `as_call`.
        loss: of the output (with arrays in it), a scalar; True for its attribute or key `loss`, or
            itself if it is a scalar.
        optimiser: one of optax's, the name of one, or None for gradients alone.
    """
    hoisted = Hoisted()
    call, values, key = _call(ported, method, inputs, hoisted)
    chosen = as_optimiser(optimiser)
    places = {name: value.sharding for name, value in ported.params.items()}

    def measured(params: Any, buffers: Any, key: Any, inputs: Any) -> Any:
        outcome = call(params, buffers, key, inputs)
        leaves = arguments.static_leaves(outcome.out_leaves, outcome.out_metas)
        out = structure.rebuild(outcome.out_spec, leaves)
        changed = {name: v for name, v in outcome.state.items() if name not in params}
        value, _ = loss_and_metrics(loss(out) if callable(loss) else out)
        return value, changed

    def gradients(params: Any, buffers: Any, key: Any, inputs: Any) -> Any:
        (value, changed), grads = jax.value_and_grad(measured, has_aux=True)(
            params, buffers, key, inputs
        )
        return grads, changed, value

    rest = {"buffers": ported.buffers, "key": key, "inputs": values}
    if chosen is None:
        given = {"params": ported.params, **rest}
        return Step(gradients, given, (), (places, None, None), hoisted)

    def train(params: Any, optimiser: Any, buffers: Any, key: Any, inputs: Any) -> Any:
        grads, changed, value = gradients(params, buffers, key, inputs)
        with jax.named_scope("optimiser"):
            updates, state = chosen.update(grads, optimiser, params)
            params = optax.apply_updates(params, updates)
        return params, state, changed, value

    state, state_places = optimiser_state(ported, chosen)
    given = {"params": ported.params, "optimiser": state, **rest}
    return Step(train, given, (0, 1), (places, state_places, None, None), hoisted)


def as_optimiser(optimiser: Any) -> optax.GradientTransformation | None:
    """One of optax's, by its name or as it is.

    Raises:
        UsageError: it is neither.
    """
    if optimiser is None or isinstance(optimiser, optax.GradientTransformation):
        return optimiser
    if isinstance(optimiser, str) and optimiser in OPTIMISERS:
        return OPTIMISERS[optimiser]()
    raise UsageError(
        f"optimiser: expected an optax.GradientTransformation, None or one of"
        f" {', '.join(OPTIMISERS)}, got {optimiser!r}"
    )


def _call(
    ported: PortedModel, method: str, inputs: Any, hoisted: Hoisted
) -> tuple[Callable[..., Any], list[Any], Any]:
    """The pure function of a method, the places of its arguments, and the shape of its key."""
    taken = ahead.take_apart(*as_call(inputs))
    placement = ported._program.placement
    known = {
        index: value
        for index, value in enumerate(taken.values)
        if not isinstance(value, jax.ShapeDtypeStruct)
    }
    shapes = [
        value if isinstance(value, jax.ShapeDtypeStruct) else shape_of(value)
        for value in taken.values
    ]
    values = placement.arguments(shapes, taken.paths)

    def call(params: Any, buffers: Any, key: Any, values: Any) -> Any:
        given = {**buffers, **params}
        request = Request(
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
            outcome = traced(ported._program, request, given)
        outcome.state = placement.state(outcome.state)
        return outcome

    whole = NamedSharding(placement.mesh, P()) if placement.mesh is not None else None
    key = jax.ShapeDtypeStruct((), unused_key().dtype, sharding=whole)
    return call, values, key


def optimiser_state(
    ported: PortedModel, optimiser: optax.GradientTransformation
) -> tuple[Any, Any]:
    """The shapes of an optimiser's state with their places, and the places alone: state of a
    parameter lies where the parameter does.
    """
    placement: Any = ported._program.placement
    state = jax.eval_shape(optimiser.init, ported.params)
    places = placement.rules.for_state(state, ported, placement.mesh)

    def place(path: tuple[Any, ...], leaf: Any, otherwise: Any) -> Any:
        # The rules know weights by fqn; blocks may be stacked.
        owner: Any = ported.params.get(getattr(path[-1], "key", "")) if path else None
        return otherwise if owner is None or owner.shape != leaf.shape else owner.sharding

    places = jax.tree_util.tree_map_with_path(place, state, places)

    def placed(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(placed, state, places), places
