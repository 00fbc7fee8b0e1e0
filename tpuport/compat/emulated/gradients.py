"""A ported call under torch's autograd: one jitted program forward, one backward."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import core
from jax.interpreters import ad

from tpuport.compat.emulated.batched_gradients import row_by_row
from tpuport.compat.emulated.inner_outputs import InnerOutputs, graph_reaches, retain_gradient
from tpuport.compat.emulated.rewritten import Kept, kept_inputs, refuse_rewritten
from tpuport.compat.emulated.settings import active
from tpuport.compat.emulated.sparse_gradients import with_sparse
from tpuport.compat.emulated.taps import host_leaf, tapped, with_leaf_taps
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.device_mark import tag
from tpuport.foundation.interop.saved_tensors import without_saved_tensors_hooks
from tpuport.foundation.patching.shim import installed
from tpuport.model.parity.uncheckpointed import ReentrantBackward
from tpuport.model.program_cache import BoundCall, CachedProgram
from tpuport.tracing.core.arguments import result_meta
from tpuport.tracing.core.errors import error_here
from tpuport.tracing.core.gradient_paths import evaluated
from tpuport.tracing.core.paths import Path, Paths
from tpuport.tracing.core.reentrancy import comparing_gradients
from tpuport.tracing.core.tensor import meta_of
from tpuport.tracing.state.request import Flows, TraceResult, Written

# The inputs to differentiate with respect to: names in the state, numbers of arguments.
Wanted = tuple[tuple[str, ...], tuple[int, ...]]


def host_tensor(
    value: jax.Array, dtype: torch.dtype, meta: torch.Tensor | None = None
) -> torch.Tensor:
    """Return an array as a tensor on the emulated accelerator, with the strides of `meta`.

    Code sees strides in what `view` takes, and `randn_like` draws in their order.
    """
    made = backend.to_torch(value, dtype)
    if meta is not None and not meta.is_contiguous():
        strided = torch.empty_strided(made.shape, result_meta(meta).stride(), dtype=dtype)
        made = strided.copy_(made)
    return tag(made)


def differentiable(
    pure: Callable[..., Any],
    wanted: Wanted,
    labels: Callable[..., dict[str, Any]],
    outcome: Callable[[], TraceResult],
) -> Callable[..., Any]:
    """Return a program that runs forward and keeps what its backward pass needs.

    Args:
        pure: (state, key, values) to (outputs, state, *rest).
        wanted: the state and the arguments to differentiate with respect to.
        labels: gives the parts of `rest` that torch's graph misses, by a name for messages.
        outcome: describes the results, once `pure` is traced; it gets its `flows`.

    Returns:
        A function of the same arguments to (the floating outputs and the state in `flows`, the
        function that pulls their cotangents back, (other outputs, rest), `Reached`).

    Raises:
        PortError: (the function, while it is traced) a gradient would have to flow through
            something that is no output.
    """
    names, indices = wanted

    def forward(state: dict[str, Any], key: Any, values: list[Any]) -> Any:
        def call(part: dict[str, Any], leaves: list[Any]) -> Any:
            merged = list(values)
            for index, leaf in zip(indices, leaves, strict=True):
                merged[index] = leaf
            outs, left, mutated, *rest = pure({**state, **part}, key, merged)
            # Python numbers among the outputs have no gradient.
            floats = [
                _has_gradient(out) and not isinstance(meta, type)
                for out, meta in zip(outs, outcome().out_metas, strict=True)
            ]
            flows = [out for out, one in zip(outs, floats, strict=True) if one]
            flows += [left[name] for name in _flowing(left, outcome())]
            written = _written(outcome())
            flows += [mutated[index] for index in written]
            kept = {i: v for i, v in mutated.items() if i not in written}
            stays = [None if one else out for out, one in zip(outs, floats, strict=True)]
            return flows, (stays, [left, kept, *rest])

        given = [state[name] for name in names] + [values[i] for i in indices]
        closed, shape = jax.make_jaxpr(
            lambda given: call(dict(zip(names, given, strict=False)), given[len(names) :]),
            return_shape=True,
        )(given)
        paths, tree, count = Paths(), jax.tree.structure(shape), len(shape[0])
        left = _flowing(shape[1][1][0], outcome())
        written = _written(outcome())
        numbers = _numbers(shape[1][0], left, written)
        taps = tapped(closed, outcome(), numbers, _seen(outcome(), numbers))
        found = paths.of(taps.closed.jaxpr)
        used = functools.reduce(int.__or__, (path.may for path in found), 0)
        found_taps = (taps.leaves, taps.inner, taps.unsure)
        outcome().flows = Flows(left, used, *found_taps, written, taps.sparse)
        _refuse_lost_gradients(jax.tree.unflatten(tree, found), labels)

        def run(given: list[Any], zeros: list[Any]) -> Any:
            args = [*given, *zeros]
            outs, decided = evaluated(taps.closed, paths, len(args), args, range(count))
            flows, rest = jax.tree.unflatten(tree, outs)
            return flows, (rest, Reached(tuple(found[:count]), decided))

        flows, pull, (rest, reached) = jax.vjp(run, given, taps.zeros, has_aux=True)
        return flows, pull, rest, reached

    return forward


def _flowing(state: dict[str, Any], outcome: TraceResult) -> tuple[str, ...]:
    """Return the names of the state whose tensors have a graph after the call, as in eager."""
    metas = outcome.state_metas
    return tuple(
        name
        for name in sorted((outcome.bound | outcome.computed) & metas.keys())
        if metas[name].requires_grad and _has_gradient(state[name])
    )


def _written(outcome: TraceResult) -> tuple[int, ...]:
    """Return the arguments that have a graph after the call, as in eager, by index."""
    return tuple(sorted(outcome.written))


# The results (by index), the state (by name) and the arguments that are floating outputs.
_Place = int | str | Written


def _numbers(stays: list[Any], state: Sequence[str], written: Sequence[int]) -> dict[_Place, int]:
    """Return the number of each floating output."""
    floats = [index for index, stay in enumerate(stays) if stay is None]
    places = [*floats, *state, *map(Written, written)]
    return {place: number for number, place in enumerate(places)}


def _seen(outcome: TraceResult, numbers: dict[_Place, int]) -> list[bool]:
    """Return which floating outputs require grad, in order."""

    def seen(place: _Place) -> bool:
        if isinstance(place, Written):
            return True
        metas = outcome.state_metas if isinstance(place, str) else outcome.out_metas
        return metas[place].requires_grad  # pyright: ignore[reportArgumentType, reportCallIssue]

    return [seen(place) for place in numbers]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reached:
    """The inputs that each output gives a gradient; the others have None, as in torch.

    Attributes:
        paths: for each output, the inputs that it depends on.
        decided: flags of shape (outputs, inputs), if branches of the program decide.
    """

    paths: tuple[Path, ...] = field(metadata={"static": True})
    decided: jax.Array | None

    def inputs(self, outputs: Sequence[int], count: int) -> list[bool]:
        """Return which of so many inputs some outputs give a gradient; may wait for the device."""
        if self.decided is None:
            bits = functools.reduce(int.__or__, (self.paths[i].may for i in outputs), 0)
            return [bool(bits >> i & 1) for i in range(count)]
        found: Any = np.asarray(self.decided)[list(outputs)].any(axis=0)
        return found.tolist()


def _has_gradient(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def _refuse_lost_gradients(results: Any, labels: Callable[..., dict[str, Any]]) -> None:
    """Refuse gradients through anything but the outputs of a call, as torch's graph misses them.

    Args:
        results: the results of the program, each as its path from the differentiated inputs.
        labels: gives the parts that torch's graph misses, by a name for messages.

    Raises:
        PortError: a gradient would have to flow through something else.
    """
    _, (others, rest) = results
    for label, path in labels(*rest).items():
        if any(part.may for part in jax.tree.leaves(path)):
            raise PortError(
                f"{label} is given a tensor with a gradient, which would end there",
                code="TPU406",
                remedy="store it .detach()ed, return it, or bind another tensor (self.name = ...)",
            )
    if any(isinstance(out, tuple) and out[0].may for out in others):
        raise PortError(
            "an output that takes part in a backward pass has a size that depends on data",
            code="TPU203",
            remedy="return it at full size together with its mask",
        )


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoCotangent:
    """The place of an output that is not differentiated: zeros would reach infinite derivatives."""

    shape: tuple[int, ...]
    dtype: Any

    def conj(self) -> "_NoCotangent":
        """Return itself."""
        return self


@functools.partial(jax.jit, static_argnames="taps")
def _pull(pull: Any, cotangents: list[Any], taps: tuple[int, ...]) -> list[jax.Array]:
    """Run a backward pass, and return its cotangents of what was differentiated, and of some taps.

    The function that `jax.vjp` returns is a pytree, so one jit serves all programs.
    """
    avals = [core.ShapedArray(c.shape, c.dtype) for c in cotangents]
    pairs = zip(_conjugate(cotangents), avals, strict=True)
    given = [ad.Zero(a) if isinstance(c, _NoCotangent) else c for c, a in pairs]
    found, tapped = pull(given)
    return _conjugate([*found, *(tapped[i] for i in taps)])


def _conjugate(cotangents: Iterable[Any]) -> list[Any]:
    """Turn torch's gradients into jax's, or back: those of complex numbers are conjugates."""
    return [c.conj() if jnp.issubdtype(c.dtype, jnp.complexfloating) else c for c in cotangents]


def _backward(
    compiled: CachedProgram,
    wanted: Wanted,
    taps: tuple[int, ...],
    missing: frozenset[int],
    given: Any,
    inputs: list[Any],
) -> list[Any]:
    """Run a program and its backward pass, as a function of its primals and cotangents.

    The primals are what is differentiated, and zeros for the leaves that the program makes. Nothing
    depends on the cotangents of the outputs in `missing`.
    """
    (state, key, values), (names, indices) = given, wanted
    flows = compiled.outcome.flows
    leaves = [leaf.name for leaf, _ in flows.leaves] if flows is not None else []
    primals, rest = _parted(inputs, len(names) + len(indices))
    zeros, cotangents = _parted(rest, len(leaves))
    part, merged = dict(zip(names, primals, strict=False)), list(values)
    for index, value in zip(indices, primals[len(names) :], strict=True):
        merged[index] = value
    state = tuple(map(part.get, compiled.names, state))
    run = compiled.run
    _, pull, *_ = run.edited(with_leaf_taps(leaves), (state, key, merged), zeros)
    avals = [core.ShapedArray(c.shape, c.dtype) for c in cotangents]
    pairs = enumerate(zip(_conjugate(cotangents), avals, strict=True))
    found, tapped = pull([ad.Zero(a) if i in missing else c for i, (c, a) in pairs])
    return _conjugate([*found, *(tapped[i] for i in taps)])


class _Derivative:
    """The pullback of a function of arrays, which is such a function itself, and so on.

    Attributes:
        paths: the inputs that each result of the function depends on, once it was pulled back.
    """

    def __init__(self, function: Callable[[Any, list[Any]], list[Any]]) -> None:
        """Take a function of what is not differentiated and of arrays, to arrays."""
        self._function = function
        self._jitted = jax.jit(self._pulled)
        self.paths: list[Path] | None = None
        # What the results of the function are like.
        self._like: list[Any] = []
        self._count = 0

    @functools.cached_property
    def next(self) -> "_Derivative":
        """Return the pullback of this pullback, of the inputs and cotangents in one list.

        The number of inputs is known once it was called.
        """
        return _Derivative(lambda given, both: self._pulled(given, *_parted(both, self._count)))

    def _pulled(self, given: Any, inputs: list[Any], cotangents: list[Any]) -> list[jax.Array]:
        pull = jax.vjp(functools.partial(self._function, given), inputs)[1]
        return _conjugate(pull(_conjugate(cotangents))[0])

    def __call__(
        self, given: Any, inputs: list[Any], cotangents: Sequence[torch.Tensor | None]
    ) -> tuple[list[jax.Array], list[bool]]:
        """Return the cotangents of the inputs, and which of them exist."""
        if self.paths is None:
            function = functools.partial(self._function, given)
            closed = jax.make_jaxpr(function)(inputs)
            self.paths, self._like = Paths().of(closed.jaxpr), closed.out_avals
            self._count = len(inputs)
        pairs = list(zip(self.paths, cotangents, strict=True))
        bits = functools.reduce(int.__or__, (p.may for p, c in pairs if c is not None), 0)
        found = self._jitted(given, inputs, self.full(cotangents))
        return found, [bool(bits >> i & 1) for i in range(len(found))]

    def full(self, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return cotangents of the results as arrays, zeros for the missing ones."""
        pairs = zip(self._like, cotangents, strict=True)
        return [jnp.zeros(a.shape, a.dtype) if t is None else backend.to_jax(t) for a, t in pairs]


