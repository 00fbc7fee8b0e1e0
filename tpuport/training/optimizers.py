"""torch's optimizers and schedules as optax transformations with the same updates."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.tracing.scan_layers import stacked_params
from tpuport.training import optimizer_updates as updates

# The label of parameters that are in no group.
_NOWHERE = "in no group"
# Options that change no update, or that are handled elsewhere.
_NO_EFFECT = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
# Options, beside the rate, that a schedule may change.
_VARYING = ("betas", "momentum", "weight_decay", "eps", "alpha")


def from_torch(
    ported: PortedModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    steps: int | None = None,
) -> optax.GradientTransformation:
    """Convert a torch optimizer, with its groups and its schedule, to optax.

    A parameter that the loss of a step does not depend on has no gradient in torch, whose
    optimizers then leave it alone: no decay, no momentum, no step counted. So does the result in a
    `make_train_step`, which passes it `has_gradient`; without that, all parameters have one.

    Args:
        ported: made by `tpuport.convert` of the module whose parameters the optimizer has.
        optimizer: AdamW, Adam, Adamax, NAdam, Adagrad, Adadelta, SGD or RMSprop, before its first
            step.
        scheduler: a torch scheduler, or any whose `step()` sets learning rates, momentum or other
            options by the number of the step. They are read by running a copy of it, so each is
            torch's, in float32.
        steps: the number of steps to read them for; then the last ones stay. Needed with a
            scheduler.

    Raises:
        UsageError: there is no such optimizer in optax, its parameters are not the model's, it has
            been used, or the schedule depends on more than the step.
    """
    kind = _kind(type(optimizer))
    # Adagrad has a state before its first step.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise UsageError(
            f"the {type(optimizer).__name__} has taken steps already. What to do: make it anew, and"
            " load its state into the training state"
        )
    name = type(optimizer).__name__
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if name != "SGD" and any(torch.is_complex(p) for p in given):
        raise UsageError(
            f"torch's {name} takes the two parts of a complex parameter as two numbers, and optax's"
            " does not. What to do: keep the parameter as real numbers (torch.view_as_complex where"
            " it is used), or train with SGD"
        )
    read = _read(optimizer, scheduler, steps)
    group_of = _groups_of(ported, optimizer)
    transforms: dict[Any, Any] = {_NOWHERE: optax.set_to_zero()}
    for index, (group, varying) in enumerate(zip(optimizer.param_groups, read, strict=True)):
        # A scheduler adds entries of its own to a group, such as initial_lr.
        options = {name: group[name] for name in optimizer.defaults}
        transforms[str(index)] = _transform(type(optimizer).__name__, kind, options, varying)
    # A function of the params, as they may be stacked later, also by `tpuport.compile_for`.
    return optax.partition(
        transforms, lambda params: {n: _label(n, group_of, name) for n in params}
    )


def tabulated(values: np.ndarray) -> Callable[[Any], jax.Array]:
    """Return a schedule of given values by step; after them the last value stays.

    Args:
        values: the values, of shape (steps,) or (steps, n), at least one.
    """
    table = jnp.asarray(values, jnp.float32)
    return lambda step: table[jnp.minimum(step, len(table) - 1)]


@dataclass(frozen=True)
class _Kind:
    """The optax form of one of torch's optimizers, and the options that it knows."""

    make: Callable[[dict[str, Any]], optax.GradientTransformation]
    known: frozenset[str]


def _kind(cls: type) -> _Kind:
    found = _KINDS.get(cls)
    if found is None:
        names = ", ".join(sorted(k.__name__ for k in _KINDS))
        raise UsageError(
            f"{cls.__module__}.{cls.__name__} has no form in optax here; there are {names}. What"
            " to do: pass make_train_step one of optax's"
        )
    return found


def _transform(
    name: str, kind: _Kind, group: dict[str, Any], varying: dict[str, np.ndarray]
) -> optax.GradientTransformation:
    unknown = {
        option: value
        for option, value in group.items()
        if option not in kind.known | _NO_EFFECT and value
    }
    if unknown:
        what = ", ".join(f"{option}={value!r}" for option, value in unknown.items())
        raise UsageError(
            f"{name}({what}) is not what optax's does. What to do: leave it out, or pass"
            " make_train_step one of optax's"
        )
    rate = tabulated(varying["lr"]) if "lr" in varying else float(group["lr"])
    options = {option: values for option, values in varying.items() if option != "lr"}
    made = _by_step(kind.make, group, options) if options else kind.make(group)
    if group.get("maximize"):
        made = optax.chain(optax.scale(-1.0), made)
    # A schedule counts all steps, also those without a gradient.
    return optax.chain(_skipping(made), optax.scale_by_learning_rate(rate))


