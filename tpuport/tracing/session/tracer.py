"""The trace of a user's function: repeated attempts, what each of them learns, and the outcome."""

import contextlib
import functools
import inspect
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError, UsageError
from tpuport.foundation.imports import uncollected
from tpuport.foundation.interop import backend, device_mark, shared_memory
from tpuport.foundation.patching.shim import Shim, installed
from tpuport.foundation.pytree.clone import Cloner
from tpuport.foundation.user_frames import CodePlace, is_inside
from tpuport.source.rewrite import live
from tpuport.source.rewrite.codegen import nested_codes
from tpuport.source.rewrite.matching import RuleVisitor
from tpuport.tracing.control_flow.path_explorer import Explorer
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.arguments import Watch, program_leaf, unsized, wants_int64
from tpuport.tracing.core.context import KeyStream, Trace, TraceOptions, no_policy
from tpuport.tracing.core.host_tape import Tape, draw_read, reads_draw
from tpuport.tracing.core.measured_time import HELD
from tpuport.tracing.core.placement import NOWHERE, Placement
from tpuport.tracing.core.reentrancy import SWAPS
from tpuport.tracing.core.speculation import RestartTrace, SpeculationLog
from tpuport.tracing.core.storage import SERIALS, Storage
from tpuport.tracing.core.tensor import TracedTensor, version
from tpuport.tracing.core.values import value_of
from tpuport.tracing.dynamic_shapes.counted_rows import lists_joined, refuse_kept
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.guards.attribute_reads import note_copy
from tpuport.tracing.guards.code_reads import CodeReads
from tpuport.tracing.guards.global_state import GlobalState
from tpuport.tracing.guards.identity_tables import refuse_identity_tables
from tpuport.tracing.guards.kept_iterators import advances_iterator
from tpuport.tracing.guards.linked_arguments import Links, linked_cells
from tpuport.tracing.guards.stand_ins import stood_in
from tpuport.tracing.patterns import patterns_for, rewritten
from tpuport.tracing.precision.apply import NOT_CAST, Casting
from tpuport.tracing.scan_layers import BlockCalls, roll, without_dead_results
from tpuport.tracing.session import state_left, taped_ops
from tpuport.tracing.session.activate import active, eager_compiled, no_fused_kernels
from tpuport.tracing.session.fallback import Fallback
from tpuport.tracing.session.graph_passes import Pass, with_passes
from tpuport.tracing.session.growing_arguments import refuse_effects
from tpuport.tracing.session.interrupts import held_back
from tpuport.tracing.session.left_functions import refuse_functions
from tpuport.tracing.session.output_aliases import memory_of, output_aliases, rebound
from tpuport.tracing.session.program_io import (
    is_of_text,
    program_leaves,
    refuse_lost_effects,
    refuse_passing,
    refuse_writes_in_closures,
    state_tensor,
    traced_arguments,
)
from tpuport.tracing.session.seen_types import seen_in
from tpuport.tracing.state import overlaps
from tpuport.tracing.state.held_generators import hold_generators, hold_host_generators
from tpuport.tracing.state.module_state import (
    StateTree,
    forget_random_states,
    python_changes,
    refuse_moved_parameters,
    refuse_new_ties,
    state_tree,
)
from tpuport.tracing.state.request import TraceRequest, TraceResult
from tpuport.tracing.state.tensor_attributes import refuse_set_attributes

_MAX_ATTEMPTS = 40
NEEDS_VALUE = {"TPU101", "TPU103", "TPU104", "TPU203", "TPU301"}


