"""What a trace draws from the host's generators: made anew before each call of its program.

A tape has the calls that draw, and those that numpy and torch make of what was drawn, in order. It
runs on the host before each call, so the numbers are those of eager Python, and so is the state of
the generators afterwards. What the program takes of the results are its last arguments.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.utils._python_dispatch import _disable_current_modes

from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.foundation.user_frames import CodePlace, user_line, user_places
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.storage import Flow, memory_of
from tpuport.tracing.core.tensor import TracedTensor, wrap
from tpuport.tracing.core.values import flat

REMEDY = (
    "draw with torch (torch.rand, torch.randint, torch.randperm), which a ported model makes fresh"
    " at each call; or draw before the call, and pass what was drawn as an argument"
)
# In place of a line: any array that the code makes may hold what was drawn.
ANY_ARRAY = ("", 0)
_NUMBERS: tuple[type, ...] = (bool, int, float, np.bool_, np.int64, np.float32, np.float64)


@dataclass(frozen=True)
class Ref:
    """The place of a value on a tape: the step that makes it, and the way to it in the result."""

    step: int
    path: tuple[int, ...] = ()


@dataclass(eq=False)
class _Step:
    """One call on the host, with the line of the user's code that makes it."""

    function: Any
    given: Any
    value: Any
    place: str
    form: Any
    # Whether a traced program can make the call itself.
    is_of_torch: bool = False
    is_read: bool = False

    @property
    def may_write(self) -> bool:
        """Return whether the call may write to what an earlier one has made."""
        if self.is_of_torch:
            return self.function._schema.is_mutable
        return self.function not in _MAKERS and _has_ref(self.given)

    def form_of(self, value: Any) -> Any:
        """Return what of a result the program depends on: of a number that Python reads, all."""
        return repr(value) if self.is_read else _form(value)


class Opaque:
    """The state of a generator, as code keeps it to set it again."""

    __module__ = "numpy"  # so that nobody looks into it

    def __init__(self, ref: Ref) -> None:
        self._ref = ref


