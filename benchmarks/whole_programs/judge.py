"""Runs a program by eager PyTorch and by its port, call after call, and compares all of it."""

import contextlib
import copy
import importlib.util
import itertools
import linecache
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tpuport
from benchmarks.whole_programs import compare, grammar
from benchmarks.whole_programs.compare import Difference
from benchmarks.whole_programs.programs import Call, Program
from tpuport.foundation.errors import PortError, TpuportError
from tpuport.foundation.interop import backend
from tpuport.model.parity.float64 import Float64
from tpuport.tracing.core.tensor import wrap

# Worst first. "silent" is a difference without an error.
FINDS = ("silent", "gradient", "crash", "error missed", "error made", "other error", "wrong line")
# The runs of eager PyTorch in float64, by the size of the errors that are put in.
_RUNS = (0, 1, 1, 16, 64)
_MOST_STEPS = 2
# What eager PyTorch refuses because of how it computes: the result is plain.
_OF_MEMORY = (
    "refer to a single memory location",
    "is a view and its base or another view of its base has been modified inplace",
)
# docs/promises.md excepts it: results that are one tensor on one side of a branch.
_OF_IDENTITY = re.compile(r"output\S*: the same tensor as \S+ in eager PyTorch only")
# Of two zeros of both signs, the one that these return depends on the number of elements.
_EXTREMES = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("amax", "amin", "max", "min", "maximum", "minimum")
)
# Of the processor, for one program.
_SECONDS = 2.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: one of `FINDS`, "passes", "refused", "rounding" (a difference that rounding
            explains), "excepted", "eager raises" (its first call), or "slow" (given up).
        what: the difference, or the code of the refusal.
        call: the number of the call.
        line: the text of the line that a refusal names.
        gradients: how many gradients were compared.
        calls: how many calls were compared.
    """

    kind: str
    what: str = ""
    call: int = 0
    line: str = ""
    gradients: int = 0
    calls: int = 0


class Judge:
    """Judges programs.

    Args:
        folder: where their text goes.
        seconds: the processor's time after which a program is given up.
    """

    def __init__(self, folder: Path, seconds: float = _SECONDS) -> None:
        self._folder, self._seconds = folder, seconds

    def run(self, program: Program) -> Verdict:
        """Judge a program."""
        with _loaded(program.source(), self._folder) as (model, path), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with limited(self._seconds):
                    return _Run(program, model, path).verdict()
            except TooSlow:
                return Verdict("slow")


class TooSlow(BaseException):
    """A program takes too long; no handler for `Exception` catches it."""


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model, with the values of state that its last call left on a graph of autograd."""
    kept = [
        value
        for part in model.modules()
        for value in (*part.buffers(False), *compare.flat([*vars(part).values()]).values())
    ]
    on_graph = [v for v in kept if isinstance(v, torch.Tensor) and not v.is_leaf]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in on_graph})


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise in a program whose branches have too many paths to be worth its time."""

    def give_up(_: int, frame: FrameType | None) -> None:
        while frame is not None:  # half a module would stay in sys.modules
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return
            frame = frame.f_back
        raise TooSlow

    def unraisable(ignored: "sys.UnraisableHookArgs") -> None:
        if not isinstance(ignored.exc_value, TooSlow):
            reported(ignored)

    before, reported = signal.signal(signal.SIGVTALRM, give_up), sys.unraisablehook
    # Again and again: Python reports and ignores what is raised in a callback of a weak reference
    # or of the garbage collector.
    sys.unraisablehook = unraisable
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        sys.unraisablehook = reported


@contextlib.contextmanager
def _loaded(source: str, folder: Path) -> Iterator[tuple[type[nn.Module], Path]]:
    name = f"whole_program_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module.Model, path
    finally:
        del sys.modules[name]
        linecache.cache.pop(str(path), None)
        path.unlink()


def ready(model: type[nn.Module], program: Program) -> nn.Module:
    """Return a program's module, with parameters of small fractions."""
    torch.manual_seed(0)
    made = model()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in made.parameters():  # small fractions, so that most results are exact
            one.copy_(torch.randint(-4, 5, one.shape, generator=draw) / 4)
    return made.train(program.train)