@dataclass
class Tracer:
    """A module's method or a free function, and what tracing it has taught so far (`plan`).

    `functions` are called with the module, and have the names of methods.
    """

    function: Callable[..., Any] | None
    master: torch.nn.Module | None
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    # Replacements of torch's functions while it is traced: `tpuport.tracing.patches`.
    patches: tuple[type[Shim], ...] = ()
    # The rules that rewrite lines which a trace cannot run.
    rules: tuple[type[RuleVisitor], ...] = ()
    # Gives the state of a trace what hooks of parameters make of their gradients.
    hooked: Callable[[Trace, dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None
    plan: SpeculationLog = field(default_factory=SpeculationLog)
    plans: dict[Any, SpeculationLog] = field(default_factory=dict)
    tried: set[tuple[str, int, int | None]] = field(default_factory=set)
    alone: set[CodeType] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)
    # Parameters that the call makes require grad: what it computes before gives them no gradient.
    late: set[str] = field(default_factory=set)
    # Methods that are refused if a loop with growing tensors is not one loop of the program.
    whole: set[str] = field(default_factory=set)
    # Methods whose random numbers Python draws before each call, where it draws any.
    drawing: set[str] = field(default_factory=set)
    rewrites: dict[Any, live.LiveRewrite] = field(default_factory=dict)
    sites: dict[Any, set[live.Site]] = field(default_factory=dict)
    rewrite_seconds: float = 0.0
    dynamic: bool = False
    placement: Placement = NOWHERE
    casting: Casting = NOT_CAST
    remat: Callable[[str], str | None] = no_policy
    takes_gradients: bool = False  # whether torch's autograd sees the program as a node
    held: dict[str, Any] | None = None  # the state's tensors that code may reach, if not master's
    target: str | None = None  # the platform it is for, if that is not the placement's
    blocks: str = "auto"  # how repeated blocks are compiled: see `tpuport.convert`
    # What runs on the host, if the user asked for that: see `tpuport.convert`.
    fallback: Fallback | None = None
    # Passes over the FX graph of `forward`.
    passes: tuple[Pass, ...] = ()
    # What ties the arguments of this call to the module.
    links: Links | None = None
    # Attributes of the module that no program is known to read, by full name.
    unread: frozenset[str] = frozenset()

    @property
    def rolls(self) -> bool:
        """Return whether repeated blocks may become loops."""
        platform = self.target or self.placement.platform
        return self.blocks == "scan" or (self.blocks == "auto" and platform == "tpu")

    @property
    def finishes(self) -> bool:
        """Return whether `finished` may change a program."""
        platform = self.target or self.placement.platform
        return self.rolls or bool(patterns_for(platform, self.placement.mesh))

    def finished(self, closed: Any, trace: Trace) -> Any:
        """Return a traced `ClosedJaxpr` as it is compiled.

        Attention that is written out has a kernel, windows are whole on a mesh, and
        repeated blocks are loops where that pays. What nothing reads is left out first: it would be
        taken for a reader of the weights of attention, and keep rounds of a loop from being equal.
        """
        closed = rewritten(without_dead_results(closed), trace)
        return roll(closed, copies=self.blocks == "scan") if self.rolls else closed

    def method(self, module: torch.nn.Module, name: str) -> Callable[..., Any]:
        """Return a method of a copy of the module ("forward" goes through `__call__`), or a
        function.
        """
        hold_generators(module)
        if name in self.functions:
            return functools.partial(self.functions[name], module)
        found = module if name == "forward" else getattr(module, name)
        return found if self.links is None else self.links.around(found, module)

    def trace(self, request: TraceRequest) -> TraceResult:
        """Trace the program once (call inside a jax transformation, or with concrete arrays).

        Raises:
            PortError: The program cannot be ported exactly.
        """
        return self.casting.around(self._trace, request)

    def _trace(self, request: TraceRequest) -> TraceResult:
        self.plan = self.plan_for(request.method, request.spec)
        refused: PortError | None = None
        outside = self.outside(request.method)
        changed: list[str] = []
        last: RestartTrace | None = None
        if self.fallback is not None:
            self.fallback.observe(self, request)
        for _ in range(_MAX_ATTEMPTS):
            try:
                with outside.left_alone() as run, seen_in(outside.code.types.values()):
                    outcome = self._attempt(request, outside)
                if any(outcome.trace.recorder.tapes):
                    self.drawing.add(request.method)
                if not run.changed:
                    outcome.trace.recorder.guards.python = run.before
                    return outcome
                # A value that is set at first use (a cache, a flag) is found by a second trace.
                if changed:
                    outside.refuse(run.changed)
                changed = run.changed
            except RestartTrace as restart:
                self._learn(restart)
                # Its frames hold the attempt, with the program's arguments and the caller's model.
                last = restart.with_traceback(None)
                last.__context__ = last.__cause__ = None
            except (PortError, RuntimeError, TypeError, ValueError, IndexError) as error:
                refused = self._refused(error, refused, request)
            except (AttributeError, KeyError) as error:
                if not is_of_text(error):
                    raise
                refused = self._refused(error, refused, request)
        raise self._placed(_unsettled(request.method, last), request.method)

    def _refused(
        self, error: Exception, earlier: PortError | None, request: TraceRequest
    ) -> PortError | None:
        """Prepare another attempt after an error, or raise the first one if none is left.

        Returns:
            What to raise if that attempt fails, too; None if it is not like this one.
        """
        if isinstance(error, PortError):
            needs, found = error.code in NEEDS_VALUE, self._placed(error, request.method)
        elif reads_draw(error):
            needs, found = False, self._placed(draw_read(error), request.method)
        elif not self.dynamic or isinstance(error, UsageError) or _is_of_dtypes(error, request):
            raise error
        else:
            # The code is right in eager mode: a traced number or size was used where Python
            # needs its value, such as in an index or a dict key.
            needs, found = True, _needs_number(error)
        if self.fallback is not None and self.fallback.choose(self, error, request):
            self.plan.host_state = False
            return None
        found = earlier or found
        if needs and self.plan.try_more(request.candidates):
            return found
        raise self._explained(found) from (None if isinstance(error, PortError) else error)

    def _explained(self, refused: PortError) -> PortError:
        return refused if self.fallback is None else self.fallback.explain(refused)

    def _placed(self, error: PortError, method: str) -> PortError:
        """Give an error that was found after the method's last line the line of its definition."""
        target = self.functions.get(method) or self.function or getattr(self.master, method, None)
        code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
        if error.file is None and code is not None and not is_inside(code.co_filename):
            place = CodePlace.at(code.co_filename, code.co_firstlineno)
            error.file, error.line, error.source_line = place.file, place.line, place.source
        return error

    def outside(self, method: str) -> GlobalState:
        """Return what a method's code reads outside of the module."""
        roots = [
            one
            for one in (self.master, self.function, self.functions.get(method))
            if one is not None
        ]
        target = self.function if self.master is None else self.master
        name = getattr(target, "__name__", type(target).__name__)
        reads = CodeReads(roots, ("forward", method), self.unread)
        if self.master is not None:
            reads.leave_out(linked_cells(self.master, self.links))
        refuse_identity_tables(self.master, reads)
        return GlobalState(reads, name)

    def plan_for(self, method: str, spec: pytree.TreeSpec) -> SpeculationLog:
        """Return what is known of calls of a method with arguments of one structure."""
        shared: dict[str, Any] = {"tried": self.tried, "alone": self.alone, "numbers": self.numbers}
        shared["whole"] = method in self.whole
        plan = self.plans.setdefault((method, spec.key), SpeculationLog(**shared))
        plan.records_draws |= method in self.drawing
        return plan

    def _learn(self, restart: RestartTrace) -> None:
        self.plan.learn(restart)
        if restart.site is None:
            return
        frame_code, site = restart.site
        key = (frame_code.co_filename, site.line, site.column)
        started = time.perf_counter()
        for function in self._functions_with(frame_code, restart):
            sites = self.sites.setdefault(function, set())
            sites.add(site)
            result = live.rewrite_function(function, sites=sites, rules=self.rules)
            if isinstance(result, live.LiveRewrite):
                self.rewrites[function] = result
            else:
                self.alone.discard(frame_code)
        self.rewrite_seconds += time.perf_counter() - started
        self.plan.tried.add(key)

    def _functions_with(self, code: CodeType, restart: RestartTrace) -> list[Any]:
        """Return the user's functions whose code, original or rewritten, contains `code`."""
        ours = [f for f, r in self.rewrites.items() if any(c is code for c in nested_codes(r.code))]
        if ours or code in self.alone:
            self.alone.discard(code)
            return ours or live.functions_with(code)
        found = live.functions_that_ran(code, restart)
        self.alone |= {code} if found else set()
        return found or live.functions_with(code)

    def _attempt(self, request: TraceRequest, outside: GlobalState) -> TraceResult:
        options = TraceOptions(
            target=self.target or self.placement.platform,
            mesh=self.placement.mesh,
            placement=self.placement if self.placement.constrains else None,
            mixes_axes=self.placement.mixes_axes,
            remat=self.remat,
            takes_gradients=self.takes_gradients,
            patches=self.patches,
            hoist=request.hoist,
        )
        keys = KeyStream(request.key) if request.key is not None else None
        trace = Trace(keys, options)
        if self.plan.records_draws and request.draws:
            trace.recorder.tapes.append(Tape())
        trace.recorder.may_tape = request.draws and not trace.recorder.tapes
        trace.explorer = Explorer(trace, self.plan)
        trace.outside_values = outside.snapshot
        inference, nothing = torch.is_inference_mode_enabled(), contextlib.nullcontext()
        grad = torch.is_grad_enabled()
        with (
            held_back(),
            SWAPS,
            _quiet(),
            # Tensors made in it count no writes: a patch makes no_grad of it.
            torch.inference_mode(False) if inference else nothing,
            uncollected(),
            eager_compiled(),
            no_fused_kernels(),
            stood_in(outside.code, advances_iterator, HELD),
            live.swapped(list(self.rewrites.values())),
            nothing if self.fallback is None else self.fallback.swapped(),
            installed(p for p in self.patches if trace.recorder.tapes or not p.FOR_DRAWS),
            active(trace),
            torch.inference_mode() if inference else nothing,
        ):
            try:
                outcome = self._run(trace, request, outside)
                trace.shared.refuse_writes()
                if trace.recorder.restart is not None:
                    raise trace.recorder.restart
            except BaseException:
                # What the attempt ended in may have set it, for a `set_grad_enabled` further on.
                torch.set_grad_enabled(grad)
                trace.recorder.guards.restore(trace.is_foreign)
                if trace.recorder.restart is not None:
                    raise trace.recorder.restart from None
                raise
            finally:
                self.dynamic = trace.dynamic or trace.has_numbers
        outcome.uses_key = keys is not None and (keys.used or bool(trace.generators))
        return outcome

    def _run(self, trace: Trace, request: TraceRequest, outside: GlobalState) -> TraceResult:
        if request.checks:
            trace.error_code = Storage(jnp.zeros((), jnp.int32), trace)
        module, call, baked, check = self._callable(trace, request)
        values = request.values
        graphs = self.takes_gradients
        tree = None if module is None else state_tree(module, objects=True, graphs=graphs)
        named, memory = ({}, {}) if tree is None else (tree.modules, memory_of(tree))
        trace.own_modules = {number: fqn for fqn, (number, *_) in named.items()}
        if request.on_module is not None:
            request.on_module(module)
        args, kwargs, made, containers = traced_arguments(trace, request, self.plan.host_args)
        watch = Watch(containers, made)
        trace.note_made([*baked.values(), *made])
        before = [version(m) for m in made]
        serials = [m._storage.serial if isinstance(m, TracedTensor) else -1 for m in made]
        trace.first_serial = next(SERIALS)
        falls_back = self.fallback is not None and self.fallback.hosts
        if module is not None and tree is not None and self.blocks != "unroll" and not falls_back:
            trace.blocks = BlockCalls(trace, module)
        name = type(module).__qualname__ if module is not None else "<function>"
        roots = [module, args, kwargs]
        explorer = trace.explorer
        assert explorer is not None
        if self.hooked is not None and self.master is not None:
            values = self.hooked(trace, dict(torch.nn.Module.named_parameters(self.master)), values)
        drawn = host_randomness.Drawn(self.plan, trace.recorder.tapes, request.draws)
        held = [one for tape in trace.recorder.tapes for one in tape.held]
        with host_randomness.unchanged([*roots, *outside.generators(), *held], drawn):
            result = explorer.run_module(name, lambda: call(*args, **kwargs), roots)
        if trace.recorder.refusal is not None:
            raise trace.recorder.refusal
        if trace.has_runs:
            result = lists_joined(result)
            refuse_kept([*(module.modules() if module else ()), args, kwargs])
        trace.recorder.guards.refuse_writes(trace.is_foreign)
        after = None if module is None else state_tree(module, objects=True, graphs=graphs)
        taped_ops.hand_over(trace, after)
        # What a live module takes from outside, the script sees written, too.
        refuse_lost_effects(trace, after if graphs else tree, made, result)
        outcome = self._outcome(
            trace, module, tree, after, result, values, baked, wide=request.wide
        )
        refuse_passing(trace, outcome.out_spec, after)
        outcome.argument_changes = watch.changes()
        outputs = pytree.flatten(result, leaf=program_leaf)[0]
        if outcome.argument_changes is not None:
            put = outcome.argument_changes.leaves
            outcome.put_leaves, outcome.put_metas = program_leaves(put, wide=request.wide)
            outputs += put
        placed = [i for i, one in enumerate(serials) if one in trace.offsets_read]
        outcome.out_aliases = output_aliases(outcome, outputs, made, tree, after)
        outcome.rebound, outcome.changed = rebound(memory, after), frozenset(outcome.state)
        state_left.describe_sharing(outcome, outputs, made, tree, after)
        check(outcome.changed)
        outcome.placed = placed
        refuse_effects(request.lengths, made, before, outcome)
        _note_written(outcome, made, before)
        # Last, because results that are narrowed are checked.
        if trace.recorder.checks and trace.error_code is not None:
            outcome.error_code = trace.error_code.value
        return outcome

    def _callable(
        self, trace: Trace, request: TraceRequest
    ) -> tuple[torch.nn.Module | None, Callable[..., Any], dict[str, torch.Tensor], Any]:
        """Return the traced copy of the module, the bound method, the state that stays concrete,
        and a check of the names that the call changed.
        """
        values, known, method = request.values, request.known, request.method
        if self.master is None:
            assert self.function is not None
            function = self.function
            run = with_passes(function, None, self.passes) if self.passes else function
            return None, run, {}, lambda changed: None
        tree = state_tree(self.master, self.plan.numbers)
        by_id = {
            id(leaf): name for name, leaf in tree.leaves.items() if isinstance(leaf, torch.Tensor)
        }
        baked: dict[str, torch.Tensor] = {}
        traced: dict[str, Any] = {}

        def tensor_map(tensor: torch.Tensor) -> Any:
            name = by_id.get(id(tensor))
            if name is None or name not in values:
                return tensor
            if self.plan.host_state and name in known and _is_small_state(tensor):
                value = backend.to_torch(known[name], tensor.dtype)
                value = shared_memory.unnarrowed(value, known[name], tensor)
                baked[name] = device_mark.tag(value) if device_mark.is_tagged(tensor) else value
                return baked[name]
            # Without this, reading a tensor's size would go through the modes of the trace.
            with torch._C.DisableTorchFunction():
                traced[name] = state_tensor(trace, tensor, values[name], name in self.late)
            return traced[name]

        cloner = Cloner(tensor_map, advances_iterator)
        cloner.stand_ins = HELD
        module = cloner.clone(self.master)
        note_copy(module)
        hold_host_generators(module, self.master, trace.recorder.tapes)
        held = tree.leaves if self.held is None else self.held
        for name, leaf in tree.leaves.items():
            if name in traced:
                trace.substitutes[id(held.get(name, leaf))] = traced[name]
            elif name in self.plan.numbers and name in values:
                fqn, attribute = tree.owners[name]
                made = sym_numbers.number(values[name], type(leaf))
                module.get_submodule(fqn).__dict__[attribute] = made
        linked = overlaps.link(trace, tree.leaves, traced)

        def check(changed: frozenset[str]) -> None:
            linked(changed)
            refuse_writes_in_closures(cloner.closed)

        if self.passes and method == "forward":
            return module, with_passes(self.master, module, self.passes), baked, check
        return module, self.method(module, method), baked, check

    def _outcome(
        self,
        trace: Trace,
        module: torch.nn.Module | None,
        before: StateTree | None,
        after: StateTree | None,
        result: Any,
        values: dict[str, jax.Array],
        baked: dict[str, torch.Tensor],
        *,
        wide: bool,
    ) -> TraceResult:
        out_leaves, out_spec = pytree.flatten(result, leaf=program_leaf)
        refuse_functions(out_spec, runs_by_parts=self.takes_gradients)
        arrays, metas = program_leaves(out_leaves, wide=wide)
        outcome = TraceResult(
            arrays, out_spec, metas, {}, {}, None, trace, list(self.rewrites.values())
        )
        if module is not None and before is not None and after is not None:
            refuse_set_attributes(before.set_on, after.set_on)
            refuse_moved_parameters(before, after)
            refuse_new_ties(before, after)
            forget_random_states(before, after)
            for name, leaf in after.leaves.items():
                if extents_of(leaf):
                    raise unsized(f"the state {name!r} that the call leaves")
                if isinstance(leaf, sym_numbers.SYMBOLIC):
                    outcome.state[name] = sym_numbers.exact_value(leaf)
                elif (
                    isinstance(leaf, TracedTensor)
                    or trace.alias(leaf) is not None
                    or (name in baked and leaf._version)
                ):
                    # The stored value, because under no_grad() a read adds stop_gradient and is
                    # another array.
                    array = leaf._elem if isinstance(leaf, TracedTensor) else value_of(leaf)
                    if array is not values.get(name):
                        outcome.state[name] = array
            outcome.python_changes = python_changes(
                before, after, module, trace.is_foreign, self.takes_gradients
            )
            state_left.describe(outcome, before, after)
            outcome.baked = dict(baked)
            known = ((n, trace.inner_starts.get(id(leaf))) for n, leaf in before.leaves.items())
            outcome.inner_starts = {n: start[1] for n, start in known if start is not None}
        return outcome


def _unsettled(method: str, last: RestartTrace | None) -> PortError:
    """Return the refusal of a function of which each attempt learned something new."""
    site = None if last is None or last.site is None else last.site
    place = None if site is None else CodePlace.at(site[0].co_filename, site[1].line)
    return PortError(
        f"tracing {method} did not settle after {_MAX_ATTEMPTS} attempts, each of which found"
        " another line or number that needs a value",
        file=place and place.file,
        line=place and place.line,
        source_line=place and place.source,
        remedy="choose by torch.where in this function, or split it into modules or functions that"
        " are converted by themselves; under porting(), leave the class to eager PyTorch: --eager",
    )


_SMALL = 4096


def _is_small_state(tensor: torch.Tensor) -> bool:
    """Return whether state may be read as Python numbers: small, and not trained."""
    return not tensor.requires_grad and tensor.numel() <= _SMALL


def _is_of_dtypes(error: Exception, request: TraceRequest) -> bool:
    """Return whether torch asks for int64 where an argument of int32 may be what it was given.

    That is no number whose value is needed. JAX holds int64 in 32 bits, so the caller of the tracer
    calls again with such arguments as int64.
    """
    may_be_jax = any(getattr(meta, "dtype", None) is torch.int32 for meta in request.metas)
    return may_be_jax and wants_int64(error)


def _needs_number(error: Exception) -> PortError:
    """Return the refusal of a traced number whose value Python needed (a dict key, a format)."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_inside(f.filename)]
    last = frames[-1] if frames else None
    return PortError(
        "a number or size that depends on the program's inputs was used where its value is"
        f" needed ({error})",
        code="TPU103",
        file=last.filename if last else None,
        line=last.lineno if last else None,
        source_line=last.line if last else None,
        remedy=(
            "pass it as a Python number (it is then static), or keep it a tensor and use torch"
            " operations on it"
        ),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress jax's warning about each 64-bit dtype stored in 32 bits.

    The 64-bit torch dtypes are tracked separately from the values.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Explicitly requested dtype", category=UserWarning
        )
        yield


def _note_written(outcome: TraceResult, made: list[Any], before: list[Any]) -> None:
    """Note the arguments that the call wrote to, of the versions that they had before."""
    trace = outcome.trace
    for index, (tensor, known) in enumerate(zip(made, before, strict=True)):
        if version(tensor) != known or (
            isinstance(tensor, torch.Tensor) and trace.promoted and trace.alias(tensor) is not None
        ):
            outcome.mutated[index] = value_of(tensor)
    flow = (i for i in outcome.mutated if isinstance(made[i], TracedTensor))
    outcome.written = frozenset(i for i in flow if made[i].requires_grad and not made[i].is_leaf)