def _parted(both: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return both[:count], both[count:]


@dataclass
class DifferentiatedCall:
    """One call that is to be differentiated, and its results."""

    prepared: BoundCall
    wanted: Wanted
    # The class of the module that is called.
    name: str
    pull: Any = None
    rest: Any = None
    reached: Any = None
    metas: list[torch.Tensor] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    # The dtypes of what is differentiated.
    dtypes: list[torch.dtype] = field(default_factory=list)
    # The floating outputs without a gradient, such as those made under `no_grad`.
    constant: list[int] = field(default_factory=list)
    # The parameters (by name) and arguments (by number) that torch would save for backward.
    saved: dict[str | int, torch.Tensor] = field(default_factory=dict)
    # The results and buffers that torch would save, and the arrays of the floating outputs until
    # these are known.
    others_saved: list[Kept] = field(default_factory=list)
    arrays: list[jax.Array] = field(default_factory=list)
    # Whether a backward pass ends at the arguments and the state, instead of flowing on.
    ends_here: bool = False
    # The leaves that the call makes, and the outputs that others are computed from.
    leaves: list[torch.Tensor] = field(default_factory=list)
    inner: InnerOutputs = field(default_factory=InnerOutputs)
    # The outputs that code inside asked to retain their gradient.
    retaining: list[torch.Tensor] = field(default_factory=list)

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Let backward passes in the block end here, and be none of the script's."""
        self.ends_here = True
        try:
            with comparing_gradients(), installed((ReentrantBackward,)):
                yield
        finally:
            self.ends_here = False
            for tensor in self.retaining:
                tensor.grad = None
            self.retaining.clear()

    def run(self) -> list[torch.Tensor]:
        """Run forward and return the floating outputs, in order."""
        prepared = self.prepared
        flows, self.pull, self.rest, self.reached = prepared.run()
        self.arrays = flows
        porting = active()
        if porting is not None and porting.hooks.keeps is not None:
            porting.hooks.keeps(self.kept())
        outcome = prepared.compiled.outcome
        stays = self.rest[0]
        self.metas = [m for m, s in zip(outcome.out_metas, stays, strict=True) if s is None]
        assert outcome.flows is not None
        self.metas += [outcome.state_metas[name] for name in outcome.flows.state]
        written = (prepared.leaves[index] for index in outcome.flows.arguments)
        self.metas += [meta_of(argument).requires_grad_() for argument in written]
        self.constant = [i for i, meta in enumerate(self.metas) if not meta.requires_grad]
        self.shapes = [flow.shape for flow in flows]
        made = [host_tensor(flow, m.dtype, m) for flow, m in zip(flows, self.metas, strict=True)]
        for (_, numbers), leaf in zip(outcome.flows.leaves, self.leaves, strict=True):
            self.constant += numbers
            for number in numbers[:1]:
                leaf.data.copy_(made[number])
        return made

    def kept(self) -> list[jax.Array]:
        """Return what the program keeps for its backward pass, but for what the call is given."""
        given = {
            id(one) for one in jax.tree.leaves((self.prepared.state, self.prepared.given.values))
        }
        return [one for one in jax.tree.leaves(self.pull) if id(one) not in given]

    def like(self, asked: tuple[int, ...]) -> list[torch.dtype]:
        """Return the dtypes of the gradients that `pulled_back` returns."""
        return [*self.dtypes, *(self.metas[self.inner.outputs[i][0]].dtype for i in asked)]

    def _cotangents(self, gradients: Sequence[torch.Tensor | None], absent: Any) -> list[Any]:
        dtypes = [meta.dtype for meta in self.metas]
        return [
            absent(shape, backend.jax_dtype(dtype)) if g is None else backend.to_jax(g.to(dtype))
            for g, dtype, shape in zip(gradients, dtypes, self.shapes, strict=True)
        ]

    def pulled_back(
        self, gradients: Sequence[torch.Tensor | None], asked: tuple[int, ...]
    ) -> list[jax.Array]:
        """Run backward: map cotangents of the outputs to those of what `inputs` returns.

        Those of inner outputs that are asked for follow, and the rows that sparse lookups read.
        """
        first = len(self.leaves) + len(self.inner.outputs)
        reads = range(first, first + sum(count for _, count in self.sparse))
        taps = (*self._taps(asked), *reads)
        return _pull(self.pull, self._cotangents(gradients, _NoCotangent), taps)

    @property
    def sparse(self) -> tuple[tuple[int, int], ...]:
        """Return the inputs whose gradient is sparse, each with its number of lookups."""
        flows = self.prepared.compiled.outcome.flows
        return flows.sparse if flows is not None else ()

    def _taps(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        count = len(self.leaves)
        return (*range(count), *(count + i for i in asked))

    def second_order(
        self, gradients: Sequence[torch.Tensor | None], asked: tuple[int, ...]
    ) -> tuple[_Derivative, Any, list[Any]]:
        """Return the pullback of `pulled_back`, which runs the program once more, and its inputs.

        These are what is not differentiated, and the primals with the cotangents of the outputs.
        """
        prepared, (names, indices) = self.prepared, self.wanted
        derived = prepared.compiled.run.derived
        primals = [prepared.state[name] for name in names]
        primals += [prepared.given.values[index] for index in indices]
        primals += [jnp.zeros(leaf.shape, backend.jax_dtype(leaf.dtype)) for leaf in self.leaves]
        missing = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)
        twice = derived.get((self.wanted, asked, missing))
        if twice is None:
            parts = self.wanted, self._taps(asked), missing
            back = functools.partial(_backward, prepared.compiled, *parts)
            twice = derived[self.wanted, asked, missing] = _Derivative(back)
        given = (prepared.picked, prepared.key, prepared.given.values)
        return twice, given, [*primals, *self._cotangents(gradients, jnp.zeros)]

    def unwritten(self) -> dict[str | int, torch.Tensor]:
        """Return what torch would save, without arguments that the call itself writes to."""
        _, (_, mutated, *_) = self.rest
        written = {int(index) for index in mutated} | set(self.written_indices())
        return {key: tensor for key, tensor in self.saved.items() if key not in written}

    def kept_for_backward(self) -> list[Kept]:
        """Return what torch would save, as it was at the end of the call."""
        return [*kept_inputs(self.prepared, self.unwritten().items()), *self.others_saved]

    def values(self) -> dict[_Place, Any]:
        """Return the arrays of the results and of the state among the floating outputs."""
        stays, known = self.rest[0], self.prepared.compiled.outcome.flows
        numbers = _numbers(stays, () if known is None else known.state, ())
        found: dict[_Place, Any] = dict(enumerate(stays))
        return found | {place: self.arrays[number] for place, number in numbers.items()}

    def written_indices(self) -> tuple[int, ...]:
        """Return the arguments that the call gives a value with a graph, by index."""
        flows = self.prepared.compiled.outcome.flows
        return flows.arguments if flows else ()

    def written(self) -> list[torch.Tensor]:
        """Return those arguments."""
        return [self.prepared.leaves[index] for index in self.written_indices()]

    def inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors to differentiate, those that nothing depends on without their graph.

        Such a tensor is an attribute of the last call, which this one replaces. Its graph would be
        kept by that of this call, and so on.

        Raises:
            PortError: code inside takes a gradient of state that an argument was computed from.
        """
        self._refuse_longer_gradients(tensors)
        flows = self.prepared.compiled.outcome.flows
        assert flows is not None
        self.leaves = [
            host_leaf(leaf)
            if leaf.argument is None
            else self.prepared.leaves[leaf.argument].requires_grad_()
            for leaf, _ in flows.leaves
        ]
        self.inner.outputs, self.inner.unsure = flows.inner, flows.unsure
        own = [
            t if t.grad_fn is None or flows.used >> i & 1 else t.detach()
            for i, t in enumerate(tensors)
        ]
        return [*own, *self.leaves, *self.inner.probes()]

    def leaves_by_name(self) -> dict[str, torch.Tensor]:
        """Return the leaves that the call bound to names of the state."""
        flows = self.prepared.compiled.outcome.flows
        pairs = zip(flows.leaves if flows else (), self.leaves, strict=True)
        return {name: tensor for (leaf, _), tensor in pairs for name in leaf.state}

    def _refuse_longer_gradients(self, tensors: list[torch.Tensor]) -> None:
        """Refuse a gradient inside the program that eager PyTorch would follow out of it."""
        places = self.prepared.compiled.outcome.inner_starts
        starts = {n: t for n, t in zip(self.wanted[0], tensors, strict=False) if n in places}
        known = {id(tensor) for tensor in starts.values()}
        made = [t for t in tensors if t.grad_fn is not None and id(t) not in known]
        reached = graph_reaches(made, list(starts.values())) if starts and made else None
        if reached is not None:
            name = next(n for n, t in starts.items() if t is reached)
            raise error_here(
                f"a gradient of {name!r} is taken here, and an argument or state of this call was"
                f" computed from {name!r} too: eager PyTorch's gradient flows on through it, and"
                " that of a program would end there",
                code="TPU403",
                remedy="detach what this call gets (x.detach()), if the gradient is to end there,"
                " or make both calls in the forward of one module",
                place=places[name],
            )

    def results(self, flows: list[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return what `PortedModel._finish` takes, with the floating outputs among these tensors.

        The state among them follows, by name.
        """
        stays, rest = self.rest
        known = self.prepared.compiled.outcome.flows
        for (_, numbers), leaf in zip(known.leaves if known else (), self.leaves, strict=True):
            for number in numbers:
                flows[number] = leaf
        state, written = () if known is None else known.state, self.written_indices()
        numbers = _numbers(stays, state, written)
        for place in self.prepared.compiled.outcome.retained:
            if place in numbers:
                retain_gradient(flows[numbers[place]], Through)
                self.retaining.append(flows[numbers[place]])
        given = iter(flows)
        outs = [next(given) if stay is None else stay for stay in stays]
        by_name = dict(zip(state, given, strict=False))
        left, mutated, *others = rest
        return (outs, left, {**mutated, **dict(zip(written, given, strict=True))}, *others), by_name


# Where a program keeps what eager PyTorch raises when its floating outputs are differentiated.
REFUSED = "refused"


class Through(torch.autograd.Function):
    """The node of a ported call in torch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, call: DifferentiatedCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the program; `tensors` are the inputs to differentiate, in the order of `call`."""
        count = len(tensors) - len(call.inner.probes())
        call.dtypes = [t.dtype for t in tensors[:count]]
        flows = call.run()
        # Torch frees saved tensors after a backward pass, and raises at a second use. What
        # a program kept hangs on one, so a loss that a script collects keeps none of it alive.
        kept: Any = torch.empty(0)
        kept._tpuport_kept = (call, tensors[:count])
        # Of the others torch checks that nothing was written to them.
        ctx.save_for_backward(kept, *call.unwritten().values())
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(flows[i] for i in call.constant))
        return tuple(flows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the backward program."""
        if all(gradient is None for gradient in gradients):
            # Of an earlier call, whose results do not reach those of the later one.
            return (None,) * len(ctx.needs_input_grad)
        kept = ctx.saved_tensors[0]
        call, tensors = kept._tpuport_kept
        refuse_rewritten(call.name, call.kept_for_backward())
        used = [i for i, g in enumerate(gradients) if g is not None]
        asked = () if call.ends_here else call.inner.asked()
        for index, error in call.prepared.compiled.run.derived.get(REFUSED, {}).items():
            if index in used:
                raise type(error)(*error.args) from error
        reached = call.reached.inputs(used, len(tensors) + len(call.inner.outputs))
        inner = [reached[len(tensors) + i] for i in asked]
        if call.ends_here:
            count = len(call.wanted[0])
            reached = [r and t.is_leaf for r, t in zip(reached[:count], tensors, strict=False)]
            reached += [False] * (len(tensors) - count)
        needs = ctx.needs_input_grad[1 : 1 + len(tensors)]
        needed = (*(a and b for a, b in zip(needs, reached, strict=False)), *inner)

        def leads(number: int, index: int) -> bool:
            return call.reached.inputs([number], len(tensors) + index + 1)[-1]

        again: Any = functools.partial(_back, call, asked, needed)
        if torch.is_grad_enabled():  # create_graph=True
            with without_saved_tensors_hooks():
                again = functools.partial(_Back.apply, call, asked, needed, *tensors)
                made = call.inner.pulled(asked, lambda rows: again(*rows), gradients, leads)
        else:
            made = call.inner.pulled(asked, again, gradients, leads)
        return (None, *made, *(None for _ in call.inner.probes()))


def _back(
    call: DifferentiatedCall,
    asked: tuple[int, ...],
    needed: tuple[bool, ...],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    found, like = call.pulled_back(gradients, asked), call.like(asked)
    made = _given(found[: len(like)], like, needed)
    return with_sparse(made, call.sparse, found[len(like) :])


def _given(found: list[Any], like: list[Any], needed: Any) -> list[torch.Tensor | None]:
    return [
        host_tensor(value, dtype) if wanted else None
        for value, dtype, wanted in zip(found, like, needed, strict=True)
    ]


class _Back(torch.autograd.Function):
    """The node of a backward pass that is differentiated in turn, as for a gradient penalty."""

    @staticmethod
    def forward(
        ctx: Any,
        call: DifferentiatedCall,
        asked: tuple[int, ...],
        needed: Any,
        *given: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        """Return the gradients; `given` are the call's tensors, then the outputs' gradients."""
        count = len(needed) - len(asked)
        ctx.set_materialize_grads(False)
        ctx.like = [None if t is None else t.dtype for t in given]
        made = _back(call, asked, needed, given[count:])
        kept: Any = torch.empty(0)
        kept._tpuport_kept = (call, asked, given)
        ctx.save_for_backward(kept)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *seconds: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of those gradients."""
        (kept,) = ctx.saved_tensors
        call, asked, tensors = kept._tpuport_kept
        order = call.second_order(tensors[len(seconds) - len(asked) :], asked)
        made = row_by_row(lambda rows: _pulled_on(ctx, order, tensors, rows), seconds)
        return (None, None, None, *made)


class _Higher(torch.autograd.Function):
    """The node of a pullback that is differentiated in turn: a third derivative, and so on."""

    @staticmethod
    def forward(ctx: Any, order: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients; `given` are the tensors of the inputs, then the cotangents."""
        derivative, constants, inputs = order
        count = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.like = [None if t is None else t.dtype for t in given]
        found, reached = derivative(constants, inputs, given[count:])
        both = [*inputs, *derivative.full(given[count:])]
        kept: Any = torch.empty(0)
        kept._tpuport_kept = ((derivative.next, constants, both), given)
        ctx.save_for_backward(kept)
        wanted = [a and t is not None for a, t in zip(reached, given[:count], strict=True)]
        return tuple(_given(found, ctx.like[:count], wanted))

    @staticmethod
    def backward(ctx: Any, *seconds: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of those gradients."""
        (kept,) = ctx.saved_tensors
        order, tensors = kept._tpuport_kept
        made = row_by_row(lambda rows: _pulled_on(ctx, order, tensors, rows), seconds)
        return (None, *made)


def _pulled_on(
    ctx: Any, order: Any, tensors: Sequence[torch.Tensor | None], seconds: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Pull cotangents back once more, by a node of the graph if that is to be differentiated."""
    needed = ctx.needs_input_grad[-len(tensors) :]
    if torch.is_grad_enabled():
        with without_saved_tensors_hooks():
            made = _Higher.apply(order, *tensors, *seconds)
        return [one if wanted else None for one, wanted in zip(made, needed, strict=True)]
    derivative, constants, inputs = order
    found, reached = derivative(constants, inputs, seconds)
    return _given(found, ctx.like, [a and b for a, b in zip(needed, reached, strict=True)])


def gradients(totals: list[torch.Tensor], of: list[torch.Tensor], **options: Any) -> Sequence[Any]:
    """Return the gradients of sums, None for each tensor without one or if there are no sums."""
    if not totals:
        return [None] * len(of)
    return torch.autograd.grad(totals, of, allow_unused=True, **options)
