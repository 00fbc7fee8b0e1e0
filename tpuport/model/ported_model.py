"""A ported model: the jitted calls, its state as pytrees, and the way back to torch."""

import contextlib
import copy
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.core
import torch

from tpuport.diagnosis.explain import explaining
from tpuport.foundation import pytree
from tpuport.foundation.errors import UsageError
from tpuport.foundation.pytree.clone import clone_module
from tpuport.foundation.pytree.sealed import apart
from tpuport.generation import generate
from tpuport.model import after_error, drawn, lowering, pure, report_builder, unread_arguments
from tpuport.model.bound_program import BoundProgram, bind, call_part, kinds_of
from tpuport.model.moments import refuse_moments
from tpuport.model.options import ConvertOptions
from tpuport.model.parity import gradients, verify
from tpuport.model.parity.bisect import fail
from tpuport.model.parity.call import Call, concrete
from tpuport.model.parity.sampling import Sampler
from tpuport.model.ported_state import PortedState
from tpuport.model.program_cache import (
    BoundCall,
    CachedProgram,
    CallArguments,
    JittedProgram,
    ProgramCache,
    Signature,
    VerifyAgain,
    compile_times,
    flattened,
    raise_failed,
    release,
    retrace_causes,
    signature_of,
)
from tpuport.model.shared_results import share
from tpuport.reports.records import Parity, Retrace
from tpuport.reports.report import PortReport
from tpuport.tracing.core import arguments
from tpuport.tracing.core.constants import Hoisted
from tpuport.tracing.core.context import LiftedCheck
from tpuport.tracing.core.keys import as_key, fresh_key, unused_key
from tpuport.tracing.core.reentrancy import one_at_a_time
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.session.interrupts import held_back
from tpuport.tracing.state.request import TraceRequest, TraceResult
from tpuport.tracing.state.tensor_attributes import refuse_given_attributes


