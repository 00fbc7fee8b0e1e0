"""`verify_port`: a port by somebody else beside its original, stage by stage."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from tpuport.foundation.errors import UsageError
from tpuport.model.parity.gradients import projection
from tpuport.verify.ports.original import Original, OriginalRun, named_leaves
from tpuport.verify.ports.port import Port, PortRaised, Tree, as_arrays, split
from tpuport.verify.ports.report import PortVerification
from tpuport.verify.ports.stages import Numbers, behaviour, interface, own_values
from tpuport.verify.ports.table import Names, OriginalState, Table, find
from tpuport.verify.ports.training import PortTraining, train_original, train_port

_SPREAD = 0.1


def verify_port(
    torch_model: torch.nn.Module,
    jax_function: Any,
    params: Any = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    port_args: tuple[Any, ...] | None = None,
    port_kwargs: dict[str, Any] | None = None,
    names: Names | None = None,
    weights: Literal["compare", "copy"] = "compare",
    vary_constants: bool = True,
    output: Callable[[Any], Any] | None = None,
    losses: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    optimizers: tuple[Callable[[Iterable[Any]], torch.optim.Optimizer], Any] | None = None,
    steps: int = 5,
    ema: tuple[Callable[..., None], Callable[..., Any]] | None = None,
    train_steps: tuple[Callable[..., Any] | None, Callable[..., Any] | None] = (None, None),
    rtol: float = 1e-4,
) -> PortVerification:
    """Compare a port that was written by hand or by an agent with its PyTorch original.

    Three stages, each reached if the one before agrees: the interface; outputs, losses, gradients
    and values in between; some steps of training. Both sides run in float64 whatever dtypes their
    code asks for, so that two equal formulas agree to 1e-12, and then in their own dtypes. Neither
    `torch_model` nor `params` is changed.

    Args:
        torch_model: The original, in train or eval mode as it is.
        jax_function: The port: a function of its weights and the arguments, an `nnx.Module`, or a
            pytree that can be called, such as a module of Equinox.
        params: The weights of the port, a pytree of arrays; left out for a module.
        args: Arguments of the original.
        kwargs: Keyword arguments of the original.
        port_args: Arguments of the port; those of the original as arrays if left out.
        port_kwargs: Keyword arguments of the port, likewise: `{"key": jax.random.key(0)}`.
        names: What is known of the weights: for a leaf's path (`layers.0.kernel`) a torch name, a
            function of the original's tensors by name (`lambda w: w["fc.weight"].T`) that only
            moves and chooses elements, or None for a leaf that the original does not have.
        weights: `compare` the values that the port has, or `copy` the original's into it.
        vary_constants: Give weights that are all zeros or ones other values on both sides, since a
            difference in what they multiply would not show.
        output: Turns the port's output into the original's structure and layout.
        losses: The loss of the original and of the port, each of the output and the arguments; a
            fixed random sum of the outputs if left out.
        optimizers: The original's optimizer, as a function of the parameters, and the port's, of
            optax. Without them there is no third stage.
        steps: The steps of the third stage, all with these arguments.
        ema: Updates of an average of the weights: `(average, model) -> None` and
            `(average, params) -> average`.
        train_steps: A whole step of each side, where zero_grad, backward, step and the average are
            not all: `(model, optimizer, average) -> loss`, and `(params, opt_state, average, *args,
            **kwargs) -> (params, opt_state, average, loss)`.
        rtol: The tolerance of outputs in their own dtypes, relative to the largest element. Beyond
            it the port may miss the float64 result four times as far as eager PyTorch does.

    Returns:
        What agrees, by how much, where the two part, and what was not looked at.

    Raises:
        UsageError: the call is wrong, for example `names` with a leaf that does not exist.
    """
    training = None
    if optimizers is not None:
        training = PortTraining(*optimizers, steps, ema, *train_steps)
    elif ema is not None or train_steps != (None, None):
        raise UsageError("ema and train_steps need optimizers.")
    function, tree = split(jax_function, params)
    given = kwargs or {}
    port_given = (
        as_arrays(args) if port_args is None else as_arrays(port_args),
        as_arrays(given) if port_kwargs is None else as_arrays(port_kwargs),
    )
    mine, other = losses or (_projected, _projected_arrays)
    check = _Verifier(
        Original(torch_model, args, given, mine),
        Port(function, Tree.of(tree), port_given, output or (lambda out: out), other),
        PortVerification(type(torch_model).__name__),
        rtol,
    )
    check.run(names or {}, weights == "copy", vary_constants, training)
    return check.report


def _projected(out: Any, *_: Any, **__: Any) -> torch.Tensor:
    sums = [
        (leaf * torch.from_numpy(projection(leaf.shape, i)).to(leaf.dtype)).sum()
        for i, (_, leaf) in enumerate(named_leaves(out))
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    if not sums:
        raise UsageError("The original returns no floating tensor: give losses=.")
    return torch.stack(sums).sum()


def _projected_arrays(out: Any, *_: Any, **__: Any) -> Any:
    import jax.numpy as jnp

    leaves = [jnp.asarray(leaf) for _, leaf in named_leaves(out)]
    return sum(
        (leaf * jnp.asarray(projection(leaf.shape, i), leaf.dtype)).sum()
        for i, leaf in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


class _Verifier:
    def __init__(
        self, original: Original, port: Port, report: PortVerification, rtol: float
    ) -> None:
        self.original, self.port, self.report, self.rtol = original, port, report, rtol

    def run(self, names: Names, copies: bool, vary: bool, training: PortTraining | None) -> None:
        report = self.report
        state = OriginalState(self.original.model)
        table = find(state, self.port.weights.arrays(), names)
        report.table = table
        if copies:
            self._set(state, table)
        plain = self.original.run((), wide=False, record=False)
        self._check_repeats(plain)
        try:
            shapes = self.port.shapes()
            report.stages.append(interface(plain, shapes, state, table, self.port))
            if not report.stages[-1].checks[0].passed:
                return
            sure = report.stages[-1].passed
            varied = self._vary(state, table, plain) if vary and sure else []
            state = OriginalState(self.original.model)
            numbers = Numbers(self.original, self.port, state, table, self.rtol)
            self._numbers(numbers, varied)
            if training is not None and report.stages[-1].passed and sure:
                self._behaviour(training, numbers, state, table)
        except PortRaised as error:
            report.failure = str(error)
        report.notes += _unseen(report, training is not None, table)

    def _numbers(self, numbers: Numbers, varied: list[str]) -> None:
        report = self.report
        stage = numbers.stage()
        report.stages.append(stage)
        report.notes += numbers.notes
        report.first = numbers.first
        report.found = numbers.found
        if varied:
            shown = ", ".join(varied[:3]) + (", ..." if len(varied) > 3 else "")
            report.notes.append(
                f"Weights that are all zeros or ones have other values on both sides: {shown}"
                " (vary_constants=False leaves them)."
            )
            guessed = [n for n in varied if report.table.entries[n].how == "name"]
            if not stage.passed and guessed:
                report.notes.append(
                    "Those were assigned by name alone. If the table has one of them wrong, that is"
                    " the difference: give it in names."
                )

    def _behaviour(
        self, training: PortTraining, numbers: Numbers, state: OriginalState, table: Table
    ) -> None:
        trainable = own_values(self.port, state, table)
        mine = train_original(self.original, training, numbers.masks, state, wide=True)
        rounded = train_original(self.original, training, numbers.masks, state, wide=False)
        other = train_port(self.port, training, trainable)
        stage, notes = behaviour(self.port, state, table, mine, rounded, other, trainable)
        self.report.stages.append(stage)
        self.report.notes += notes

    def _check_repeats(self, plain: OriginalRun) -> None:
        again = self.original.run((), wide=False, record=False)
        pairs = zip([*plain.out, plain.loss], [*again.out, again.loss], strict=True)
        if not all(np.array_equal(*pair, equal_nan=pair[0].dtype.kind in "fc") for pair in pairs):
            raise UsageError(
                "The original gives another result when it runs again, so there is nothing to"
                " compare with: it draws random numbers of Python or numpy, or counts its calls"
                " outside of the module. Pass what changes as an argument."
            )

    def _set(self, state: OriginalState, table: Table) -> None:
        """Give the port the original's values."""
        for place, name in zip(self.port.weights.places, self.port.weights.names, strict=True):
            if name in table.entries:
                value = state.flat[table.entries[name].ids]
                leaf = self.port.weights.leaves[place]
                self.port.weights.leaves[place] = value.astype(leaf.dtype)

    def _vary(self, state: OriginalState, table: Table, plain: OriginalRun) -> list[str]:
        """Give trained weights that are constant other values on both sides."""
        model = copy.deepcopy(self.original.model)
        named = dict(model.named_parameters(remove_duplicate=False))
        random = np.random.default_rng(0)
        changed = []
        for name in (one for one in state.own if one in state.trained):
            value = named[name].data
            if value.numel() > 1 and bool((value == value.reshape(-1)[0]).all()):
                noise = _SPREAD * random.standard_normal(tuple(value.shape))
                value += torch.from_numpy(noise).to(value.dtype)
                changed.append(name)
        if not changed:
            return []
        changed_original = dataclasses.replace(self.original, model=model)
        other = changed_original.run((), wide=False, record=False)
        both = zip([*plain.out, plain.loss], [*other.out, other.loss], strict=True)
        if any(np.isfinite(a).all() and not np.isfinite(b).all() for a, b in both):
            return []  # a logarithm or root of such a weight: only its own value will do
        kept = set(np.concatenate([state.ids[n].numpy().reshape(-1) for n in changed]).tolist())
        self.original = changed_original
        leaves = [n for n, e in table.entries.items() if e.ids.size and int(e.ids.flat[0]) in kept]
        self._set(OriginalState(model), table)
        return leaves


def _unseen(report: PortVerification, trained: bool, table: Table) -> Sequence[str]:
    notes = []
    if len(report.stages) > 1 and not trained:
        notes.append("Training was not looked at: no optimizers were given.")
    if table.extra:
        notes.append(f"Leaves that the original does not have: {', '.join(table.extra[:5])}.")
    return notes
