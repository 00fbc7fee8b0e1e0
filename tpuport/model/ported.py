"""A ported model: the jitted calls, its state as pytrees, and the way back to torch."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import jaxpr_as_fun

from tpuport.errors import PortError, UsageError
from tpuport.model import arguments, backend, structure
from tpuport.model.program import Outcome, Program, Request
from tpuport.model.report import PortReport, Retrace
from tpuport.model.state import clone_module, state_tree

_HOIST_BYTES = 16 * 1024
_SAME_STATE_LIMIT = 4


@dataclass
class Compiled:
    """One compiled program: for one method and one signature of arguments and state."""

    run: Callable[..., Any]
    hoisted: list[jax.Array]
    outcome: Outcome
    signature: "Signature"
    names: list[str]
    baked: dict[str, jax.Array]


@dataclass(frozen=True)
class Signature:
    """What a call is compiled for.

    `parts` names each argument with its type, for explaining a retrace.
    """

    method: str
    key: Any
    parts: tuple[tuple[str, str], ...] = field(compare=False)


class PortedModel:
    """A PyTorch module (or function) that runs as one jitted JAX program.

    Made by `tpuport.convert`. Call it like the module; `params` and `buffers` are dicts of
    `jax.Array` keyed by the torch fqn (frozen parameters are in `buffers`: an optimiser made over
    `params` never sees them).
    """

    def __init__(
        self,
        target: torch.nn.Module | Callable[..., Any],
        *,
        methods: tuple[str, ...],
        report: PortReport,
        checks: bool,
        precision: str | None,
    ) -> None:
        is_module = isinstance(target, torch.nn.Module)
        self._source = target
        self.report = report
        self.methods = methods
        self._checks = checks
        self._precision = precision
        self.params: dict[str, jax.Array] = {}
        self.buffers: dict[str, jax.Array] = {}
        master = None
        if is_module:
            master, _ = clone_module(target, lambda t: t)
            self._load_state(master)
        self._program = Program(None if is_module else target, master)
        self._cache: dict[Signature, Compiled] = {}
        self._state_version = 0
        self._state_changes: dict[str, int] = {}
        self._same_changes: dict[Any, int] = {}
        self._verifier: Any = None

    # -- state -------------------------------------------------------------------------------------

    def _load_state(self, master: torch.nn.Module) -> None:
        tree = state_tree(master)
        for name, leaf in tree.leaves.items():
            if name not in tree.registered:
                continue  # a plain attribute is a host constant until a call changes it
            trainable = isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad
            target = self.params if trainable else self.buffers
            if leaf.device.type == "meta":
                stand_in: Any = jax.ShapeDtypeStruct(
                    tuple(leaf.shape), backend.jax_dtype(leaf.dtype)
                )
                target[name] = stand_in
            else:
                target[name] = backend.to_jax(leaf)

    @property
    def module(self) -> torch.nn.Module:
        """The ported copy of the module.

        Its structure and Python state (the weights live in `params`).

        Raises:
            UsageError: a function was ported, not a module.
        """
        if self._program.master is None:
            msg = "this is a ported function; it has no module"
            raise UsageError(msg)
        return self._program.master

    @property
    def frozen(self) -> dict[str, jax.Array]:
        """The part of `buffers` that are parameters with `requires_grad=False`, by fqn."""
        owners = dict(self.module.named_parameters())
        return {name: value for name, value in self.buffers.items() if name in owners}

    @property
    def training(self) -> bool:
        """Whether the ported copy is in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> "PortedModel":
        """Set training mode, as `nn.Module.train` (the next call may trace again)."""
        self.module.train(mode)
        self._state_version += 1
        return self

    def eval(self) -> "PortedModel":
        """Set evaluation mode, as `nn.Module.eval`."""
        return self.train(False)

    def _values(self) -> dict[str, Any]:
        return {**self.buffers, **self.params}

    def to_torch_view(self) -> torch.nn.Module:
        """`to_torch()` sharing the user's own parameter tensors where they have not been changed
        since.
        """
        return self.to_torch()

    def to_torch(self) -> torch.nn.Module:
        """A plain PyTorch module with the current weights and buffers, of the user's own class
        (`save_pretrained` works).

        Raises:
            UsageError: a function was ported, or the model was on the meta device (there are no
                weights).
        """
        values = self._values()
        tree = state_tree(self.module)
        names = {id(leaf): name for name, leaf in tree.leaves.items()}

        def back(tensor: torch.Tensor) -> torch.Tensor:
            value = values.get(names.get(id(tensor), ""))
            if value is None:
                return tensor
            if isinstance(value, jax.ShapeDtypeStruct):
                msg = "to_torch() needs weights; this model was converted from the meta device"
                raise UsageError(msg)
            made = backend.to_torch(value, tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            return made

        made = clone_module(self.module, back)[0]
        for name in self._program.numbers & values.keys():
            # A Python number that became state of the program: `master` holds what it was then.
            fqn, attribute = tree.owners[name]
            owner = made.get_submodule(fqn)
            owner.__dict__[attribute] = type(owner.__dict__[attribute])(values[name])
        return made

    # -- calls -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` (or the ported function): one jitted program per signature of arguments.

        Raises:
            PortError: the code cannot be ported exactly, or its result differs from eager's.
            UsageError: an argument is of a kind that cannot be passed.
        """
        return self._call("forward", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.__dict__.get("methods", ()):
            program = self.__dict__.get("_program")
            where = (
                ""
                if program is None or program.master is None
                else f" of a ported {type(program.master).__name__}"
            )
            msg = (
                f"{name!r} is not a ported method{where}; to call a method of the module, name it:"
                f" tpuport.convert(model, methods=('forward', {name!r}))"
            )
            raise AttributeError(msg)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._verifier is not None and method not in self._verifier.done:
            return self._verified_call(method, args, kwargs)
        return self._run(method, args, kwargs, None)[0]

    def _run(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: jax.Array | None
    ) -> tuple[Any, dict[str, Any]]:
        """One jitted call; gives the output and the state before it."""
        leaves, spec, paths = arguments.take_apart((args, kwargs))
        values, metas = arguments.argument_arrays(leaves, paths)
        state = self._values()
        signature = self._signature(method, values, metas, paths, spec)
        compiled = self._cache.get(signature)
        if compiled is None or any(state[n] is not v for n, v in compiled.baked.items()):
            compiled = self._compile(signature, state, values, metas, spec)
            # Tracing may have found that it needs the value of an argument: then that is part of
            # the signature.
            signature = self._signature(method, values, metas, paths, spec)
            self._cache[signature] = compiled
            timing = _compile_times(self.report)
        else:
            timing = contextlib.nullcontext()
        if key is None:
            key = _fresh_key() if compiled.outcome.uses_key else _NO_KEY()
        picked = {name: state[name] for name in compiled.names}
        with timing:
            outs, new_state, mutated, put, code = compiled.run(picked, key, values)
        self._raise_failed_check(compiled, code)
        arguments.refuse_shared_memory(leaves, paths, mutated)
        arguments.write_leaves(leaves, mutated)
        outcome = compiled.outcome
        if outcome.argument_changes is not None:
            left = list(map(arguments.from_program, put, outcome.put_metas))
            outcome.argument_changes.write_back(spec, leaves, left)
        self._advance(compiled, new_state)
        results = list(map(arguments.from_program, outs, outcome.out_metas))
        return structure.rebuild(outcome.out_spec, results), state

    def _verified_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call of a method: eager PyTorch runs beside it on the same random numbers."""
        from tpuport.model import verify

        self._refuse_meta(self._values())
        verifier = self._verifier
        key = _fresh_key()
        given = arguments.copies((args, kwargs))
        expected, module, after = verifier.reference(method, args, kwargs, key)
        out, before = self._run(method, args, kwargs, key)
        with self.report.timed("verify"):
            records = verifier.compare("output", "output", expected, out)
            records += verifier.compare("mutated argument", "argument", after, (args, kwargs))
            if module is not None:
                records += verify.state_parity(verifier, module, before)
        self.report.add(*records)
        self.report.verified = all(r.ok for r in records)
        verifier.done.add(method)
        if not self.report.verified:
            verify.fail(verifier, method, given[0], given[1], key, before)
        return out

    def verify(
        self, *args: Any, method: str = "forward", gradients: bool = True, **kwargs: Any
    ) -> PortReport:
        """Compare outputs, changed buffers and gradients with eager PyTorch on these arguments.

        Adds to `report`.

        Raises:
            ParityError: something differs beyond the tolerance.
        """
        from tpuport.model import verify

        verifier = verify.Verifier(self, self._source, None)
        key = _fresh_key()
        if gradients:
            with self.report.timed("verify"):
                records = verify.gradient_parity(verifier, method, args, kwargs, key)
            self.report.add(*records)
        saved, self._verifier = self._verifier, verifier
        try:
            self._verified_call(method, args, kwargs)
        finally:
            self._verifier = saved
        if not self.report.ok:
            self.report.verified = False
            verify.fail(verifier, method, args, kwargs, key, self._values())
        return self.report

    def trace_now(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace, compile and check a method on example arguments.

        The state and the arguments stay as they were before.
        """
        params, buffers = dict(self.params), dict(self.buffers)
        if any(isinstance(v, jax.ShapeDtypeStruct) for v in self._values().values()):
            self.eval_shape(*args, method=method, **kwargs)
            self.report.why_not_verified = "the model is on the meta device and has no weights"
            return
        master, version = (
            clone_module(self._program.master, lambda t: t)[0] if self._program.master else None,
            self._state_version,
        )
        self._call(method, *arguments.copies((args, kwargs)))
        self.params, self.buffers = params, buffers
        if self._state_version != version:
            self._program.master = master
            self._state_version = version
            self._state_changes.clear()
            self._same_changes.clear()

    def apply(
        self,
        params: dict[str, Any],
        buffers: dict[str, Any],
        rng: jax.Array | None,
        *args: Any,
        method: str = "forward",
        **kwargs: Any,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The pure function behind the call, for use under `jax.jit`, `jax.grad`, `jax.vmap` of
        your own.

        Args:
            params: trainable parameters by fqn, as `self.params`.
            buffers: all other state by fqn, as `self.buffers`.
            rng: a key (`jax.random.key(0)`); None if the function draws no random numbers.
            *args: the method's arguments: torch tensors, jax arrays, or any structure of them.
                Non-tensors are static.
            method: which method.
            **kwargs: the method's keyword arguments.

        Returns:
            The output in its own structure with `jax.Array` leaves, and the buffers after the call.

        Raises:
            UsageError: a parameter or buffer is missing.
            PortError: the code cannot be ported exactly.
        """
        values = self._checked_values(params, buffers)
        leaves, spec, paths = arguments.take_apart((args, kwargs))
        arrays, metas = arguments.argument_arrays(leaves, paths)
        key = None if rng is None else _as_key(rng)
        with self._precision_scope():
            known = {n: v for n, v in values.items() if not isinstance(v, jax.core.Tracer)}
            request = Request(method, values, key, arrays, metas, spec, checks=False, known=known)
            request.known_leaves = {
                i: a for i, a in enumerate(arrays) if not isinstance(a, jax.core.Tracer)
            }
            outcome = self._program.trace(request)
        out = structure.rebuild(outcome.out_spec, outcome.out_leaves)
        changed = {name: value for name, value in outcome.state.items() if name not in params}
        return out, {**buffers, **changed}

    def _checked_values(self, params: dict[str, Any], buffers: dict[str, Any]) -> dict[str, Any]:
        values = {**buffers, **params}
        missing = [name for name in self._values() if name not in values]
        if missing:
            msg = (
                "apply() got no value for"
                f" {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}; pass"
                " params=ported.params and buffers=ported.buffers, or dicts with the same keys"
            )
            raise UsageError(msg)
        return {
            name: backend.to_jax(v) if isinstance(v, torch.Tensor) else v
            for name, v in values.items()
        }

    # -- compiling ---------------------------------------------------------------------------------

    def _signature(
        self,
        method: str,
        values: list[Any],
        metas: list[Any],
        paths: list[str],
        spec: structure.Spec,
    ) -> Signature:
        parts = tuple(
            (path, "generator" if meta is None else f"{str(meta.dtype)[6:]}{list(meta.shape)}")
            for path, meta in zip(paths, metas, strict=True)
        )
        kinds = tuple(
            None if meta is None else (meta.dtype, tuple(meta.shape), meta.stride())
            for meta in metas
        )
        key = (
            spec.key,
            kinds,
            self._state_version,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
        )
        host = self._program.plan_for(method, spec).host_args
        if host:
            read = {paths[i]: np.asarray(values[i]) for i in sorted(host)}
            key = (*key, tuple((path, value.tobytes()) for path, value in read.items()))
            parts += tuple((f"value of {path}", _shown(value)) for path, value in read.items())
        return Signature(method, key, parts)

    def _compile(
        self,
        signature: Signature,
        state: dict[str, Any],
        values: list[Any],
        metas: list[Any],
        spec: structure.Spec,
    ) -> Compiled:
        self._note_retrace(signature)
        self._refuse_meta(state)
        hoisted: dict[int, tuple[torch.Tensor, jax.Array]] = {}
        held: dict[str, Outcome] = {}
        concrete, given = dict(state), dict(enumerate(values))

        def hoist(tensor: torch.Tensor) -> jax.Array | None:
            if tensor.numel() * tensor.element_size() < _HOIST_BYTES:
                return None
            known = hoisted.get(id(tensor))
            if known is None:
                with jax.ensure_compile_time_eval():
                    known = hoisted[id(tensor)] = (tensor, backend.to_jax(tensor))
            return known[1]

        def pure(state: dict[str, Any], key: jax.Array, values: list[Any]) -> Any:
            request = Request(
                signature.method,
                state,
                key,
                values,
                metas,
                spec,
                hoist,
                self._checks,
                concrete,
                given,
            )
            outcome = self._program.trace(request)
            host = self._program.plan.host_args
            outcome.host_paths = [signature.parts[i][0].lstrip(".") for i in sorted(host)]
            held["outcome"] = outcome
            code = (
                outcome.error_code if outcome.error_code is not None else jnp.zeros((), jnp.int32)
            )
            put = outcome.put_leaves
            return outcome.out_leaves, outcome.state, outcome.mutated, put, code

        start = time.perf_counter()
        with self._precision_scope():
            closed, shape = jax.make_jaxpr(pure, return_shape=True)(state, _NO_KEY(), values)
        traced = time.perf_counter()
        run, big = _executable(closed, shape, (state, _NO_KEY(), values))
        outcome = held["outcome"]
        baked = {name: state[name] for name in outcome.baked}
        compiled = Compiled(run, big, outcome, signature, list(state), baked)
        self._note(outcome, hoisted, traced - start)
        _release(outcome)
        return compiled

    def _precision_scope(self) -> Any:
        if self._precision is None:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self._precision)

    def _refuse_meta(self, state: dict[str, Any]) -> None:
        missing = [name for name, value in state.items() if isinstance(value, jax.ShapeDtypeStruct)]
        if missing:
            msg = (
                "the model was converted from the meta device:"
                f" {missing[0]!r} has a shape but no value, so it cannot be"
                " called; use ported.eval_shape(...) or compile it for a described TPU"
            )
            raise UsageError(msg)

    def eval_shape(self, *args: Any, method: str = "forward", **kwargs: Any) -> Any:
        """Trace without computing.

        The output's structure with a `jax.ShapeDtypeStruct` at each leaf (meta models too).
        """
        leaves, spec, paths = arguments.take_apart((args, kwargs))
        shapes, metas = [], []
        for leaf, path in zip(leaves, paths, strict=True):
            meta = arguments.meta_argument(leaf, path)
            metas.append(meta)
            shapes.append(jax.ShapeDtypeStruct(tuple(meta.shape), backend.jax_dtype(meta.dtype)))
        held: dict[str, Outcome] = {}

        def pure(state: Any, key: Any, values: Any) -> Any:
            request = Request(method, state, key, values, metas, spec, checks=False)
            held["outcome"] = self._program.trace(request)
            return held["outcome"].out_leaves

        out = jax.eval_shape(pure, self._values(), _NO_KEY(), shapes)
        return structure.rebuild(held["outcome"].out_spec, out)

    def _note_retrace(self, signature: Signature) -> None:
        earlier = [s for s in self._cache if s.method == signature.method]
        if not earlier:
            return
        last = earlier[-1]
        was, now = dict(last.parts), dict(signature.parts)
        causes = [
            f"{path}: {was.get(path, 'absent')} -> {now.get(path, 'absent')}"
            for path in dict.fromkeys([*was, *now])
            if was.get(path) != now.get(path)
        ]
        if not causes and last.key[2] != signature.key[2]:
            names = ", ".join(self._state_changes) or "training mode"
            causes = [f"state of the module changed: {names}"]
        if not causes and last.key[0] != signature.key[0]:
            causes = [
                "a non-tensor argument changed:"
                f" {_static_difference(last.key[0], signature.key[0])}"
            ]
        if not causes:
            causes = ["strides, grad mode or default dtype changed"]
        self.report.retraces.append(Retrace(signature.method, len(earlier), tuple(causes)))

    def _note(self, outcome: Outcome, hoisted: dict[int, Any], seconds: float) -> None:
        from tpuport.model import notes

        notes.record(self.report, outcome, [t for t, _ in hoisted.values()])
        timing = self.report.timing
        self.report.timing = dataclasses.replace(timing, trace=timing.trace + seconds)

    # -- after a call ------------------------------------------------------------------------------

    def _raise_failed_check(self, compiled: Compiled, code: jax.Array) -> None:
        checks = compiled.outcome.trace.checks
        if checks and self._checks:
            failed = int(code)
            if failed:
                raise checks[failed - 1].error

    def _advance(self, compiled: Compiled, new_state: dict[str, jax.Array]) -> None:
        for name, value in new_state.items():
            target = self.params if name in self.params else self.buffers
            if name not in target:
                self._state_version += 1
            target[name] = value
        changes = compiled.outcome.python_changes
        if changes:
            self._apply_python_state(compiled, changes)

    def _apply_python_state(self, compiled: Compiled, changes: Any) -> None:
        self._state_version += 1
        master = self.module
        for name in changes.names:
            count = self._state_changes[name] = self._state_changes.get(name, 0) + 1
            # A table that grows with the arguments changes once for each shape: only a change at
            # the same ones counts.
            repeated = (name, compiled.signature.method, compiled.signature.key[:2])
            self._same_changes[repeated] = self._same_changes.get(repeated, 0) + 1
            if self._same_changes[repeated] >= _SAME_STATE_LIMIT:
                raise PortError(
                    f"the Python attribute {name!r} of the module changes at every call, so"
                    " each call is another program",
                    code="TPU405",
                    remedy=(
                        "register it as a buffer (self.register_buffer(name, torch.zeros(())))"
                        " and update that"
                    ),
                )
            again = count >= 2 and self._same_changes[repeated] >= 2
            if again and isinstance(changes.after.get(name), (bool, int, float)):
                self._promote_number(name, changes.after[name])
        self._program.master = changes.apply(master)
        if changes.replacement is not None:
            self._adopt(changes.replacement)
        for name, value in changes.host_state.items():
            target = self.params if name in self.params else self.buffers
            target[name] = backend.to_jax(value)
        for name in changes.gone:
            self.buffers.pop(name, None)

    def _adopt(self, master: torch.nn.Module) -> None:
        """Sort the state again after a call that exchanged submodules."""
        tree = state_tree(master)
        values = self._values()
        trainable = {n for n, p in master.named_parameters() if p.requires_grad}
        kept = {name: values[name] for name in tree.leaves if name in values}
        self.params = {n: v for n, v in kept.items() if n in trainable}
        self.buffers = {n: v for n, v in kept.items() if n not in trainable}

    def _promote_number(self, name: str, value: Any) -> None:
        """A Python number that changes at each call becomes state of the program."""
        self._program.numbers.add(name)
        self.buffers[name] = jnp.asarray(value)


_STAGES = {
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


@contextlib.contextmanager
def _compile_times(report: PortReport) -> Iterator[None]:
    """Add the seconds that jax spends lowering and compiling inside the block to the report."""
    active = True

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        del details
        stage = _STAGES.get(event)
        if active and stage is not None:
            spent = getattr(report.timing, stage) + duration_secs
            report.timing = dataclasses.replace(report.timing, **{stage: spent})

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        active = False
        jax.monitoring.unregister_event_duration_listener(listen)


def _shown(value: np.ndarray) -> str:
    return np.array2string(value, threshold=8, separator=", ").replace("\n", "")


def _static_difference(was: Any, now: Any) -> str:
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        for a, b in zip(was, now, strict=True):
            if a != b:
                return _static_difference(a, b)
    return f"{was!r} -> {now!r}"


def _fresh_key() -> jax.Array:
    """A key from torch's default generator.

    `torch.manual_seed` makes the sequence of calls reproducible.
    """
    return backend.key_of(int(torch.randint(0, 2**62, (), dtype=torch.int64).item()))


_KEYS: list[jax.Array] = []


def _NO_KEY() -> jax.Array:
    if not _KEYS:
        _KEYS.append(jax.random.key(0))
    return _KEYS[0]


def _as_key(rng: Any) -> jax.Array:
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng
    return jax.random.wrap_key_data(rng)


def _executable(
    closed: Any, shape: Any, example: Any
) -> tuple[Callable[..., Any], list[jax.Array]]:
    """A jitted callable of (state, key, values).

    Large constants are arguments of it, not literals in it.
    """
    big = [c for c in closed.consts if getattr(c, "nbytes", 0) >= _HOIST_BYTES]
    small = {i: c for i, c in enumerate(closed.consts) if getattr(c, "nbytes", 0) < _HOIST_BYTES}
    treedef = jax.tree.structure(shape)

    @jax.jit
    def run(consts: list[jax.Array], state: Any, key: jax.Array, values: Any) -> Any:
        rest = iter(consts)
        all_consts = [small[i] if i in small else next(rest) for i in range(len(closed.consts))]
        flat = jax.tree.leaves((state, key, values))
        program = jaxpr_as_fun(closed.replace(consts=all_consts))
        return jax.tree.unflatten(treedef, program(*flat))

    del example
    return lambda state, key, values: run(big, state, key, values), big


def _release(outcome: Outcome) -> None:
    """Drop the tracers that a finished trace still holds, keeping what later calls need."""
    outcome.out_leaves = []
    outcome.state = {}
    outcome.mutated = {}
    outcome.put_leaves = []
    if outcome.argument_changes is not None:
        outcome.argument_changes.leaves = []
    outcome.error_code = None
    outcome.baked = {}
    trace = outcome.trace
    trace.constants.clear()
    trace.promoted.clear()
    trace.substitutes.clear()
    trace.hoist = None
    trace.keys = None
    trace.error_code = None