class PortedModel(PortedState):
    """A PyTorch module (or function) that runs as one jitted JAX program.

    Made by `tpuport.convert`. Call it like the module; `params` and `buffers` are dicts of
    `jax.Array` keyed by the torch fqn (frozen parameters are in `buffers`: an optimizer made over
    `params` never sees them).
    """

    def __init__(
        self, target: torch.nn.Module | Callable[..., Any], options: ConvertOptions
    ) -> None:
        self.report = report_builder.new_report(target)
        with self.report.timed("load"):
            super().__init__(target, options)
        self.methods = options.methods
        self._cache = ProgramCache()
        # Programs by the kinds of plain arguments, for a quick call.
        self._bound: dict[Any, BoundProgram] = {}
        self._last_program: CachedProgram | None = None
        self._verifying = False
        self._verifier: Any = None
        if options.verify:
            self._verifier = verify.Verifier(self, target, options.rtol)
            self._verifier.always = options.verify == "always"
        self._sampler = Sampler(self._verifier) if options.verify == "sample" else None
        # Methods that are several programs, by name.
        self._composed: dict[str, Any] = {}
        if "generate" in options.methods:
            own = generate.is_around_transformers(target)
            if own or generate.is_transformers(target):
                self._composed["generate"] = generate.TextGeneration(self, call_part, is_around=own)

    # -- calls -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` (or the ported function): one jitted program per signature of arguments.

        Raises:
            PortError: The code cannot be ported exactly, or its result differs from eager's.
            UsageError: An argument is of a kind that cannot be passed.
        """
        return self._quick_call("forward", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.__dict__.get("methods", ()):
            tracer = self.__dict__.get("_tracer")
            where = (
                ""
                if tracer is None or tracer.master is None
                else f" of a ported {type(tracer.master).__name__}"
            )
            msg = (
                f"{name!r} is not a ported method{where}; to call a method of the module, name it:"
                f" tpuport.convert(model, methods=('forward', {name!r}))"
            )
            raise AttributeError(msg)
        call = self._call if self._is_composed(name) else self._quick_call
        return lambda *args, **kwargs: call(name, args, kwargs)

    def _quick_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method. If the code raises, what it wrote until then stays, as in eager."""
        try:
            return self._called_quickly(method, args, kwargs)
        except Exception as error:
            if after_error.is_of_the_code(error, (args, kwargs)):
                after_error.follow(self, method, args, kwargs)
            raise

    def _called_quickly(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method: by its bound program if there is one for such arguments."""
        if self._edits is not None or self._mode is not None:
            self._take_edits()
        self._last_key = None
        (kinds, leaves), version = kinds_of(method, args, kwargs), self._state_version
        is_due = self._sampler is not None and self._sampler.is_due()
        bound = None if is_due else self._bound.get((kinds, version))
        if bound is not None:
            with explaining():
                is_valid, out = bound.call(self, leaves)
            if is_valid:
                self._outside_changes = 0
                return out
        with one_at_a_time():
            version = self._state_version
            out = self._call(method, args, kwargs, sampler=self._sampler if is_due else None)
            compares = self._verifier is not None and self._verifier.always
            if kinds is not None and version == self._state_version and not compares:
                bind(self, self._last_program, self._bound, (kinds, version))
        return out

    @explaining()
    @one_at_a_time()
    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        sampler: Sampler | None = None,
    ) -> Any:
        try:
            return self._called(method, args, kwargs, sampler)
        except (RuntimeError, IndexError) as error:
            longer = arguments.long_integers((args, kwargs), error)
            if longer is None:
                raise
        return self._called(method, longer[0], longer[1], sampler)

    def _called(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], sampler: Sampler | None
    ) -> Any:
        refuse_given_attributes((args, kwargs), lambda: self._tracer.outside(method).code)
        verifier = self._verifier
        if verifier is not None:
            if verifier.always or self._path_of(method, args, kwargs) not in verifier.done:
                return self._verified_call(method, args, kwargs)
            if sampler is not None:
                return self._sampled_call(sampler, method, args, kwargs)
        try:
            return self._run(method, args, kwargs)[0]
        except VerifyAgain:
            return self._verified_call(method, args, kwargs)

    def _path_of(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the code path of a call; of a composed method it depends on what is given."""
        path = super()._path_of(method, args, kwargs)
        return (path, len(args), frozenset(kwargs)) if self._is_composed(method) else path

    def _is_composed(self, method: str) -> bool:
        """Return whether a method is several programs, with work on the host between them."""
        return method in self._composed

    def _run(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Run one jitted call; return its output and the state before it."""
        composed = self._composed.get(method)
        if composed is not None:
            return composed(args, kwargs), self._values()
        call = self._prepare(method, args, kwargs)
        return self._finish(call, call.run()), call.state

    def _prepare(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
        """Find or compile the program for a call, and collect its inputs."""
        leaves, given = self._flattened(args, kwargs)
        state = self._values()
        compiled, is_new, given = drawn.program_for(self, method, state, given)
        arguments.refuse_offsets(leaves, given.paths, compiled.outcome.placed)
        timing = compile_times(self.report) if is_new else contextlib.nullcontext()
        key = fresh_key() if compiled.outcome.uses_key else unused_key()
        self._last_key = key
        return BoundCall(compiled, leaves, given, state, key, timing)

    def _flattened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], CallArguments]:
        """Return the leaves of a call's arguments, and their arrays."""
        return flattened((args, kwargs), self._placement)

    @held_back()  # tensors and attributes change together
    def _finish(self, call: BoundCall, results: Any) -> Any:
        """Apply a program's results: failed checks, changed arguments, new state, output."""
        outs, new_state, mutated, put, code = results
        compiled, outcome = call.compiled, call.compiled.outcome
        raise_failed(outcome.trace.recorder.checks, code)
        self._refuse_changes(compiled)
        arguments.refuse_shared_memory(call.leaves, call.given.paths, mutated)
        arguments.write_leaves(call.leaves, mutated)
        self._advance(compiled, new_state)
        made = list(map(self._result, outs, outcome.out_metas))
        made += map(self._result, put, outcome.put_metas)
        self._share(call, made)
        if outcome.argument_changes is not None:
            left = made[len(outs) :]
            outcome.argument_changes.write_back(call.given.spec, call.leaves, left)
        return pytree.unflatten(outcome.out_spec, made[: len(outs)])

    def _share(self, call: BoundCall, given: list[Any]) -> None:
        """Give results the memory that eager's results share."""
        share(self, call.compiled, call.leaves, given)

    def _result(self, value: Any, meta: Any) -> Any:
        return arguments.from_program(value, meta)

    def _verified_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and compare with eager PyTorch on the same random numbers."""
        self._refuse_meta(self._values())
        verifier, path = self._verifier, self._path_of(method, args, kwargs)
        trainable = self._differentiates(args, kwargs)
        call = verifier.call(method, args, kwargs, trainable=trainable)
        with self._tracer.outside(method).left_alone(), verifier.writes_restored():
            started = time.monotonic()
            expected = verifier.reference(call)
            spent = time.monotonic() - started
            if trainable:
                self._note_saved(path, expected)
            self._verifying = True
            try:
                with after_error.refused_if_alone((args, kwargs)):
                    out, _ = self._run(method, args, kwargs)
            finally:
                self._verifying = False
        started = time.monotonic()
        with self.report.timed("verify"):
            found = verify.outputs(expected, out, (args, kwargs))
            found += verify.buffers(call, expected, self._values())
            if trainable:
                found += self._gradient_pairs(expected, out, (args, kwargs))
            records = verifier.check(call, expected, found, self._eager_gradients)
        self._judge(call, verifier, records, again=path in verifier.done)
        verifier.done.add(path)
        if self._sampler is not None:
            self._sampler.wait_for(spent + time.monotonic() - started)
        return out

    def _sampled_call(
        self, sampler: Sampler, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call, and compare it with eager PyTorch in the background."""
        started = time.monotonic()
        call = self._verifier.call(method, args, kwargs)
        out, _ = self._run(method, args, kwargs)
        sampler.submit(call, out, (args, kwargs), started)
        return out

    def _judge(
        self, call: Call, verifier: Any, records: list[Parity], *, again: bool = False
    ) -> None:
        """Report compared values; of a value that was compared before, the worst is kept.

        Raises:
            ParityError: One differs. The next call is compared too.
        """
        (self.report.add_worst if again else self.report.add)(*records)
        self.report.verified = all(record.ok for record in records)
        if not self.report.verified:
            verifier.done.clear()
            self._bound.clear()
            fail(verifier, call, records)

    def _note_saved(self, path: Any, expected: verify.Reference) -> None:
        """Note what eager saved for the backward pass of a code path.

        Nothing here: arrays are never written.
        """

    def _gradient_pairs(self, expected: verify.Reference, out: Any, given: Any) -> list[Any]:
        """Pair autograd's gradients through eager's results with those through the port's.

        Empty here: autograd does not go through the results of a jitted call.
        """
        del expected, out, given
        return []

    def _eager_gradients(self, found: verify.Reference) -> dict[str, Any]:
        """Return the gradients that are compared, through eager's results."""
        return gradients.of_reference(found)

    def verify(
        self, *args: Any, method: str = "forward", gradients: bool = True, **kwargs: Any
    ) -> PortReport:
        """Compare outputs, changed buffers and gradients with eager PyTorch on these arguments.

        The records are added to `report`.

        Raises:
            ParityError: A value differs beyond the tolerance.
        """
        verifier = verify.Verifier(self, self._source, self._options.rtol)
        call = verifier.call(method, args, kwargs, trainable=gradients)
        saved, self._verifier = self._verifier, verifier
        try:
            self._verified_call(method, args, kwargs)
        finally:
            self._verifier = saved
        if gradients:
            self._compare_gradients(verifier, call, list(self.params))
        return self.report

    def _compare_gradients(self, verifier: Any, call: Call, names: list[str]) -> None:
        """Compare the gradients of a random projection of the outputs, by parameter.

        Raises:
            ParityError: One differs.
        """
        with self.report.timed("verify"):
            expected = verifier.reference(call)
            want = gradients.of_reference(expected)
            if not want:
                return
            pairs = gradients.paired(want, *gradients.of_port(verifier, call, names))
            records = verifier.check(call, expected, pairs, gradients.of_reference)
        self._judge(call, verifier, records)

    def trace_now(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace, compile and check a method on example arguments.

        The state, the arguments and the host's random generators are left unchanged.
        """
        params, buffers = dict(self.params), dict(self.buffers)
        if any(isinstance(v, jax.ShapeDtypeStruct) for v in self._values().values()):
            self.eval_shape(*args, method=method, **kwargs)
            self.report.why_not_verified = "the model is on the meta device and has no weights"
            return
        version, master = self._state_version, self._tracer.master
        kept = None if master is None else clone_module(master, lambda t: t)[0]
        with host_randomness.restored([]):
            self._call(method, *arguments.copies((args, kwargs)))
        self.params, self.buffers = params, buffers
        if self._state_version != version:
            self._replace_module(kept)
            self._state_version = version
            self._state_changes.clear()
            self._same_changes.clear()

    @explaining()
    def apply(
        self,
        params: dict[str, Any],
        buffers: dict[str, Any],
        rng: jax.Array | None,
        *args: Any,
        method: str = "forward",
        **kwargs: Any,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Run the pure function behind the call, for your own `jax.jit`, `jax.grad` or `jax.vmap`.

        Args:
            params: Trainable parameters by fqn, as `self.params`; or stacked, as
                `tpuport.stack_blocks` returns them.
            buffers: All other state by fqn, as `self.buffers`.
            rng: A key (`jax.random.key(0)`); None if the function draws no random numbers.
            *args: The method's arguments: torch tensors, jax arrays, or any pytree of them.
                Non-tensors are static. They are never changed, whatever the method does to them.
            method: The method to run.
            **kwargs: The method's keyword arguments.

        Returns:
            The output in its own structure with `jax.Array` leaves, and the buffers after the call.
            `jax.grad` of it gives zeros where eager PyTorch leaves a gradient at None;
            `tpuport.training.value_and_grad` says where.

        Raises:
            UsageError: A parameter or buffer is missing.
            PortError: The code cannot be ported exactly.

        What eager PyTorch raises for values is raised outside of transformations of JAX only; for
        inside see `tpuport.errors_of`.
        """
        given = (params, buffers, rng, *args)
        traced = any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves((given, kwargs)))
        checks = self._options.checks and not traced
        named = kwargs | {"method": method}
        try:
            code, found, result = self._applied(given, named, checks=checks)
        except (RuntimeError, IndexError) as error:
            longer = arguments.long_integers((args, kwargs), error)
            if longer is None:
                raise
            given, named = (params, buffers, rng, *longer[0]), longer[1] | {"method": method}
            code, found, result = self._applied(given, named, checks=checks)
        if not isinstance(code, jax.core.Tracer):
            raise_failed(found, code)
        return result

    @explaining()
    @one_at_a_time()
    def _applied(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, checks: bool
    ) -> tuple[jax.Array, tuple[LiftedCheck, ...], tuple[Any, dict[str, jax.Array]]]:
        """Run `apply`; return the number of the check that failed, all checks, and its result."""
        params, buffers, rng = args[:3]
        method = kwargs.pop("method", "forward")
        given = {**buffers, **params}
        values = self._checked_values(
            stacked_params.unstack(params), stacked_params.unstack(buffers)
        )
        if self._verifier is not None and ("apply", method) not in self._verifier.done:
            self._verify_gradients(params, given, rng, (method, args[3:], kwargs))
        _, call = flattened((args[3:], kwargs))
        request = TraceRequest(
            *(method, values, None if rng is None else as_key(rng)),
            *(call.values, call.metas, call.spec),
            checks=checks,
            known={n: v for n, v in values.items() if not isinstance(v, jax.core.Tracer)},
            known_leaves={
                i: v for i, v in enumerate(call.values) if not isinstance(v, jax.core.Tracer)
            },
        )
        with self._precision_scope():
            outcome = pure.traced(self, request, given, gates=True)
        leaves = arguments.static_leaves(outcome.out_leaves, outcome.out_metas)
        changed = {name: value for name, value in outcome.state.items() if name not in params}
        result = pytree.unflatten(outcome.out_spec, leaves), {**buffers, **changed}
        return outcome.code, tuple(outcome.trace.recorder.checks), result

    def _verify_gradients(
        self, params: dict[str, Any], given: dict[str, Any], rng: Any, asked: tuple[Any, Any, Any]
    ) -> None:
        """Compare gradients at the first `apply` that jax differentiates, if values are known.

        Under the caller's own `jax.jit` or `jax.vmap` there are none.
        """
        method, args, kwargs = asked
        if not any(isinstance(value, jax.core.Tracer) for value in given.values()):
            return
        leaves, spec, _ = arguments.flatten_call((args, kwargs))
        values = [concrete(leaf) for leaf in leaves]
        state = {name: concrete(value) for name, value in given.items()}
        key = unused_key() if rng is None else concrete(as_key(rng))
        if any(value is None for value in (*values, *state.values(), key)):
            return
        verifier = self._verifier
        verifier.done.add(("apply", method))  # the comparison calls `apply` in turn
        copied, named = pytree.unflatten(spec, values)
        call = dataclasses.replace(
            verifier.call(method, copied, named, trainable=True), key=key, state=state
        )
        try:
            self._compare_gradients(verifier, call, list(params))
        except BaseException:
            verifier.done.discard(("apply", method))
            raise

    # -- compiling ---------------------------------------------------------------------------------

    def _program_for(
        self, method: str, state: dict[str, Any], given: CallArguments, *, is_call: bool
    ) -> tuple[CachedProgram, bool]:
        """Return the program for such arguments, and whether it was traced now.

        A program compiled ahead (`is_call` is false) is no retrace for the report.
        """
        signature = self._signature(method, given)
        known, outside = self._known_program(signature, state, given, is_call=is_call)
        if known is not None:
            self._outside_changes, self._last_program = 0, known
            return known, False
        if is_call:
            if outside and self._verifier is not None and not self._verifying:
                raise VerifyAgain
            self._count_outside(outside)
            self._note_retrace(signature, outside or None)
        with self.report.timed("trace"):
            made = self._trace_to_jaxpr(signature, state, given)
        # Tracing may have found that it needs the value of an argument, which then becomes part
        # of the signature.
        self._cache.add(self._signature(method, given), made)
        self._last_program = made
        return made, True

    def _known_program(
        self, signature: Signature, state: dict[str, Any], given: CallArguments, *, is_call: bool
    ) -> tuple[CachedProgram | None, str | None]:
        """Return a program for such a call, or None and what has changed since the newest one.

        One for other strings and numbers is right, too, if no code looks at them.
        """
        known, outside = self._cache.fitting(signature, state)
        seals = is_call and self._tracer.fallback is None and given.lengths is None
        if known is None and outside is None and seals:
            known = unread_arguments.fitting(
                *(self._cache.values(), signature, state, given),
                lambda sealed: self._traced(signature, state, sealed)[0],
            )
        return known, outside

    def _signature(self, method: str, given: CallArguments) -> Signature:
        self._take_edits()
        host = self._tracer.plan_for(method, given.spec).host_args
        for index in host:
            if isinstance(given.values[index], jax.ShapeDtypeStruct):
                name = arguments.argument_name(given.paths[index])
                raise UsageError(
                    f"the program depends on the value of {name}, and only its shape is given;"
                    " pass a tensor with the value"
                )
        version = (self._version_of_state(), self._variant())
        return signature_of(method, given, version, host)

    def _trace_to_jaxpr(
        self, signature: Signature, state: dict[str, Any], given: CallArguments
    ) -> CachedProgram:
        self._refuse_meta(state)
        plan = functools.partial(self._tracer.plan_for, signature.method, given.spec)
        compiled, hoisted = drawn.settled(plan, lambda: self._traced(signature, state, given))
        refuse_moments(compiled, lambda: self._traced(signature, state, given)[0])
        report_builder.record(self.report, compiled.outcome, hoisted.tensors(compiled.run.hoisted))
        release(compiled.outcome)
        compiled.form = apart(given.spec)
        return compiled

    def _traced(
        self, signature: Signature, state: dict[str, Any], given: CallArguments
    ) -> tuple[CachedProgram, Hoisted]:
        hoisted = Hoisted()
        held: dict[str, TraceResult] = {}
        # When compiling ahead of time, an argument may be only a shape.
        known = {
            i: v for i, v in enumerate(given.values) if not isinstance(v, jax.ShapeDtypeStruct)
        }
        concrete = dict(state)

        def call(state: dict[str, Any], key: jax.Array, values: list[Any]) -> Any:
            request = TraceRequest(
                *(signature.method, stacked_params.unstack(state), key, values),
                *(given.metas, given.spec, hoisted.array, self._options.checks),
                *(concrete, known),
                wide=True,
                lengths=given.lengths,
                draws=True,
            )
            outcome = self._tracer.trace(request)
            placed = self._placement.state(outcome.state)
            outcome.state = stacked_params.restack(placed, state)
            host = self._tracer.plan.host_args
            outcome.host_paths = [
                arguments.argument_name(signature.parts[i][0]) for i in sorted(host)
            ]
            held["outcome"] = outcome
            put = outcome.put_leaves
            return outcome.out_leaves, outcome.state, outcome.mutated, put, outcome.error_code

        with self._precision_scope():
            paths = [path for path, _ in signature.parts]
            program = self._transformed(call, paths, lambda: held["outcome"])
            closed, shape = jax.make_jaxpr(program, return_shape=True)(
                state, unused_key(), given.values
            )
        closed = self._tracer.finished(closed, held["outcome"].trace)
        closed, tape = drawn.with_draws(closed, held["outcome"].trace)
        name = f"{self.report.model}_{signature.method}"
        run = JittedProgram(closed, shape, name, place=self._placement.constants)
        baked = {name: state[name] for name in held["outcome"].baked}
        names = sorted(state)  # as `jax.tree.leaves` orders the state that was traced
        writes = bool(held["outcome"].mutated)
        made = CachedProgram(run, held["outcome"], signature, names, baked, writes, tape=tape)
        return made, hoisted

    def _version_of_state(self) -> int:
        """Return a number that tells apart states which need other programs."""
        return self._state_version

    def _variant(self) -> Any:
        """Return a key that tells apart the functions compiled for equal arguments."""
        return None

    def _transformed(
        self, pure: Callable[..., Any], paths: list[str], outcome: Callable[[], TraceResult]
    ) -> Callable[..., Any]:
        """Return the function to compile for a call whose arguments have these paths.

        `outcome` describes its results, once it is traced.
        """
        del paths, outcome
        return pure

    def _precision_scope(self) -> Any:
        """Return the context in which float32 products get the precision that was asked for."""
        precision = self._options.matmul_precision
        if precision is None:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(precision)

    def _reconfigure(self, **parts: Any) -> None:
        """Replace parts of the `Tracer`, such as its placement, and forget all programs."""
        self._tracer = dataclasses.replace(self._tracer, **parts)
        self._cache.clear()
        self._bound.clear()
        if "casting" in parts and self._verifier is not None:
            self._verifier.done.clear()

    def _copy(self, params: dict[str, Any], buffers: dict[str, Any], **parts: Any) -> Self:
        """Return a model with other state and parts of the `Tracer`, and programs of its own."""
        made = copy.copy(self)
        made.params, made.buffers = params, buffers
        made._cache, made._bound, made._sampler = ProgramCache(), {}, None
        made._memories, made._copies = weakref.WeakValueDictionary(), {}
        made._tracer = dataclasses.replace(self._tracer, **parts)
        return made

    @explaining()
    def compile(self, *args: Any, method: str = "forward", **kwargs: Any) -> None:
        """Trace and compile for such arguments without running: later calls like it start at once.

        Shapes are enough for tensors and arrays: meta tensors, `jax.ShapeDtypeStruct`. Inside
        `tpuport.compile_cache()` other processes profit too; `tpuport.warmup` takes many at a time.
        """
        lowering.lower(self, method, args, kwargs).compile()

    @explaining()
    def eval_shape(self, *args: Any, method: str = "forward", **kwargs: Any) -> Any:
        """Trace without computing (works for models on the meta device too).

        Return the output's structure with a `jax.ShapeDtypeStruct` at each leaf.
        """
        return lowering.shapes_of(self, method, args, kwargs)

    def _note_retrace(self, signature: Signature, outside: str | None = None) -> None:
        earlier = [s for s in self._cache if s.method == signature.method]
        if not earlier:
            return
        causes = retrace_causes(earlier[-1], signature, self._state_changes)
        causes = causes if outside is None else (outside,)
        self.report.retraces.append(Retrace(signature.method, len(earlier), causes))