@dataclass
class Result:
    """What a call gave.

    Attributes:
        values: the output, the arguments and the state after it, by path.
        error: what it raised.
        outputs: where `values` are gradients, the output that they are of.
    """

    values: dict[str, Any]
    error: Exception | None = None
    outputs: dict[str, Any] = field(default_factory=dict)


class _Found(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.kind)
        self.verdict = verdict


class _AskingForGraphs(TorchFunctionMode):
    """Asks each operand for its `grad_fn` before it is used.

    A view that was made before its base got a gradient has no `grad_fn` until somebody asks, and
    eager PyTorch refuses to write to it as to a leaf.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in args:
            if isinstance(one, torch.Tensor):
                _ = one.grad_fn
        return func(*args, **(kwargs or {}))


class _OtherZeros(TorchFunctionMode):
    """Gives extremes that are zero the other sign."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _EXTREMES:
            return out
        values = out if isinstance(out, torch.Tensor) else out[0]
        other = torch.where(values == 0, -values, values)
        return other if isinstance(out, torch.Tensor) else type(out)((other, *out[1:]))


class _Run:
    """One program's calls."""

    def __init__(self, program: Program, model: type[nn.Module], path: Path) -> None:
        self.program, self.path = program, path
        self.eager = ready(model, program)
        self.ported: Any = None
        self.model = model
        self.number, self.gradients, self.calls = 0, 0, 0
        self._steps: dict[Any, Any] = {}
        self.refused: _Found | None = None  # of gradients: the calls go on

    def verdict(self) -> Verdict:
        """Make all calls."""
        try:
            for number, call in enumerate(self.program.calls):
                self.number = number
                self._call(call)
        except _Found as found:
            passes = found.verdict.kind == "passes"
            return (self.refused if passes and self.refused else found).verdict
        return (self.refused or self._end("passes")).verdict

    def _end(self, kind: str, what: str = "", line: str = "") -> _Found:
        return _Found(Verdict(kind, what, self.number, line, self.gradients, self.calls))

    def _call(self, call: Call) -> None:
        before = copied(self.eager)
        want = eager(self.eager, call)
        if want.error is not None and not self.number:
            raise self._end("eager raises", _said(want.error))
        if self.ported is None:
            self.ported = tpuport.convert(
                ready(self.model, self.program), verify=self.program.verify
            )
        # Gradients at NaN are left out: a zero cotangent times NaN is NaN, no cotangent is zero.
        odd = call.kind in ("nan", "inf")
        if want.error is None and self.refused is None and not odd:
            self._gradients(before, call, want)
        have = self._port(call)

        def again(mode: Any) -> Result:
            return eager(copied(before), call, mode)

        self._errors(want, have, again)
        if want.error is not None:
            # Eager has left a state, and arguments, that are half changed; the port has not.
            raise self._end("passes", "ends with an error")
        self._same("silent", want, have, again)
        self.calls += 1

    def _port(self, call: Call) -> Result:
        given = call.arguments()
        try:
            out = tpuport.to_torch(self.ported(*given))
            return Result(_values(out, given, self.ported.to_torch()))
        except TpuportError as error:
            raise self._refused(error) from None
        except Exception as error:
            return Result({}, error)

    def _refused(self, error: TpuportError) -> _Found:
        if isinstance(error, tpuport.ParityError):
            if _OF_IDENTITY.search(str(error)):
                return self._end("excepted", str(error))
            return self._end("silent", f"found by verification: {str(error)[:300]}")
        code = getattr(error, "code", None) or type(error).__name__
        message = getattr(error, "message", str(error)).partition("\n")[0]
        what = f"{code} {message}"
        file, number = getattr(error, "file", None), getattr(error, "line", None)
        if not isinstance(error, PortError) or file is None or number is None:
            return self._end("refused", what, "no line")
        text = self.program.source().splitlines()
        if Path(file) != self.path or number <= text.index(grammar.FORWARD.rstrip()):
            return self._end("wrong line", what, f"{file}:{number}")
        return self._end("refused", what, text[number - 1].strip())

    def _errors(self, want: Result, have: Result, again: Callable[[Any], Result]) -> None:
        """Compare what was raised."""
        a, b = want.error, have.error
        if _compatible(a, b):
            return
        if any(_compatible(again(mode).error, b) for mode in _modes()):
            raise self._end("rounding")
        if b is None and any(text in str(a) for text in _OF_MEMORY):
            raise self._end("passes", "ends with an error of memory")
        if b is None and again(_AskingForGraphs()).error is None:
            raise self._end("passes", "ends with an error that depends on who asks for grad_fn")
        if b is None:
            raise self._end("error missed", f"eager raises {_said(a)}")
        if a is not None:
            raise self._end("other error", f"{_said(b)} for {_said(a)}")
        if _where(b).startswith(self.path.name):
            raise self._end("error made", _said(b))
        raise self._end("crash", f"{_said(b)} at {_where(b)}")

    def _same(self, kind: str, want: Result, have: Result, again: Callable[[Any], Result]) -> None:
        """Compare values; ask eager PyTorch in float64 where they differ."""
        try:
            compare.equal(want.values, have.values)
            return
        except Difference as difference:
            first = difference
        if first.kind == "excepted":
            raise self._end("excepted", str(first))
        other = again(_OtherZeros())
        if other.error is None and not _differs(_nearer(want, other, have), have.values):
            raise self._end("excepted", f"the sign of a zero: {first}")
        others = []
        for mode in _modes():
            other = again(mode)
            if other.error is not None:
                raise self._end("rounding", str(first))
            others.append(other.values)
        try:
            compare.equal(want.values, have.values, others)
        except Difference as difference:
            raise self._end(kind, f"{difference.kind}: {difference}") from None
        raise self._end("rounding", str(first))

    def _gradients(self, before: nn.Module, call: Call, forward: Result) -> None:
        """Compare the gradients of the parameters and of x and y."""
        # Eager refuses to write to an argument that has a gradient.
        raised = None
        for inputs in (True, False):

            def again(mode: Any, inputs: bool = inputs) -> Result:
                return eager_gradients(copied(before), call, mode, inputs=inputs)

            want = again(None)
            if want.error is None:
                break
            raised = want.error
        else:
            return
        # A `try` of the program may have caught an error of autograd's.
        if _has_nan(want.outputs) or _differs(forward.values, want.outputs):
            return
        given = [backend.to_jax(one) for one in call.arguments()]
        if self._step_key(given, inputs=inputs) is None:
            return
        try:
            have = self._ported_gradients(given, inputs=inputs)
        except TpuportError as error:
            self.refused = self.refused or self._refused(error)
            return
        except Exception as error:
            if _compatible(error, raised):
                return  # for `jax.grad` all floating arguments can have a gradient
            raise self._end("crash", f"under jax.grad: {_said(error)} at {_where(error)}") from None
        for name, gradient in want.values.items():
            # Eager's NaN is a zero cotangent times an infinite derivative, which a port may leave
            # out; where eager's is infinite, another order of sums gives NaN.
            ours = have.values[name]
            odd = gradient.isnan() | (gradient.isinf() & ~ours.isfinite())
            have.values[name] = torch.where(odd, gradient, ours)
        self._same("gradient", want, have, again)
        self.gradients += 1

    def _ported_gradients(self, given: list[jax.Array], *, inputs: bool) -> Result:
        count = 2 if inputs else 0
        step = self._steps[self._step_key(given, inputs=inputs)]
        found = step(self.ported.params, given[:count], self.ported.buffers, given[count:])
        params, args = jax.tree.map(backend.to_torch, found)
        return Result({**params, **dict(zip(("x", "y"), args, strict=False))})

    def _step_key(self, given: list[jax.Array], *, inputs: bool) -> Any:
        """Make a step unless there is one for this Python state, and return its key.

        A program whose state changes often has steps for two of its states: compiling takes most of
        the time.
        """
        key = (self.ported._state_version, len(given[0]), inputs)
        if key not in self._steps:
            if len(self._steps) == _MOST_STEPS:
                return None
            self._steps[key] = jax.jit(jax.grad(self._loss, argnums=(0, 1)))
        return key

    def _loss(self, params: Any, floats: Any, buffers: Any, rest: Any) -> jax.Array:
        # JAX has no int64 by default, and eager PyTorch refuses some indices of int32.
        whole = [wrap(one, torch.int64) if one.dtype == jnp.int32 else one for one in rest]
        out, _ = self.ported.apply(params, buffers, jax.random.key(0), *floats, *whole)
        total = jnp.zeros(())
        for path, one in compare.flat(out, "['output']").items():
            if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jnp.floating):
                total += jnp.sum(one.astype(jnp.float32) * _weights(one.shape, path))
        return total