def _by_step(
    make: Callable[[dict[str, Any]], optax.GradientTransformation],
    group: dict[str, Any],
    varying: dict[str, np.ndarray],
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose options depend on the number of the step."""
    tables = {option: tabulated(values) for option, values in varying.items()}

    def at(count: jax.Array) -> optax.GradientTransformationExtraArgs:
        now = {option: table(count) for option, table in tables.items()}
        return optax.with_extra_args_support(make({**group, **now}))

    def init(params: Any) -> tuple[jax.Array, Any]:
        count = jnp.zeros((), jnp.int32)
        return count, at(count).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        count, inner = state
        out, inner = at(count).update(updates, inner, params, **extra)
        return out, (count + 1, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _skipping(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Do nothing for the parameters without a gradient: no update, and their state stays."""
    whole = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        has_gradient = extra.get("has_gradient")
        made, after = whole.update(updates, state, params, **extra)
        if has_gradient is None:
            return made, after

        def chosen(path: tuple[Any, ...], new: Any, old: Any) -> Any:
            # The state of one parameter is at its name.
            name = getattr(path[-1], "key", None) if path else None
            return new if name is None else _select(has_gradient[name], new, old)

        kept = jax.tree_util.tree_map_with_path(chosen, after, state)
        none = jax.tree.map(jnp.zeros_like, made)
        return jax.tree_util.tree_map_with_path(chosen, made, none), kept

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _select(flag: bool | jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if isinstance(flag, bool):
        return new if flag else old
    return jnp.where(flag, new, old)


def _scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Return Adam's scaling with a count of steps for each parameter, as torch has it."""

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like(params)
        count = jnp.zeros(len(jax.tree.leaves(params)), jnp.int32)
        return optax.ScaleByAdamState(count, zeros, zeros)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params
        has_gradient = extra.get("has_gradient")
        paths, tree = jax.tree_util.tree_flatten_with_path(updates)
        if has_gradient is None:
            steps = state.count + 1
        else:
            flags = [has_gradient[path[-1].key] for path, _ in paths]  # type: ignore[union-attr]
            steps = state.count + jnp.asarray(flags).astype(jnp.int32)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        number = jax.tree.unflatten(tree, list(range(len(paths))))

        def scaled(index: int, m: jax.Array, v: jax.Array) -> jax.Array:
            first, second = (
                (part / (1 - rate ** steps[index])).astype(part.dtype)
                for part, rate in ((m, b1), (v, b2))
            )
            return first / (jnp.sqrt(second) + eps)

        return jax.tree.map(scaled, number, mu, nu), optax.ScaleByAdamState(steps, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _decayed(
    group: dict[str, Any], made: optax.GradientTransformation, *, decoupled: bool = False
) -> optax.GradientTransformation:
    """Add the decay of weights: to the gradient, or to the update.

    torch decays p by lr * weight_decay before a decoupled update, which is the same sum.
    """
    decay = optax.add_decayed_weights(group["weight_decay"])
    return optax.chain(made, decay) if decoupled else optax.chain(decay, made)


def _adam(group: dict[str, Any]) -> optax.GradientTransformation:
    scale = updates.amsgrad if group["amsgrad"] else _scale_by_adam
    decoupled = bool(group["decoupled_weight_decay"])
    b1, b2 = group["betas"]
    return _decayed(group, scale(b1, b2, group["eps"]), decoupled=decoupled)


def _adagrad(group: dict[str, Any]) -> optax.GradientTransformation:
    start = group["initial_accumulator_value"]
    return _decayed(group, updates.adagrad(group["lr_decay"], group["eps"], start))


def _adadelta(group: dict[str, Any]) -> optax.GradientTransformation:
    return _decayed(group, updates.adadelta(group["rho"], group["eps"]))


def _adamax(group: dict[str, Any]) -> optax.GradientTransformation:
    b1, b2 = group["betas"]
    return _decayed(group, updates.adamax(b1, b2, group["eps"]))


def _nadam(group: dict[str, Any]) -> optax.GradientTransformation:
    b1, b2 = group["betas"]
    made = updates.nadam(b1, b2, group["eps"], group["momentum_decay"])
    return _decayed(group, made, decoupled=bool(group["decoupled_weight_decay"]))


def _sgd(group: dict[str, Any]) -> optax.GradientTransformation:
    parts = [optax.add_decayed_weights(group["weight_decay"])]
    if _is_used(group["momentum"]) and group["dampening"]:
        parts.append(updates.dampened(group["momentum"], group["dampening"]))
    elif _is_used(group["momentum"]):
        parts.append(optax.trace(group["momentum"], nesterov=group["nesterov"]))
    return optax.chain(*parts)


def _rmsprop(group: dict[str, Any]) -> optax.GradientTransformation:
    make = optax.scale_by_stddev if group["centered"] else optax.scale_by_rms
    parts = [
        optax.add_decayed_weights(group["weight_decay"]),
        make(decay=group["alpha"], eps=group["eps"], initial_scale=0.0, eps_in_sqrt=False),
    ]
    if _is_used(group["momentum"]):
        parts.append(optax.trace(group["momentum"]))
    return optax.chain(*parts)


def _is_used(option: Any) -> bool:
    """Return whether an option is not zero; one that a schedule changes is used."""
    return isinstance(option, jax.Array) or bool(option)


_COMMON = {"lr", "weight_decay", "maximize"}
_KINDS: dict[type, _Kind] = {
    torch.optim.AdamW: _Kind(_adam, frozenset({*_COMMON, "betas", "eps", "amsgrad"})),
    torch.optim.Adam: _Kind(_adam, frozenset({*_COMMON, "betas", "eps", "amsgrad"})),
    torch.optim.Adamax: _Kind(_adamax, frozenset({*_COMMON, "betas", "eps"})),
    torch.optim.NAdam: _Kind(_nadam, frozenset({*_COMMON, "betas", "eps", "momentum_decay"})),
    torch.optim.Adagrad: _Kind(
        _adagrad, frozenset({*_COMMON, "lr_decay", "eps", "initial_accumulator_value"})
    ),
    torch.optim.Adadelta: _Kind(_adadelta, frozenset({*_COMMON, "rho", "eps"})),
    torch.optim.SGD: _Kind(_sgd, frozenset({*_COMMON, "momentum", "dampening", "nesterov"})),
    torch.optim.RMSprop: _Kind(
        _rmsprop, frozenset({*_COMMON, "alpha", "eps", "momentum", "centered"})
    ),
}


def _groups_of(ported: PortedModel, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the group of each parameter of the model that is in one, by its fqn."""
    source = ported._source
    named = dict(source.named_parameters()) if isinstance(source, torch.nn.Module) else {}
    names = {id(parameter): name for name, parameter in named.items()}
    group_of: dict[str, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UsageError(
                    f"group {index} of the {type(optimizer).__name__} has a parameter of shape"
                    f" {list(parameter.shape)} that is not one of the ported"
                    f" {ported.report.model}'s. What to do: make the optimizer over the parameters"
                    " of the module that was given to tpuport.convert"
                )
            group_of[name] = str(index)
    for name in ported.params:
        _label(name, group_of, type(optimizer).__name__)
    return group_of


def _label(name: str, group_of: dict[str, str], optimizer: str) -> str:
    """Return the group of a parameter by its name in `params`, where it may be a stack.

    Raises:
        UsageError: a stack of several groups.
    """
    groups = {
        group_of.get(member, _NOWHERE) for member in stacked_params.members_of(name) or [name]
    }
    if len(groups) > 1:
        raise UsageError(
            f"the weights stacked as {name!r} are in different groups of the {optimizer}"
            f" ({', '.join(sorted(groups))}). What to do: train without tpuport.stack_blocks"
            " (tpuport.compile_for: stack=False)"
        )
    return groups.pop()


def _read(
    optimizer: torch.optim.Optimizer, scheduler: Any, steps: int | None
) -> list[dict[str, np.ndarray]]:
    """Return, for each group, the options that a schedule sets, by step: lr, and what changes."""
    if scheduler is None:
        return [{} for _ in optimizer.param_groups]
    if steps is None or steps < 1:
        raise UsageError(
            f"steps={steps}: a schedule is read for so many steps; pass the number of updates of"
            " the whole run"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau depends on a metric, not on the step. What to do: use"
            " optax.contrib.reduce_on_plateau in the optimizer, or another schedule"
        )
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise UsageError(
            f"the {type(scheduler).__name__} is not one of this {type(optimizer).__name__}"
            " (scheduler.optimizer). What to do: pass optax's schedule to optax's optimizer"
        )
    # The copy has its own optimizer, so that the user's take no step; weights are left out of it.
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    running = copy.deepcopy(scheduler, {id(p): torch.zeros(()) for p in weights})
    groups = running.optimizer.param_groups
    names = [[n for n in ("lr", *_VARYING) if n in group] for group in groups]
    rows: list[dict[str, list[Any]]] = [{name: [] for name in some} for some in names]
    for _ in range(steps):
        for row, group in zip(rows, groups, strict=True):
            for name, values in row.items():
                values.append(np.asarray(group[name], np.float64))
        with warnings.catch_warnings():
            # torch warns that the scheduler steps before its optimizer.
            warnings.simplefilter("ignore", UserWarning)
            running.step()
    tables = [{name: np.stack(values) for name, values in row.items()} for row in rows]
    if any(
        "momentum" in table and 0 < np.count_nonzero(table["momentum"]) < steps for table in tables
    ):
        raise UsageError(
            f"{type(scheduler).__name__} sets momentum to zero at some steps, at which torch's"
            f" {type(optimizer).__name__} leaves its buffer alone. What to do: use a small momentum"
            " there, such as 1e-3"
        )
    return [
        {name: t for name, t in table.items() if name == "lr" or (t != t[0]).any()}
        for table in tables
    ]
