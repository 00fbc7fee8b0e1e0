"""Custom autograd functions: their backward is the user's, not the derivative of their forward."""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.patching.shim import Replacement, Shim, installed
from tpuport.tracing.control_flow.merge import number_kind
from tpuport.tracing.control_flow.path_explorer import explored_alone
from tpuport.tracing.core.arguments import program_leaf
from tpuport.tracing.core.autocast import OFF, autocast_as
from tpuport.tracing.core.bound_tensors import BoundTensors
from tpuport.tracing.core.context import KeyStream, Trace, TraceOptions, current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.storage import SERIALS, Flow, Storage, differentiable
from tpuport.tracing.core.sym_numbers import SYMBOLIC, exact_value, number
from tpuport.tracing.core.tensor import TracedTensor, meta_of, wrap
from tpuport.tracing.core.values import flow_of, value_of, write
from tpuport.tracing.dispatch.inplace_ops import refuse_by_autograd
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.patches._count import count
from tpuport.tracing.session.activate import active, eager_compiled, no_fused_kernels


class _Context:
    """The `ctx` of a custom autograd function in a trace."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: set[int] = set()
        self.dirty: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """Return `saved_tensors` by its old name."""
        return self.saved_tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = {id(tensor) for tensor in tensors}

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        del value


class AutogradFunction(Shim):
    """`torch.autograd.Function.apply` becomes a `jax.custom_vjp` around the user's forward and
    backward.
    """

    TARGET = "torch.autograd.Function.apply"
    REASON = (
        "the backward that the user wrote must be used, as eager does;"
        " torchax differentiates the forward instead"
    )

    def replacements(self) -> list[Replacement]:
        original = _SingleLevelFunction.__dict__.get("apply", _C_APPLY)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            # torch.func applies classes that it derives, which are no `Function`.
            trace = current() if issubclass(cls, torch.autograd.Function) else None
            given = (*args, *kwargs.values())
            if current() is not None and forward_ad._current_level >= 0:
                raise port_error(
                    f"{cls.__name__}, a custom autograd function, runs in forward mode, where its"
                    " gradients would be lost",
                    code="TPU403",
                    remedy="call a plain function of torch operations there",
                )
            if trace is not None and any(isinstance(a, TracedTensor) for a in given):
                count(self.TARGET)
                return apply_function(trace, cls, _positional(cls, args, kwargs))
            return original.__get__(None, cls)(*args, **kwargs)

        # Not `Function.apply` itself: user code keeps that (`op = Op.apply` in its modules), and it
        # looks up this one by `super()`.
        return [Replacement(_SingleLevelFunction, "apply", classmethod(apply))]


# Folded into the key of the random numbers that a backward draws.
_BACKWARD = 0xBAC
_C_APPLY = torch._C._FunctionBase.__dict__["apply"]


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not torch.autograd.Function.setup_context


def _positional(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments by position, as torch passes them to `forward`."""
    if not kwargs:
        return args
    first = () if _has_setup(cls) else (None,)
    bound = inspect.signature(cls.forward).bind(*first, *args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"forward() got an unexpected keyword argument '{next(iter(bound.kwargs))}'"
        )
    return bound.args[len(first) :]