def _values(out: Any, given: Any, module: nn.Module, mode: Any = None) -> dict[str, Any]:
    """Return the results of a call by path, safe from later writes."""
    found = compare.flat({"output": out, "argument": given, "state": compare.state(module)})
    held = mode.value if isinstance(mode, Float64) else lambda t: t.detach().clone()
    return {p: held(v) if isinstance(v, torch.Tensor) else v for p, v in found.items()}


def _modes() -> Iterator[Float64]:
    for seed, errors in enumerate(_RUNS):
        yield Float64(errors, seed)


def eager(module: nn.Module, call: Call, mode: Any = None) -> Result:
    """Make a call, in a mode if one is given."""
    given = call.arguments()
    try:
        with mode or contextlib.nullcontext():
            out = module(*given)
    except Exception as error:
        return Result({}, error)
    return Result(_values(out, given, module, mode))


def eager_gradients(module: nn.Module, call: Call, mode: Any, *, inputs: bool) -> Result:
    """Return the gradients of a call by the parameters and, if asked, by x and y."""
    given = call.arguments()
    floats = {"x": given[0].requires_grad_(), "y": given[1].requires_grad_()} if inputs else {}
    wanted = {**dict(module.named_parameters()), **floats}
    held = mode.value if isinstance(mode, Float64) else lambda t: t
    try:
        with mode or contextlib.nullcontext():
            total = torch.zeros((), requires_grad=True) * 1
            # No leaves, which eager refuses to write to.
            passed = [one.clone() if one.requires_grad else one for one in given]
            outputs = compare.flat(module(*passed), "['output']")
            for path, one in outputs.items():
                if isinstance(one, torch.Tensor) and one.is_floating_point():
                    weights = torch.from_numpy(_weights(one.shape, path))
                    total = total + (one.float() * weights).sum()
            found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    except Exception as error:
        return Result({}, error)
    made = dict(zip(wanted, found, strict=True))
    gradients = {n: torch.zeros_like(wanted[n]) if g is None else held(g) for n, g in made.items()}
    return Result(gradients, outputs=outputs)