@dataclass(eq=False)
class Tape:
    """The calls on the host of one trace.

    Attributes:
        count: The number of steps on the path that is traced; traced itself where a branch or
            loop of the program decides about it.
        around: The context in which the trace makes a call.
        arrays: Arrays of numpy that the code has made, by id, each with the file and line.
        before: The states of the generators before the last call, once there was one.
        module: The module whose generators are drawn from; None for a function.
        held: Those generators.
    """

    count: Any = 0
    around: Callable[[], Any] = contextlib.nullcontext
    arrays: dict[int, tuple[Any, tuple[str, int]]] = field(default_factory=dict)
    before: Any = None
    module: Any = None
    held: list[Any] = field(default_factory=list)
    _steps: list[_Step] = field(default_factory=list)
    _numbers: dict[int, tuple[Any, Ref]] = field(default_factory=dict)
    # By place, and by the number of calls after which the value is taken.
    _taken: dict[tuple[Any, int], jax.Array] = field(default_factory=dict)
    # Tensors of the host by id, and the addresses of their memory.
    _tensors: dict[int, tuple[torch.Tensor, Ref]] = field(default_factory=dict)
    _memory: dict[int, tuple[torch.Tensor, Ref]] = field(default_factory=dict)

    # -- while the program is traced ---------------------------------------------------------------

    def record(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any] | None = None,
        *,
        is_opaque: bool = False,
        is_of_torch: bool = False,
        is_read: bool = False,
        span: tuple[float, float] = (-math.inf, math.inf),
    ) -> Any:
        """Make a call on the host now, and before each call of the program.

        Args:
            function: What to call.
            args: The arguments, which may hold what the tape has made.
            kwargs: The keyword arguments.
            is_opaque: Whether the result is a state, of which no part is read.
            is_of_torch: Whether a program can make the call itself, of tensors.
            is_read: Whether the result is a number that the program depends on.
            span: The least and the greatest number that the result can be, or hold.

        Returns:
            The result: arrays that this tape has, and traced numbers.

        Raises:
            PortError: An argument depends on the program's inputs, or a branch or loop of the
                program decides whether the call is made.
        """
        given = self._template((args, kwargs or {}))
        if not isinstance(self.count, int):
            raise self.refusal("is made in a loop of the program, or after a branch that draws")
        number = self.count
        if number < len(self._steps):
            step = self._steps[number]
            if step.function != function or not _is_same(step.given, given):
                raise self.refusal("is made on one side of a branch on a value of the program only")
        else:
            place = user_line()
            with self.around(), _disable_current_modes(), torch._C.DisableTorchFunction():
                found, named = self._filled(given, [one.value for one in self._steps])
                value = function(*found, **named)
            step = _Step(function, given, value, place, None, is_of_torch, is_read)
            step.form = step.form_of(value)
            self._steps.append(step)
        self.count = number + 1
        if is_read:
            return step.value
        return Opaque(Ref(number)) if is_opaque else self._wrapped(step.value, Ref(number), span)

    def refusal(self, what: str, remedy: str = REMEDY) -> PortError:
        """Return the error for a draw that cannot be made before the call."""
        return port_error(f"a draw from the host's generators {what}", code="TPU404", remedy=remedy)

    def holds(self, value: Any) -> bool:
        """Return whether a value, or a part of it, is one that the tape has made."""
        if isinstance(value, (list, tuple)):
            return any(map(self.holds, value))
        if isinstance(value, dict):
            return any(map(self.holds, value.values()))
        if isinstance(value, (DrawnArray, Opaque)) or self._number(value) is not None:
            return True
        return self.has(value)

    def takes(self, value: Any) -> bool:
        """Return whether a value, or a part of it, is of the tape, and none of the program."""
        if not self.holds(value):
            return False
        parts = flat((value,), {})
        return not any(
            isinstance(one, TracedTensor)
            or (isinstance(one, sym_numbers.SYMBOLIC) and self._number(one) is None)
            for one in parts
        )

    def has(self, value: Any) -> bool:
        """Return whether a value is a tensor in memory that the tape fills."""
        if not isinstance(value, torch.Tensor) or isinstance(value, TracedTensor):
            return False
        return bool(self._memory) and memory_of(value)[0] in self._memory

    def in_program(self, tensor: torch.Tensor) -> TracedTensor:
        """Return a tensor of the program with what a tensor of the tape holds now."""
        with torch._C.DisableTorchFunction():
            ref = self._template(tensor)
        return self._taken_now(ref, tensor)

    def _taken_now(self, ref: Any, tensor: torch.Tensor) -> TracedTensor:
        now = self.count if isinstance(self.count, int) else len(self._steps)
        # As it is after the last call that may have written to it.
        while now > ref.step + 1 and not self._steps[now - 1].may_write:
            now -= 1
        const = self._constant(ref, lambda: backend.to_jax(tensor), now)
        return wrap(_in_program(const), tensor.dtype, trace=current(), flow=Flow.HIDDEN)

    def whole(self, tensor: torch.Tensor) -> TracedTensor:
        """Return a tensor of the program with all of the memory that a tensor is a window of."""
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            flat = torch.as_strided(tensor, (count,), (1,), 0)
            return self._taken_now(self._window(tensor, (count,), (1,), 0), flat)

    def is_unbalanced(self) -> bool:
        """Return whether a branch of the trace decides about what is drawn."""
        return type(self.count) is not int or self.count != len(self._steps)

    def refuse_unbalanced(self) -> None:
        """Refuse a trace in which a branch decides about what is drawn.

        Raises:
            PortError: Always.
        """
        raise port_error(
            "a branch or loop on a value of the program decides about a draw from the host's"
            " generators, or about what is made of one",
            code="TPU404",
            remedy=f"draw before the branch; or {REMEDY}",
            place=self._steps[-1].place if self._steps else None,
        )

    def _number(self, value: Any) -> Ref | None:
        if not isinstance(value, sym_numbers.SYMBOLIC):
            return None
        found = self._numbers.get(id(value.node))
        return None if found is None else found[1]

    def _template(self, value: Any) -> Any:
        """Return arguments with places on the tape for what it has made."""
        if isinstance(value, (DrawnArray, Opaque)):
            return value._ref
        if isinstance(value, sym_numbers.SYMBOLIC):
            found = self._number(value)
            if found is None:
                raise self.refusal("takes a number that depends on the program's inputs")
            return found
        if isinstance(value, TracedTensor):
            raise self.refusal("takes a tensor that depends on the program's inputs")
        if isinstance(value, torch.Tensor):
            return self._template_of_tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._template, value))
        if type(value) is dict:
            return {name: self._template(one) for name, one in value.items()}
        if isinstance(value, slice):
            return _DrawnSlice(*map(self._template, (value.start, value.stop, value.step)))
        # The caller may write to it before the next call.
        return value.copy() if isinstance(value, np.ndarray) else value

    def _template_of_tensor(self, value: torch.Tensor) -> Any:
        known = self._tensors.get(id(value))
        if known is not None:
            return known[1]
        if self.has(value):
            return self._window(value, tuple(value.shape), value.stride(), value.storage_offset())
        return _Constant(value.detach().clone())

    def _window(self, value: torch.Tensor, *part: Any) -> "_TapeWindow":
        """Return the place of a part of a tensor's memory, which torch may have made unseen."""
        of, ref = self._memory[memory_of(value)[0]]
        if of.dtype is not value.dtype:
            raise self.refusal("is seen as another dtype")
        return _TapeWindow(ref, *part)

    def _filled(self, given: Any, values: list[Any]) -> Any:
        if isinstance(given, _Constant):
            return given.tensor
        if isinstance(given, _TapeWindow):
            return torch.as_strided(self._filled(given.ref, values), *given.part)
        if isinstance(given, Ref):
            found = values[given.step]
            for index in given.path:
                found = found[index]
            return found
        if isinstance(given, _DrawnSlice):
            return slice(*(self._filled(one, values) for one in given.parts))
        if type(given) in (list, tuple):
            return type(given)(self._filled(one, values) for one in given)
        if type(given) is dict:
            return {name: self._filled(one, values) for name, one in given.items()}
        return given.copy() if isinstance(given, np.ndarray) else given

    def _wrapped(self, value: Any, ref: Ref, span: tuple[float, float]) -> Any:
        """Return a result as the traced code gets it."""
        if isinstance(value, np.ndarray):
            return DrawnArray(self, ref, value)
        if isinstance(value, _NUMBERS):
            return self._traced_number(value, ref, span)
        if type(value) in (list, tuple):
            inner = [Ref(ref.step, (*ref.path, index)) for index in range(len(value))]
            return type(value)(self._wrapped(v, r, span) for v, r in zip(value, inner, strict=True))
        if isinstance(value, torch.Tensor):
            self._tensors.setdefault(id(value), (value, ref))
            self._memory.setdefault(memory_of(value)[0], (value, ref))
            return value
        if value is None or isinstance(value, type):
            return value
        raise self.refusal(f"gives a {type(value).__name__}, which is no input of a program")

    def _traced_number(self, value: Any, ref: Ref, span: tuple[float, float]) -> Any:
        if type(value) is int and not int64.is_within((value, value), int64.INT64):
            raise self.refusal("gives an integer of more than 64 bits")
        kind = bool if type(value) in (bool, np.bool_) else type(value)
        if isinstance(value, np.generic) and kind is not bool:
            kind = int if type(value) is np.int64 else float
        const = self._constant(ref, lambda: _of_number(value, kind))
        with int64.scope():
            made = sym_numbers.number(_in_program(const).reshape(()), kind, *span)
        made.node.is_numpy = type(value) in (np.int64, np.float64, np.bool_)
        self._numbers[id(made.node)] = (made.node, ref)
        return made

    def _constant(self, ref: Any, make: Callable[[], jax.Array], after: int = 0) -> jax.Array:
        known = self._taken.get((ref, after))
        if known is None:
            with jax.ensure_compile_time_eval(), _disable_current_modes():
                with torch._C.DisableTorchFunction():
                    known = self._taken[ref, after] = make()
        return known

    # -- around it ---------------------------------------------------------------------------------

    @property
    def taken(self) -> list[jax.Array]:
        """Return what the program takes, with the values of the trace."""
        return list(self._taken.values())

    def keep(self, numbers: list[int]) -> None:
        """Keep, of what the program takes, what it uses."""
        taken = list(self._taken.items())
        self._taken = dict(taken[number] for number in numbers)

    def release(self) -> None:
        """Drop what only the trace needs."""
        for known in (self._numbers, self.arrays, self._tensors, self._memory):
            known.clear()
        self.around = contextlib.nullcontext
        for step in self._steps:
            step.value = None

    def differing(self, other: "Tape") -> str | None:
        """Return the line of the first call whose result has another size on another tape."""
        found = self._differing(other)
        return found.place if found else self._steps[-1].place if self._steps else None

    def varying(self, other: "Tape") -> str | None:
        """Return that line, if a program can make the call itself."""
        found = self._differing(other)
        return found.place if found is not None and found.is_of_torch else None

    def _differing(self, other: "Tape") -> _Step | None:
        pairs = zip(self._steps, other._steps, strict=False)
        return next((a for a, b in pairs if a.form != b.form), None)

    def __bool__(self) -> bool:
        return bool(self._steps)

    def run(self, module: Any) -> list[Any]:
        """Make the calls anew, and return what the program takes of the results.

        Args:
            module: The module whose generators are drawn from; None for a function.

        Raises:
            TapeChanged: A size, or a number that Python reads, is not that of the trace, and a
                program can make it itself.
            PortError: It cannot.
        """
        self.module = module
        values: list[Any] = []
        found: dict[tuple[Any, int], Any] = {}
        wanted: dict[int, list[tuple[Any, int]]] = {}
        for ref, after in self._taken:
            wanted.setdefault(after or ref.step + 1, []).append((ref, after))
        for step in self._steps:
            args, kwargs = self._filled(step.given, values)
            with torch.no_grad():
                value = step.function(*args, **kwargs)
            if step.form_of(value) != step.form:
                raise _changed(step, value)
            values.append(value)
            for key in wanted.get(len(values), ()):
                found[key] = self._array(key, self._filled(key[0], values))
        return [found[key] for key in self._taken]

    def _array(self, key: tuple[Any, int], value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return backend.to_jax(value)
        kinds = {"b": bool, "i": int, "f": float}
        return _of_number(value, kinds[self._taken[key].dtype.kind])


class TapeChanged(Exception):
    """Signal that what a program depends on is other than it was: another program is needed.

    `place` is the line whose result the program has to compute itself.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


def _changed(step: _Step, value: Any) -> Exception:
    if step.is_of_torch:
        return TapeChanged(step.place)
    file, _, line = step.place.rpartition(":")
    return PortError(
        f"what is made of a draw from the host's generators was {step.form} when the program was"
        f" traced, and is {step.form_of(value)} now",
        code="TPU404",
        file=file or None,
        line=int(line) if line.isdigit() else None,
        source_line=CodePlace.at(file, int(line)).source if line.isdigit() else None,
        remedy=f"keep its size the same; or {REMEDY}",
    )


@dataclass(frozen=True)
class _TapeWindow:
    """A part of the memory of a tensor on a tape."""

    ref: Ref
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def step(self) -> int:
        return self.ref.step

    @property
    def part(self) -> tuple[Any, ...]:
        return self.size, self.stride, self.offset


@dataclass(eq=False)
class _Constant:
    """A tensor of the host that does not depend on what is drawn."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class _DrawnSlice:
    start: Any
    stop: Any
    step: Any

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return self.start, self.stop, self.step


_MAKERS = (torch.Tensor, torch.from_numpy, torch.tensor, torch.as_tensor, torch.asarray)


def _has_ref(given: Any) -> bool:
    if isinstance(given, dict):
        return any(map(_has_ref, given.values()))
    return isinstance(given, (Ref, _TapeWindow)) or (
        isinstance(given, (list, tuple)) and any(map(_has_ref, given))
    )


def _of_number(value: Any, kind: type) -> jax.Array:
    """Return a number as an array of one element: jax takes one of no dimension for a literal."""
    with int64.scope():
        return jnp.asarray([kind(value)], sym_numbers.DTYPES[kind])


def _in_program(const: jax.Array) -> jax.Array:
    """Return an array as a value of the running trace, which no code takes for a known one."""
    with int64.scope():
        return lax.optimization_barrier(const)


def _form(value: Any) -> Any:
    """Return what of a result a program depends on."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return type(value).__name__, tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(_form, value))
    return type(value).__name__


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, _Constant):
        a, b = one.tensor, other.tensor
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(one, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return one is other or bool(one == other and repr(one) == repr(other))


def current_tape() -> Tape | None:
    """Return the tape of the running trace; None if its draws cannot be made before each call."""
    trace = current()
    return trace.recorder.tapes[0] if trace is not None and trace.recorder.tapes else None


def reads_draw(error: Exception) -> bool:
    """Return whether code of C has refused what stands for an array that was drawn."""
    return DrawnArray.__name__ in str(error)


def draw_read(error: Exception) -> PortError:
    """Return the refusal of code of C that reads an array that was drawn."""
    place = next(user_places(error.__traceback__), None)
    return PortError(
        f"an array that was drawn from the host's generators is read here ({error})",
        code="TPU404",
        file=place and place.file,
        line=place and place.line,
        source_line=place and place.source,
        remedy="make a tensor of it, by torch.from_numpy(...) or torch.tensor(...)",
    )


# -- arrays ----------------------------------------------------------------------------------------


def _called(value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name)


_STATIC = frozenset({"shape", "ndim", "dtype", "size", "itemsize", "nbytes", "strides"})
_PARTS = frozenset({"T", "real", "imag", "mT"})


class DrawnArray:
    """An array of numpy that a tape makes: its shape and dtype are known, and its values are not.

    It is no array of numpy itself, so no code of C reads values that are those of the trace.
    """

    __module__ = "numpy"  # so that nobody looks into it
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tape: Tape, ref: Ref, value: np.ndarray) -> None:
        self._tape, self._ref, self._value = tape, ref, value

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Answer `isinstance(x, np.ndarray)` as the array does."""
        return np.ndarray

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._tape.record(_called, (self, name, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"'numpy.ndarray' object has no attribute {name!r}")
        if name in ("tobytes", "data"):
            raise self._tape.refusal(
                "is returned, kept in an attribute, or read as bytes",
                remedy="return or keep a tensor of it, by torch.from_numpy(...)",
            )
        if name in _STATIC:
            return getattr(self._value, name)
        if name in _PARTS:
            return self._tape.record(_attribute, (self, name))
        if not callable(getattr(np.ndarray, name)):
            raise self._tape.refusal(f"is asked for its attribute {name!r}")

        return lambda *args, **kwargs: self._call(name, *args, **kwargs)

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return (self._call("__getitem__", index) for index in range(len(self)))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to give values to code that reads them, such as that of C."""
        trace = current()
        if trace is not None and trace.explorer is not None:
            plan = trace.explorer.plan
            if ANY_ARRAY not in plan.drawn_arrays:
                plan.drawn_arrays.add(ANY_ARRAY)
                raise RestartTrace(records_draws=True)
        raise self._tape.refusal(
            "is read by code that is not traced",
            remedy=f"hand it over by torch.from_numpy(...) or torch.tensor(...); {REMEDY}",
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call("__setitem__", index, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return self._tape.record(_called, (ufunc, method, *inputs), options)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._tape.record(func, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch that takes such an array: as an index, or to make a tensor."""
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            target, index, *value = args
            return func(target, _as_index(index), *value)
        found = next(one for one in (*args, *(kwargs or {}).values()) if type(one) is DrawnArray)
        raise found._tape.refusal(
            f"meets a tensor in {getattr(func, '__name__', func)}",
            remedy="make a tensor of it first, by torch.from_numpy(...) or torch.tensor(...)",
        )

    def __repr__(self) -> str:
        return f"<drawn array of shape {self.shape}>"

    def __format__(self, spec: str) -> str:
        return repr(self)


def _as_index(index: Any) -> Any:
    if type(index) is DrawnArray:
        return index._tape.record(torch.as_tensor, (index,))
    return tuple(map(_as_index, index)) if type(index) is tuple else index


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: DrawnArray, *args: Any) -> Any:
        if any(isinstance(one, torch.Tensor) for one in args):
            return NotImplemented
        made = self._call(name, *args)
        # An array that is changed in place stays that object.
        return self if name.startswith("__i") and name not in _NOT_IN_PLACE else made

    return operate


def _scalar(kind: Callable[[Any], Any]) -> Callable[[DrawnArray], Any]:
    return lambda self: kind(self.item())


_NOT_IN_PLACE = ("__invert__",)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in (
    *(f"__{way}{name}__" for name in (*_BINARY, "lshift", "rshift") for way in ("", "r", "i")),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs")),
    *(f"__{name}__" for name in ("invert", "getitem", "contains", "divmod", "copy")),
):
    if hasattr(np.ndarray, _name):
        setattr(DrawnArray, _name, _operator(_name))
for _name, _kind in {"bool": bool, "int": int, "float": float}.items():
    setattr(DrawnArray, f"__{_name}__", _scalar(_kind))
DrawnArray.__index__ = _scalar(lambda number: number.__index__())  # type: ignore[attr-defined]