class _FunctionCall:
    """One call of a custom autograd function.

    Its forward runs once, without gradients; `jax.custom_vjp` then gives its outputs the backward.
    """

    def __init__(self, trace: Trace, cls: Any, args: tuple[Any, ...]) -> None:
        # Of the arguments no tensor is held: a checkpointed block would return, and so keep, those
        # that are alive.
        self.trace, self.cls = trace, cls
        self.is_tensor = [isinstance(a, torch.Tensor) for a in args]
        self.tensors = [meta_of(a) for a in args if isinstance(a, torch.Tensor)]
        # A traced number reaches the backward by the context alone.
        rest = (a for a in args if not isinstance(a, torch.Tensor))
        self.rest = [type(a) if isinstance(a, SYMBOLIC) else a for a in rest]
        # Whether each output is a tensor; the others have a gradient of None.
        self.output_is_tensor: list[bool] = []
        self.metas: list[torch.Tensor] = []
        self.context_spec: Any = None
        # For each saved tensor one like it, and for each traced number its type.
        self.saved: list[Any] = []
        # For each saved tensor, the output that it is.
        self.saved_outputs: list[int | None] = []
        # What the backward reads besides: weights and numbers of modules that it calls.
        self.bound = BoundTensors(trace, ())
        # For each saved tensor, the one of those that it is, or a constant of the host.
        self.saved_given: list[torch.Tensor | None] = []
        self.saved_seen: list[bool] = []
        # For each saved tensor, whether forward made it a leaf: backward may differentiate by it.
        self.saved_leaves: list[bool] = []
        # For each saved tensor, whether other code has its memory, too.
        self.saved_outside: list[bool] = []
        self.keys: KeyStream | None = None
        self.residual_kinds: Any = None
        self._reached: list[bool] | None = None
        # Whether the backward branches on values, and runs once for each outcome.
        self.explores = False
        self.attach = jax.custom_vjp(lambda values, bound, outs, saved: outs)
        self.attach.defvjp(self.fwd, self.bwd, symbolic_zeros=True)
        # Whether jax differentiates with respect to each tensor.
        self.perturbed = [False] * len(self.tensors)

    def program_key(self) -> list[Any]:
        """Return what decides the backward, besides the values of tensors."""
        metas = [
            [(m.shape, m.dtype) if isinstance(m, torch.Tensor) else m for m in some]
            for some in (self.metas, self.saved)
        ]
        context = None if self.context_spec is None else self.context_spec.key
        key = [self.cls, self.is_tensor, self.output_is_tensor, self.rest, metas, context]
        return [*key, self.saved_outputs, self.bound.tensors, self.bound.numbers, self.saved_given]

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the forward and return its outputs."""
        cls, tensors = self.cls, [a for a in args if isinstance(a, torch.Tensor)]
        needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        context, values = _Context(needs), [value_of(t) for t in tensors]
        before = next(SERIALS)
        flow = flow_of(tensors)
        with torch.no_grad():
            if _has_setup(cls):
                out = cls.forward(*args)
                cls.setup_context(context, args, out)
            else:
                out = cls.forward(context, *args)
            if context.dirty and flow is Flow.STOPPED:
                return out  # without a gradient it is the argument itself, as in eager
            # A list or a dict is one output, and what it holds has no gradient.
            given = out if isinstance(out, tuple) else (out,)
            self.output_is_tensor = [isinstance(one, torch.Tensor) for one in given]
            leaves: list[Any] = [one for one in given if isinstance(one, torch.Tensor)]
            if any(extents_of(leaf) for leaf in leaves):
                raise _unsized(f"an output of {cls.__name__}.forward")
            outs = [value_of(leaf) for leaf in leaves]
        self.metas = [meta_of(leaf) for leaf in leaves]
        saved = self._save(context, tensors, leaves, before)
        attached = self.attach(values, self.bound.values, outs, saved)
        made: list[torch.Tensor] = []
        for leaf, plain, value, meta in zip(leaves, outs, attached, self.metas, strict=True):
            constant = id(leaf) in context.constant or not differentiable(leaf.dtype)
            own = Flow.STOPPED if constant else flow
            value = plain if constant else value
            if any(leaf is one for one in context.dirty):
                refuse_by_autograd(leaf, [])
                made.append(write(leaf, value, flow=own))
            else:
                made.append(wrap(value, meta.dtype, trace=self.trace, flow=own))
        results = _among(made, self.output_is_tensor, given)
        return tuple(results) if isinstance(out, tuple) else results[0]

    def _save(
        self, context: _Context, tensors: list[Any], outs: list[Any], before: int
    ) -> list[jax.Array]:
        """Return the values that the backward needs.

        Gradients flow through those of arguments, not through what forward computed on its way.

        Args:
            before: The serial number of the last memory that forward did not make.
        """
        # What the backward reads of a traced number is a value of the forward's program.
        kept, self.context_spec = pytree.flatten(
            (context.saved_tensors, context.__dict__), leaf=program_leaf
        )
        specs = (self.context_spec, pytree.flatten(self.rest)[1])
        roots = [one for spec in specs for one in pytree.statics_of(spec)]
        self.bound = BoundTensors(self.trace, [*roots, self.cls.forward, self.cls.backward])
        self.saved = [type(leaf) if isinstance(leaf, SYMBOLIC) else meta_of(leaf) for leaf in kept]
        self.saved_given = [self._given(leaf) for leaf in kept]
        self.saved_outside = [_memory(leaf) <= before for leaf in kept]
        dirty = {id(tensor) for tensor in context.dirty}
        given = {id(tensor) for tensor in tensors} - dirty
        own = [_has_own_graph(leaf, before) and id(leaf) not in given for leaf in kept]
        self.saved_leaves = [one and kept[i]._is_leaf for i, one in enumerate(own)]
        if own != self.saved_leaves and _differentiates(self.cls.backward):
            raise port_error(
                f"{self.cls.__name__}.forward keeps a graph in its context, which its backward"
                " differentiates",
                code="TPU403",
                remedy="keep what the graph is made of, and compute it again in backward",
                place=_end_of(self.cls.forward),
            )
        self.saved_seen = [id(leaf) in given and leaf.requires_grad for leaf in kept]
        position = {id(leaf): i for i, leaf in enumerate(outs) if id(leaf) not in given}
        self.saved_outputs = [position.get(id(leaf)) for leaf in kept]
        with torch.no_grad():
            stopped = [
                exact_value(leaf) if isinstance(leaf, SYMBOLIC) else value_of(leaf) for leaf in kept
            ]
        pairs = zip(kept, stopped, strict=True)
        values = [value_of(leaf) if id(leaf) in given else value for leaf, value in pairs]
        self.keys = self.trace.keys
        if self.keys is not None and self.keys.used:
            # In backward torch's generator continues: its numbers differ from those of forward.
            fresh = jax.random.fold_in(self.keys.base, self.keys.number)
            start = 0 if self.keys.start is None else self.keys.start
            values += [jax.random.fold_in(fresh, _BACKWARD), self.keys.base, jnp.asarray(start)]
        self.residual_kinds = jax.tree.map(_kind, (self.bound.values, values))
        return values

    def fwd(self, values: Any, bound: Any, outs: Any, saved: Any) -> Any:
        """Return the outputs and the residuals."""
        self.perturbed = [value.perturbed for value in values]
        values, bound, outs, saved = jax.tree.map(
            lambda leaf: leaf.value, (values, bound, outs, saved)
        )
        # A second derivative goes through what the function got and what it returned.
        outs = self.attach(values, bound, outs, saved)
        pairs = itertools.zip_longest(saved, self.saved_outputs)
        return outs, (bound, [s if i is None else outs[i] for s, i in pairs])

    def bwd(self, residuals: Any, cotangents: Any) -> Any:
        """Run the user's backward, in a program of its own: it may ask for derivatives itself."""
        given: list[Any] = []
        cotangents = jax.tree.map(_instantiated, cotangents)

        def run(residuals: Any, cotangents: Any) -> Any:
            given[:] = self._pulled_back(residuals, cotangents)
            return [g for g in given if g is not None]

        try:
            closed = jax.make_jaxpr(run)(residuals, cotangents)
        except PortError as error:
            if error.code != "TPU101" or not self.trace.closed:
                raise
            self.explores = True
            try:
                closed = jax.make_jaxpr(lambda *given: run(*given))(residuals, cotangents)
            except (RestartTrace, PortError):
                raise error from None  # it names the branch that both are about
            finally:
                self.explores = False
        found = iter(jaxpr_as_fun(closed)(*jax.tree.leaves((residuals, cotangents))))
        made = [None if g is None else next(found) for g in given]
        count = len(self.tensors)
        return made[:count], made[count:], None, None

    def _pulled_back(self, residuals: Any, cotangents: Any) -> list[Any]:
        """Return the cotangents of the arguments, then of what is bound; None is zero."""
        bound, saved = residuals
        # Torch runs backward after the autocast region has ended; `custom_bwd` enters its own.
        with (
            _running(self.trace) as trace,
            self.bound.holding(bound, trace),
            autocast_as(OFF),
        ):
            if trace is not self.trace:
                self._resume_numbers(trace, saved[len(self.saved) :])
            restored = self._restored(saved, trace)
            saved_tensors, attributes = pytree.unflatten(self.context_spec, restored)
            context = _Context(())
            context.__dict__.update(attributes)
            context.saved_tensors = saved_tensors
            context.needs_input_grad = self._needs(context.needs_input_grad)
            of_tensors = _rewrapped(_conjugate(cotangents), self.metas, trace)
            nones = [None] * len(self.output_is_tensor)
            given = _among(of_tensors, self.output_is_tensor, nones)
            grads = self._run_backward(trace, context, given)
            grads = self._checked(grads if isinstance(grads, tuple) else (grads,))
            picked = [(i, g) for i, g in enumerate(grads) if self.is_tensor[i]]
            pairs = zip(picked, self.tensors, strict=True)
            given = [self._cotangent(i, g, meta) for (i, g), meta in pairs]
            left = self.bound.take_gradients()
            if self.explores and any(g is not None for g in left):
                raise RestartTrace  # each path has added to them
            pairs = zip(left, bound, strict=True)
            given += [None if g is None else value_of(g).astype(b.dtype) for g, b in pairs]
            return _conjugate(_spoiled(given, trace.error_code))

    def _run_backward(self, trace: Trace, context: _Context, grads: list[Any]) -> Any:
        """Run the user's backward, along each path of its branches if it has to be."""
        if not self.explores:
            return _backward(self.cls, context, grads)
        name = f"{self.cls.__name__}.backward"
        run = functools.partial(_backward, self.cls, context, grads)
        return explored_alone(trace, name, run, [context, grads])

    def _needs(self, seen: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return which arguments need a gradient: also those that jax alone differentiates."""
        perturbed = iter(self.perturbed)
        pairs = zip(seen, self.is_tensor, strict=True)
        return tuple([(is_tensor and next(perturbed)) or need for need, is_tensor in pairs])

    def _resume_numbers(self, trace: Trace, numbers: list[Any]) -> None:
        """Let a backward draw random numbers of its own, and those of forward again."""
        stream = None
        if numbers:
            fresh, base, start = numbers
            trace.keys, stream = KeyStream(fresh), KeyStream(base, start=start)
        trace.resumed = (self.trace, self.keys, stream)

    def _restored(self, saved: Any, trace: Trace) -> list[Any]:
        """Return the saved tensors and numbers as the backward reads them."""
        made = _rewrapped(saved[: len(self.saved)], self.saved, trace)
        marks = zip(made, self.saved_seen, self.saved_outside, self.saved_leaves, strict=True)
        for tensor, seen, outside, leaf in marks:
            if seen:
                tensor._own_flow = Flow.SEEN
            if leaf:
                tensor._own_flow = Flow.STOPPED
                tensor.requires_grad_()
            if outside:
                trace.read_only.add(tensor._storage.serial)
        pairs = zip(made, self.saved_given, strict=True)
        return [one if given is None else given for one, given in pairs]

    def _given(self, leaf: Any) -> torch.Tensor | None:
        """Return a saved tensor that the backward reads as the same object."""
        is_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, TracedTensor)
        constant = is_host and not leaf.requires_grad and self.trace.alias(leaf) is None
        return leaf if constant or leaf in self.bound else None

    def _cotangent(self, index: int, grad: Any, meta: torch.Tensor) -> Any:
        """Return an argument's cotangent, of its size as autograd makes it; None is zero."""
        if grad is None or not differentiable(meta.dtype):
            return None
        if grad.shape != meta.shape:
            try:
                grad = grad.sum_to_size(meta.shape)
            except RuntimeError as error:
                raise port_error(
                    f"function {self.cls.__name__}Backward returned an invalid gradient at index"
                    f" {index} - got {list(grad.shape)} but expected shape compatible with"
                    f" {list(meta.shape)}, which eager PyTorch refuses too",
                    code="TPU403",
                    remedy="return a gradient of the argument's shape",
                    place=_end_of(self.cls.backward),
                ) from error
        return value_of(grad).astype(backend.jax_dtype(meta.dtype))

    def _checked(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a backward's gradients, refusing what eager refuses.

        Raises:
            PortError: there are fewer than arguments, or more that are not None.
        """
        count = len(self.is_tensor)
        if len(grads) < count or any(g is not None for g in grads[count:]):
            raise port_error(
                f"function {self.cls.__name__}Backward returned an incorrect number of gradients"
                f" (expected {count}, got {len(grads)}), which eager PyTorch refuses too",
                code="TPU403",
                remedy="return one gradient for each argument of forward, None where there is none",
                place=_end_of(self.cls.backward),
            )
        return grads[:count]

    def reached(self) -> list[bool]:
        """Return for each argument that is a tensor, then for what is bound, whether the backward
        gives it a gradient.
        """
        if self._reached is None:
            cotangents = [
                jax.ShapeDtypeStruct(m.shape, backend.jax_dtype(m.dtype)) for m in self.metas
            ]
            found: list[bool] = []

            def run(residuals: Any, cotangents: Any) -> None:
                found.extend(g is not None for g in self._pulled_back(residuals, cotangents))

            try:
                jax.eval_shape(run, self.residual_kinds, cotangents)
            except Exception:  # raised again, to the user, when a gradient is asked for
                found = [True] * (len(self.tensors) + len(self.bound.values))
            self._reached = found
        return self._reached


def _instantiated(cotangent: Any) -> jax.Array:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        kind: Any = cotangent.aval
        return jnp.zeros(kind.shape, kind.dtype)
    return cotangent


def _has_own_graph(leaf: Any, before: int) -> bool:
    """Return whether forward made this tensor such that derivatives can be taken by it or of it."""
    if not isinstance(leaf, TracedTensor) or not leaf.requires_grad:
        return False
    return _memory(leaf) > before or (leaf._is_leaf and not leaf._is_given)


def _differentiates(function: Any) -> bool:
    """Return whether a function calls `torch.autograd.grad` or `backward` itself."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and not {"grad", "backward"}.isdisjoint(code.co_names)


def _memory(leaf: Any) -> float:
    """Return the serial number of a saved tensor's memory; a number has none."""
    return leaf._storage.serial if isinstance(leaf, TracedTensor) else math.inf


def _among(tensors: list[Any], is_tensor: list[bool], others: Sequence[Any]) -> list[Any]:
    """Return `others` with these tensors in place of those that are one."""
    left = iter(tensors)
    pairs = zip(is_tensor, others, strict=True)
    return [next(left) if is_one else other for is_one, other in pairs]


def _kind(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _rewrapped(values: Any, metas: list[Any], trace: Trace) -> list[Any]:
    return [
        wrap(value, meta.dtype, trace=trace, flow=Flow.HIDDEN)
        if isinstance(meta, torch.Tensor)
        else number(value, number_kind(meta))
        for value, meta in zip(values, metas, strict=True)
    ]


def _conjugate(gradients: Any) -> Any:
    """Turn torch's gradients into jax's, or back: those of complex numbers are conjugates."""
    return jax.tree.map(lambda g: g.conj() if jax.numpy.iscomplexobj(g) else g, gradients)


def _backward(cls: Any, context: _Context, grads: Sequence[torch.Tensor]) -> Any:
    backward = cls.backward if cls.vjp is torch.autograd.Function.vjp else cls.vjp
    # torch 2.11 has no such attribute: gradients are always arguments of their own there.
    boxed = getattr(cls, "boxed_grads_call", False)
    return backward(context, grads) if boxed else backward(context, *grads)


def _unsized(what: str) -> Exception:
    return port_error(
        f"{what} has a size that depends on data; a custom autograd function needs static sizes",
        code="TPU203",
        remedy="give it all elements together with a mask, or leave the class that calls it to"
        " eager PyTorch: --eager NAME, porting(eager=(...))",
    )


def apply_function(trace: Trace, cls: Any, args: tuple[Any, ...]) -> Any:
    """Call a custom autograd function with traced tensors."""
    if any(extents_of(a) for a in args):
        raise _unsized(f"an argument of {cls.__name__}.apply")
    return _FunctionCall(trace, cls, args).run(args)


def _end_of(function: Any) -> str | None:
    """Return the last line of a function as `file:line`, which returns its results."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    return f"{code.co_filename}:{max(line for *_, line in code.co_lines() if line)}"


def _spoiled(gradients: list[Any], code: Storage | None) -> list[Any]:
    """Return gradients that are nan where a check of the backward failed.

    A backward can return nothing but gradients: there is no other way to tell the caller.
    """
    if code is None or not code.version:
        return gradients
    failed = code.value != 0
    return [None if g is None else jnp.where(failed, jnp.nan, g) for g in gradients]


@contextlib.contextmanager
def _running(trace: Trace) -> Iterator[Trace]:
    """Enter a trace for a backward: the forward's, or a new one if that has already ended."""
    if not trace.closed:
        failures, read_only, first = trace.error_code, trace.read_only, trace.writable_from
        try:
            # It may run more than once: to see what it reaches, and for its gradients.
            with trace.recording(repeats=True):
                trace.error_code = _no_failure(trace)
                trace.read_only = read_only | {s.serial for _, s in trace.promoted.values()}
                trace.writable_from = len(trace.made)
                yield trace
        finally:
            trace.error_code = failures
            trace.read_only, trace.writable_from = read_only, first
        return
    later = Trace(None, TraceOptions(patches=trace.options.patches))
    later.writable_from = 0
    patches = installed(later.options.patches)
    with eager_compiled(), no_fused_kernels(), patches, active(later):
        later.error_code = _no_failure(later)
        yield later


def _no_failure(trace: Trace) -> Storage:
    return Storage(jnp.zeros((), jnp.int32), trace)