def _has_nan(outputs: dict[str, Any]) -> bool:
    tensors = [one for one in outputs.values() if isinstance(one, torch.Tensor)]
    return any(bool(one.isnan().any()) for one in tensors)


def _differs(forward: dict[str, Any], outputs: dict[str, Any]) -> bool:
    """Return whether an output is not the one of a call without gradients."""
    try:
        compare.equal(outputs, {path: forward.get(path) for path in outputs})
    except Difference:
        return True
    return False


def _nearer(one: Result, other: Result, to: Result) -> dict[str, Any]:
    """Return the values of one result, or of the other for elements that are equal there."""

    def chosen(path: str, value: Any) -> Any:
        second, wanted = other.values.get(path), to.values.get(path)
        tensors = [v for v in (value, second, wanted) if isinstance(v, torch.Tensor)]
        if len(tensors) < 3 or len({v.shape for v in tensors}) > 1:
            return value
        return torch.where(tensors[1] == tensors[2], tensors[1], tensors[0])

    return {path: chosen(path, value) for path, value in one.values.items()}


def _weights(shape: Any, path: str) -> np.ndarray:
    """Return small fractions that float32 holds exactly."""
    count, start = int(np.prod(shape)), sum(map(ord, path))
    numbers = (np.arange(count) * 7 + start) % 9 - 4.0
    return (numbers / 4).reshape(tuple(shape)).astype(np.float32)


def _compatible(a: Exception | None, b: Exception | None) -> bool:
    """Return whether code that catches one error would catch the other too."""
    if a is None or b is None:
        return a is b
    return isinstance(a, type(b)) or isinstance(b, type(a))


def _said(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"
